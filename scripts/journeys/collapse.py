"""A reward that falls to nothing after the learning rate was raised a hundredfold: seen, undone, guarded against."""

import json
from pathlib import Path

from learner.report.metrics import FILE
from scripts.chaos.polling import JsonLines
from scripts.journeys.narration import Failed, Journey, rows

GOOD, TOO_HIGH = "5.0e-4", "0.05"
BEFORE, AFTER, MENDED, LAST = 40, 60, 15, 25
SMALL = ("--set", "evaluation.every_steps=20", "--set", "checkpoint.every_steps=20")
GUARD = "limits.ess=roll_back below 0.3"
REWARD = "critic/rewards/mean"
WATCHED = {"training/ess": 0.8, "actor/ppo_kl_k3": 0.08, REWARD: 0.5}
"""Numbers of docs/howto/reward-collapse.md, with the bound that they cross (KL from below)."""


def travel(journey: Journey) -> None:
    """All of it. Raises Failed."""
    folder = journey.folder / "runs" / "mine"
    journey.say("A run that learns, and a learning rate that is raised when it goes on")
    journey.run(
        "slipstream", "train", "--name", "mine", "--steps", str(BEFORE), *SMALL, tell=[r"finished", r"^reward "]
    )
    journey.run(
        "slipstream", "train", "--resume", "runs/mine", "--steps", str(AFTER), "--set", f"learner.lr={TOO_HIGH}",
        tell=[r"changed: learner.lr", r"guard: .*ess", r"^reward "],
    )  # fmt: skip

    journey.say("What moved first?")
    journey.run("slipstream", "top", "runs/mine", "--once", tell=[r"guard: .*training/ess"])
    journey.run("slipstream", "plot", "runs/mine", tell=[r"summary\.png"])
    moved = first_moves(folder)
    journey.facts["moved_at_step"] = moved
    for name, step in moved.items():
        journey.note(f"{name} is beyond its bound from step {step} on")

    journey.say("Go back to the checkpoint before, with the rate of before")
    journey.run(
        "slipstream", "train", "--name", "mended", "--model", f"runs/mine/checkpoints/step_{BEFORE}",
        "--steps", str(MENDED), *SMALL, tell=[r"finished", r"^reward "],
    )  # fmt: skip
    journey.facts["greedy"] = greedy(journey.folder / "runs" / "mine") + greedy(journey.folder / "runs" / "mended")[-1:]

    journey.say("The same mistake with a guard: the run goes back by itself, and stops with a code")
    said = journey.run(
        "slipstream", "train", "--resume", "runs/mended", "--steps", str(LAST), "--set", f"learner.lr={TOO_HIGH}",
        "--set", GUARD, codes=(1,), tell=[r"guard: .*roll", r"run stopped: .*\[SLIP-"],
    )  # fmt: skip
    journey.facts["code"] = said.rstrip().rpartition("[")[2].rstrip("]")
    journey.run("slipstream", "explain", journey.facts["code"], tell=[r"^Cause", r"^Mend"])

    journey.say("Nothing is lost: resume with the rate of before")
    journey.run(
        "slipstream", "train", "--resume", "runs/mended", "--set", f"learner.lr={GOOD}",
        tell=[r"changed: learner.lr", rf"finished {LAST} steps", r"^reward "],
    )  # fmt: skip
    journey.facts["greedy"].append(greedy(journey.folder / "runs" / "mended")[-1])
    if journey.facts["greedy"][-1] < journey.facts["greedy"][0]:
        raise Failed(f"the mended run answers no better than at the start: {json.dumps(journey.facts)}")


def first_moves(folder: Path) -> dict[str, int]:
    """The first step at which each watched number was beyond its bound, in that order. Raises Failed: one never was."""
    found = {}
    for name, bound in WATCHED.items():
        beyond = [
            int(row["step"])
            for row in rows(folder)
            if row["step"] > BEFORE and (value := row.get(name)) is not None
            and (value > bound if "kl" in name else value < bound)
        ]  # fmt: skip
        if not beyond:
            raise Failed(f"{name} never crossed {bound}: the run did not collapse")
        found[name] = beyond[0]
    return dict(sorted(found.items(), key=lambda one: one[1]))


def greedy(folder: Path) -> list[float]:
    """Greedy accuracy by version."""
    scores = {
        row["version"]: value
        for row in JsonLines.read(folder / FILE)
        for name, value in row.items()
        if name.startswith("val-core/") and name.endswith("/greedy")
    }
    return [scores[version] for version in sorted(scores)]
