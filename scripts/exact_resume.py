"""`python -m scripts.exact_resume --kills 50 --seed 1`: kill -9 again and again, and compare every digest.

One run of the quick start's model, in which the learner, replay, or both are killed at random moments, some of them
inside a checkpoint write. The launcher starts them again in place. Afterwards

- every step that was made again must have the digest, and the groups in the order, that it had the first time;
- a playback of the journal from step 0, without any engine, must reproduce the digest of every step.

Standard output ends with one object of JSON; the exit code is 0 only when all is equal.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = {"learner": r" learner\.train ", "replay": r" replay\.main "}
POLL_S = 0.01
STEP_LIMIT_S = 180.0
"""For the first step after a kill; the run is given up as hung after it."""
END_LIMIT_S = 600.0
CHECKPOINT_EVERY = 4


class Hung(RuntimeError):
    """The run made no step in time, or ended by itself."""


@dataclass(slots=True)
class Watched:
    """The run under test, seen from outside."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    counts: Counter[str] = field(default_factory=Counter)

    def ledger(self) -> list[dict[str, Any]]:
        """Whole lines of ledger.jsonl."""
        path = self.folder / "ledger.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def newest_step(self) -> int:
        """The highest step that was ever committed."""
        return max((line["step"] for line in self.ledger()), default=0)

    def pids(self, role: str) -> list[int]:
        """Processes of this run in a role."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                except OSError:
                    continue  # it has just ended
                if re.search(ROLES[role], command) and f"{self.folder}/config.yaml" in command:
                    found.append(int(entry.name))
        return sorted(found)

    def is_writing_a_checkpoint(self) -> bool:
        """Whether a checkpoint folder is there that is not complete."""
        return any(not (f / "COMPLETE").exists() for f in (self.folder / "checkpoints").glob("step_*"))

    def wait_until(self, condition: Any, limit_s: float, what: str) -> None:
        """Poll; raises Hung when the time is over or the run has ended."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise Hung(f"the run ended with exit code {self.process.returncode} while waiting for {what}")
            if time.monotonic() > deadline:
                raise Hung(f"waited {limit_s:g} s for {what}")
            time.sleep(POLL_S)


def kill(run: Watched, roles: tuple[str, ...], rng: random.Random) -> None:
    """SIGKILL one process of each role (of the learner: any rank, or torchrun)."""
    for role in roles:
        pids = run.pids(role)
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)
            run.counts[role] += 1


def torment(run: Watched, kills: int, rng: random.Random) -> None:
    """Kill at random moments, each time after the run has made a step that it had not made before."""
    run.wait_until(lambda: run.newest_step() >= 2, STEP_LIMIT_S, "the first steps")
    for number in range(kills):
        roles = rng.choice([("learner",), ("learner",), ("replay",), ("learner", "replay")])
        in_checkpoint = "learner" in roles and number % 3 == 0
        if in_checkpoint:
            run.wait_until(run.is_writing_a_checkpoint, STEP_LIMIT_S, "a checkpoint write")
            time.sleep(rng.random() * 0.05)
            run.counts["inside a checkpoint write"] += run.is_writing_a_checkpoint()
        else:
            time.sleep(rng.random() * 2)
        before = run.newest_step()
        sys.stderr.write(f"kill {number + 1} of {kills}: {' and '.join(roles)} at step {before}\n")
        kill(run, roles, rng)
        run.wait_until(lambda: run.newest_step() > before, STEP_LIMIT_S, f"step {before + 1} after kill {number + 1}")  # noqa: B023


def compare(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps that were made more than once, and those whose digest or groups were not the same each time."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    different = [
        step for step, made in by_step.items() if len({(m["digest"], json.dumps(m["groups"])) for m in made}) > 1
    ]
    trained = [tuple(group) for made in by_step.values() for group in made[-1]["groups"]]
    return {
        "steps": len(by_step),
        "repeated": sum(len(made) - 1 for made in by_step.values()),
        "different": different,
        "trained": len(trained),
        "trained_twice": len(trained) - len(set(trained)),
    }


def command(args: argparse.Namespace) -> list[str]:
    """The run."""
    settings = {
        "run.dir": args.dir,
        "run.seed": args.seed,
        "learner.total_steps": 10**6,
        "learner.restarts": 10**6,
        "replay.restarts": 10**6,
        "replay.journal_keep": "all",
        "checkpoint.every_steps": CHECKPOINT_EVERY,
        "rollout.groups_per_step": 16,
        "evaluation.every_steps": 0,
        "tracking.live": "plain",
        "tracking.plot": "false",
    }
    sets = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "learner.main", "--name", "exact", *sets, *args.set_arguments()]


def play(folder: Path) -> dict[str, Any]:
    """Train the journal again from step 0; what the playback says of the digests."""
    arguments = ["--set", "tracking.plot=false", "--set", "tracking.live=off"]
    made = subprocess.run(
        [sys.executable, "-m", "learner.main", "--replay", str(folder), *arguments],
        stdout=subprocess.PIPE, check=False, timeout=1800,
    )  # fmt: skip
    lines = made.stdout.decode().strip().splitlines()
    return json.loads(lines[-1]) if lines else {"steps": 0, "equal": 0}


class Arguments(argparse.Namespace):
    """Options of the command."""

    kills: int
    seed: int
    dir: Path
    set: list[str]

    def set_arguments(self) -> list[str]:
        """`--set` options to hand on."""
        return [text for value in self.set for text in ("--set", value)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.exact_resume", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of run folders (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    args = parser.parse_args(namespace=Arguments())
    args.dir = args.dir.absolute()
    folder = args.dir / "exact"
    if folder.exists():
        sys.stderr.write(f"exact_resume: {folder} exists; remove it or take another --dir\n")
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    log = args.dir / "exact.log"
    hung = ""
    with log.open("wb") as output:
        run = Watched(folder, subprocess.Popen(command(args), stdout=output, stderr=subprocess.STDOUT))
        try:
            torment(run, args.kills, random.Random(args.seed))
        except Hung as error:
            hung = f"{error}; the end of {log}: {log.read_text(errors='replace')[-600:]}"
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(END_LIMIT_S)
    found = compare(run.ledger())
    played = play(folder)
    result = {
        "kills": args.kills,
        **run.counts,
        **found,
        "hung": hung,
        "playback_steps": played["steps"],
        "playback_equal": played["equal"],
    }
    sys.stdout.write(json.dumps(result) + "\n")
    good = not hung and not found["different"] and not found["trained_twice"]
    return 0 if good and played["steps"] == played["equal"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
