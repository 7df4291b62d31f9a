"""`python -m tests.replay.simulation --seeds 10000`: whole runs around the pure replay service, with every fault.

Each seed is a run with a configuration of its own (lag 0 to 4, every on_stale, partial rollouts, dynamic sampling, one
or two ranks) in which replay, the learner and rollout servers are killed at any moment, the disk fills up, messages are
lost, doubled and swapped, and a learner that was resumed may make other weights than before. Independent books see only
what peers see (tests/replay/simulation/books.py). After the faults every run must make ten more steps.

Progress goes to standard error. The last line is JSON; the exit code is 1 when a promise was broken.
"""

import argparse
import json
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Any

from configs import Config
from tests.replay.simulation.world import Faults, World

MOVES = 120
CHUNK = 25
FINDINGS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""A broken promise, and whatever else replay raises; the other seeds go on."""
COUNTS = (
    "crashes", "learner_restarts", "servers_killed", "disk_full", "diverged", "rolled_back", "lag_lowered", "steps",
    "repeated", "leases", "acks/accepted", "acks/superseded", "acks/rejected", "dropped", "evaluations", "prefixes",
)  # fmt: skip
FAULTS = ("replay_crash", "learner_kill", "server_kill", "disk_full", "stall", "lease_failure")


def settings(seed: int) -> tuple[Config, Faults, int, int]:
    """Configuration, faults, rows and servers of a seed."""
    rng = Random(f"settings {seed}")
    tree: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"train": "unused", "eval": "unused", "max_prompt_tokens": 4},
        "rollout": {"group_size": 2, "groups_per_step": rng.choice([1, 2, 3]), "max_new_tokens": 8, "max_running": 4},
        "replay": {
            "async_lag": rng.randint(0, 4),
            "on_stale": rng.choice(["wait", "wait", "mask", "drop"]),
            "lease_s": 10,
            "max_attempts": rng.choice([2, 4, 50]),
            "partial_rollouts": rng.random() < 0.4,
            "journal_keep": rng.choice(["checkpoint", "all"]),
            "wait_for_learner_s": 1e6,
        },
        "algorithm": {"dynamic_sampling": rng.random() < 0.3, "max_flat_drops": rng.choice([0.5, 2.0])},
        "reward": {"max_error_rate": 1.0},
        "learner": {"batch_deadline_s": 1e6, "max_tokens_per_microbatch": 16},
        "evaluation": {"every_steps": rng.choice([0, 1, 3]), "num_prompts": 2, "deadline_s": 30},
        "checkpoint": {"every_steps": rng.choice([0, 2, 4]), "keep": rng.choice([1, 2])},
        "placement": {"device": "cpu", "split": f"1:{rng.choice([1, 2])}"},
    }
    tree["rollout"]["wait_for_servers_s"] = 1e6
    tree["weight_bus"] = {"heartbeat_s": 0.2}
    replay = tree["replay"]
    if replay["on_stale"] == "wait" and replay["async_lag"] and Random(f"substitute {seed}").random() < 0.3:
        replay |= {"on_stale": "substitute", "substitute_after_s": 8}
    rates = {name: rng.choice([0.0, 0.01, 0.04]) for name in FAULTS}
    rates |= {"noise": rng.choice([0.0, 0.0, 0.02]), "salted": rng.choice([0.0, 0.5])}
    num_rows, num_servers = rng.randint(4, 12), rng.choice([1, 2, 3])
    rates |= {"rolls_back": rng.choice([0.0, 0.5]), "lowers_lag": rng.choice([0.0, 0.1])}
    rates["bus"] = rng.choice([0.0, 0.1])
    return Config.model_validate(tree), rates, num_rows, num_servers


def simulate(seed: int) -> tuple[Counter[str], str | None]:
    """What happened in the run of one seed, and what was wrong with it."""
    config, faults, num_rows, num_servers = settings(seed)
    world = World(config, seed, faults, num_rows=num_rows, num_servers=num_servers)
    try:
        world.run(MOVES)
    except FINDINGS as error:
        trace = "\n".join(world.trace)
        where = "".join(traceback.format_exception(error)[-4:])
        return world.counts, f"seed {seed}: {config.replay} {faults}\n{trace}\n{where}"
    return world.counts, None


def simulate_many(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    counts, problems = Counter[str](), list[str]()
    heard = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds:
            found, problem = simulate(seed)
            counts += found
            problems += [problem] if problem is not None else []
    finally:
        logging.disable(heard)
    return counts, problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-at", type=int, default=5, help="stop after so many violations")
    args = parser.parse_args(arguments)
    seeds = range(args.first, args.first + args.seeds)
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    counts: Counter[str] = Counter()
    done, problems = 0, list[str]()
    with ProcessPoolExecutor(args.processes) as pool:
        for chunk, (found, wrong) in zip(chunks, pool.map(simulate_many, chunks), strict=True):
            done, counts, problems = done + len(chunk), counts + found, problems + wrong
            sys.stdout.writelines(problem + "\n" for problem in wrong)
            if done % (20 * CHUNK) == 0:
                sys.stderr.write(f"{done} of {len(seeds)} seeds, {len(problems)} violations\n")
            if len(problems) >= args.stop_at:
                pool.shutdown(cancel_futures=True)
                break
    result = {"seeds": done, "violations": len(problems)} | {name: counts[name] for name in COUNTS}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
