"""`python -m scripts.chaos resume --kills 50 --seed 1`: kill -9 again and again, and compare every digest.

In a run of the quick start's model the learner, replay, or both are killed at random moments, some inside a checkpoint
write, and started again in place. A step that was made again must have the digest, and the groups in the order, that it
had the first time; a playback of the journal from step 0, without any engine, must reproduce every digest.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from scripts.chaos import processes
from scripts.chaos.cluster import LAUNCHER, ROOT, SHOWN, Cluster
from scripts.chaos.polling import Ended, Hung, JsonLines
from scripts.chaos.report import State, say

OPTIONS: dict[str, tuple[Any, str]] = {
    "kills": (50, "how many"),
    "set": ([], "a key of the configuration, a.b=c"),
}
STEP_S = 180.0  # for the first step after a kill; the run is given up as hung after it
END_S, PLAYBACK_S = 600.0, 1800.0
SETTINGS = """
    run.name=run learner.total_steps=1000000 learner.restarts=1000000 replay.restarts=1000000 replay.journal_keep=all
    checkpoint.every_steps=4 rollout.groups_per_step=16 evaluation.every_steps=0
"""
ROLES = (("learner",), ("learner",), ("replay",), ("learner", "replay"))


def plan(args: argparse.Namespace) -> list[random.Random]:
    return [random.Random(f"{args.seed}/{number}") for number in range(args.kills)]


def run(kills: list[random.Random], state: State, args: argparse.Namespace) -> None:
    with Cluster(state.work) as cluster:
        try:
            if (cluster.folder / "config.yaml").exists():
                cluster.watch.poll()
                cluster.launch([], sys.executable, "-m", "learner.main", "--resume", str(cluster.folder), local=True)
            else:
                own = (f"run.dir={state.work}", f"run.seed={args.seed}", *args.set)
                cluster.launch([*SETTINGS.split(), *SHOWN, *own], local=True)
            inject_kills(cluster, kills, state)
        except (Hung, Ended) as error:
            raise type(error)(f"{error}; {cluster.output(LAUNCHER)} ends: {cluster.last_words()}") from error
        finally:
            launcher = cluster.started[LAUNCHER]
            launcher.send_signal(SIGTERM)
            launcher.wait(END_S)


def inject_kills(cluster: Cluster, kills: list[random.Random], state: State) -> None:
    """Kill at random moments, each time after the run has made a step that it had not made before."""
    history, watch = cluster.history, cluster.watch
    goal, what = history.high + 2, "the first steps"
    for number, rng in list(enumerate(kills))[len(state.done) :]:
        cluster.wait(lambda: history.high >= goal, what, STEP_S)  # noqa: B023
        roles, inside = rng.choice(ROLES), 0
        if "learner" in roles and number % 3 == 0:
            cluster.wait(lambda: watch.writes_checkpoint, "a checkpoint write", STEP_S)
            cluster.rest(rng.random() * 0.05)
            inside = int(watch.writes_checkpoint)
        else:
            cluster.rest(rng.random() * 2)
        goal, what = history.high + 1, f"step {history.high + 1} after kill {number + 1}"
        say(f"kill {number + 1} of {len(kills)}: {' and '.join(roles)} at step {history.high}")
        killed = {}
        for role in roles:  # of the learner any rank
            pids = cluster.pids(role)
            killed[role] = int(bool(pids) and processes.send(rng.choice(pids), SIGKILL))
        state.add({**killed, "inside a checkpoint write": inside})
    cluster.wait(lambda: history.high >= goal, what, STEP_S)


def verdict(state: State, hung: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    counts: Counter[str] = Counter()
    for killed in state.done:
        counts.update(killed)
    folder = state.work / "run"
    found, (steps, equal) = compare(JsonLines.read(folder / "ledger.jsonl")), play(folder)
    wrong = [f"step {step} was made again with another digest or other groups" for step in found["different"]]
    wrong += [f"{found['trained_twice']} groups are trained twice"] if found["trained_twice"] else []
    wrong += [] if steps == equal > 0 else [f"the playback made {steps} steps, {equal} with their digest"]
    played = {"playback_steps": steps, "playback_equal": equal}
    return {"kills": args.kills, **counts, **found, "hung": hung, **played}, wrong


def compare(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def play(folder: Path) -> tuple[int, int]:
    """Train the journal again from step 0; steps, and how many of them have their digest."""
    words = ("--replay", str(folder), "--set", "tracking.plot=false", "--set", "tracking.live=off")
    command = [sys.executable, "-m", "learner.main", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=PLAYBACK_S)
    lines = done.stdout.decode().strip().splitlines()
    found = json.loads(lines[-1]) if lines else {"steps": 0, "equal": 0}
    return found["steps"], found["equal"]
