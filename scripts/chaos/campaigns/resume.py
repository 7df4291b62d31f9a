"""`python -m scripts.chaos resume --kills 50 --seed 1`: kill -9 again and again, and compare every digest.

One run of the quick start's model, in which the learner, replay, or both are killed at random moments, some of them
inside a checkpoint write. The launcher starts them again in place. Afterwards

- every step that was made again must have the digest, and the groups in the order, that it had the first time;
- a playback of the journal from step 0, without any engine, must reproduce the digest of every step.

Standard output ends with one object of JSON; the exit code is 0 only when all is equal.
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
from scripts.chaos.cluster import LAUNCHER, Cluster
from scripts.chaos.polling import Ended, Hung, JsonLines
from scripts.chaos.report import State, conclude, end_on_sigterm, say
from scripts.chaos.settings import ROOT

STEP_S = 180.0
"""For the first step after a kill; the run is given up as hung after it."""
END_S, PLAYBACK_S = 600.0, 1800.0
SETTINGS = (
    "run.name=run",
    "learner.total_steps=1000000",
    "learner.restarts=1000000",
    "replay.restarts=1000000",
    "replay.journal_keep=all",
    "checkpoint.every_steps=4",
    "rollout.groups_per_step=16",
    "evaluation.every_steps=0",
    "tracking.live=plain",
    "tracking.plot=false",
)
ROLES = (("learner",), ("learner",), ("replay",), ("learner", "replay"))


def inject_kills(cluster: Cluster, kills: int, seed: int, state: State) -> None:
    """Kill at random moments, each time after the run has made a step that it had not made before."""
    account = cluster.watch.account
    first = account.high + 2
    cluster.wait(lambda: account.high >= first, "the first steps", STEP_S)
    for number in range(len(state.done), kills):
        rng = random.Random(f"{seed}/{number}")
        roles, inside = rng.choice(ROLES), 0
        if "learner" in roles and number % 3 == 0:
            cluster.wait(lambda: cluster.watch.writes_checkpoint, "a checkpoint write", STEP_S)
            cluster.rest(rng.random() * 0.05)
            inside = int(cluster.watch.writes_checkpoint)
        else:
            cluster.rest(rng.random() * 2)
        before = account.high
        say(f"kill {number + 1} of {kills}: {' and '.join(roles)} at step {before}")
        counts = {role: kill(cluster, role, rng) for role in roles}
        state.add({**counts, "inside a checkpoint write": inside})
        wanted = f"step {before + 1} after kill {number + 1}"
        cluster.wait(lambda: account.high > before, wanted, STEP_S)  # noqa: B023


def kill(cluster: Cluster, role: str, rng: random.Random) -> int:
    """SIGKILL one process of a role (of the learner: any rank, or torchrun); how many were there to kill."""
    pids = cluster.pids(role) + (cluster.pids("torchrun") if role == "learner" else [])
    return int(bool(pids) and processes.send(rng.choice(pids), SIGKILL))


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


def play(folder: Path) -> dict[str, Any]:
    """Train the journal again from step 0; what the playback says of the digests."""
    words = ("--replay", str(folder), "--set", "tracking.plot=false", "--set", "tracking.live=off")
    command = [sys.executable, "-m", "learner.main", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=PLAYBACK_S)
    lines = done.stdout.decode().strip().splitlines()
    return json.loads(lines[-1]) if lines else {"steps": 0, "equal": 0}


def run(state: State, kills: int, seed: int, sets: Sequence[str]) -> str:
    """The run and its kills; what hung, if anything."""
    with Cluster(state.work, probes=False) as cluster:
        try:
            if (cluster.folder / "config.yaml").exists():
                cluster.watch.poll()
                cluster.launch(
                    command=(sys.executable, "-m", "learner.main", "--resume", str(cluster.folder)), local=True
                )
            else:
                cluster.launch([*SETTINGS, f"run.dir={state.work}", f"run.seed={seed}", *sets], local=True)
            inject_kills(cluster, kills, seed, state)
        except (Hung, Ended) as error:
            return f"{error}; the end of {cluster.output(LAUNCHER)}: {cluster.last_words()}"
        finally:
            if LAUNCHER in cluster.started:
                launcher = cluster.started[LAUNCHER].process
                launcher.send_signal(SIGTERM)
                launcher.wait(END_S)
    return ""


def main(argv: Sequence[str]) -> int:
    """Command line; exit code 1 unless every digest is equal."""
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos resume", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder for the run, also to go on in; default: a new one"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    args = parser.parse_args(argv)
    try:
        state = State(args.work, "resume", {"kills": args.kills, "seed": args.seed, "set": args.set})
    except ValueError as error:
        parser.error(str(error))
    end_on_sigterm()
    hung = run(state, args.kills, args.seed, args.set)
    counts: Counter[str] = Counter()
    for killed in state.done:
        counts.update(killed)
    folder = state.work / "run"
    found, played = compare(JsonLines.read(folder / "ledger.jsonl")), play(folder)
    result = {
        "kills": args.kills,
        **counts,
        **found,
        "hung": hung,
        "playback_steps": played["steps"],
        "playback_equal": played["equal"],
    }
    in_order = not hung and not found["different"] and not found["trained_twice"]
    code = conclude(result, [hung] if hung else [], in_order=in_order and played["steps"] == played["equal"] > 0)
    if code == 0:
        state.remove()
    return code
