"""`python -m scripts.compare_staleness`: what `wait`, `mask` and `drop` do to long answers (replay.on_stale).

Three runs of the quick start's model with answers of forced lognormal lengths, so that long groups take longer than the
lag bound allows: the same prompts, lengths and seed, only the policy differs. For each it reports how much was dropped,
masked or leased again, the mean length of the answers that were trained and of all prompts up to then, whatever became
of them (a difference is a length bias), and the time of a step relative to `wait`. The last line is one object of JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.loading import ConfigError, load
from learner.launch.launcher import Launcher
from learner.main import run
from learner.report.lag import ReportError, read_rows, report
from learner.report.live_view import LiveView
from replay.prompts import PromptSource, load_rows, stream_seed
from scripts.bench.server import forced_length
from scripts.compare_corrections import CompareError, run_module

ROOT = Path(__file__).parents[1]
POLICIES = ("wait", "mask", "drop")
GROUP_SIZE, GROUPS = 4, 8
MEDIAN, SIGMA, CAP = 24, 0.9, 240


def with_room(model: Path, out: Path) -> Path:
    """A copy of the quick start's model that takes answers of CAP tokens; what it answers does not matter here."""
    copy = out / "model-for-long-answers"
    shutil.copytree(model, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 2 * CAP
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def train(policy: str, model: Path, data: Path, out: Path, *, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """One run to its end, and its numbers.

    Raises:
        CompareError: the run failed or left no rows.
    """
    name = f"stale-{policy}-lag{lag}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = {
        "model.path": model,
        "data.train": data / "train.jsonl",
        "run.dir": out,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 0,
        "rollout.group_size": GROUP_SIZE,
        "rollout.groups_per_step": GROUPS,
        "rollout.max_new_tokens": CAP,
        "rollout.max_running": 64,
        "replay.on_stale": policy,
        "algorithm.drop_zero_advantage": "false",
        "limits.flat_reward_steps": 0,
        "limits.zero_gradient_steps": 0,
        "placement.split": "1:1",
        "tracking.live": "off",
        "tracking.plot": "false",
        "replay.async_lag": lag,
        "run.seed": seed,
        "run.name": name,
        "learner.total_steps": steps,
    }
    config = load("quickstart", [f"{key}={value}" for key, value in settings.items()])
    servers = ("scripts.bench.server", "--median", str(MEDIAN), "--sigma", str(SIGMA))
    if run(Launcher(config, False, LiveView(config, "off"), server_command=servers)) != 0:
        raise CompareError(f"{out / name}: the run failed; look at its logs/")
    try:
        rows = [row for row in read_rows(out / name / "metrics.jsonl") if "response_length/mean" in row]
        lags = report(out / name)
    except ReportError as error:
        raise CompareError(str(error)) from error
    if not rows:
        raise CompareError(f"{out / name}: no step in metrics.jsonl; look at its logs/")
    groups = [tuple(g) for line in ledger(out / name) for g in line["groups"]]
    prompts = first_prompts(data, seed, len(groups) + int(rows[-1]["buffer/dropped"]))
    trained = float(np.mean([row["response_length/mean"] for row in rows]))
    tokens = sum(row["response_length/mean"] for row in rows) * GROUPS * GROUP_SIZE
    last = rows[-1]
    return {
        "dropped": int(last["buffer/dropped"]),
        "dropped_share": round(last["buffer/dropped"] / (last["buffer/dropped"] + len(groups)), 4),
        "leased_again": int(last["buffer/stale_leased_again"]),
        "masked_share": round(last["buffer/tokens_masked"] / tokens, 4),
        "mean_length_trained": round(trained, 2),
        "mean_length_of_all": round(drawn_length(prompts, seed), 2),
        "mean_lag": round(lags["mean_lag"], 3),
        "step_s": float(np.median([row["timing_s/step"] for row in rows[1:]])),
    }


def ledger(run: Path) -> list[dict[str, Any]]:
    """What was trained, step by step."""
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]


def first_prompts(data: Path, seed: int, count: int) -> list[tuple[int, int]]:
    """The prompts that the run took first, whatever became of them."""
    source = PromptSource(load_rows(data / "train.jsonl"), shuffle=True, seed=seed)
    return [source.next()[:2] for _ in range(count)]


def drawn_length(groups: list[tuple[int, int]], seed: int) -> float:
    """Mean of the lengths that these prompts' answers were given before anybody sampled them."""
    lengths = [
        forced_length(stream_seed(seed, pass_, index), answer, median=MEDIAN, sigma=SIGMA, limit=CAP)
        for pass_, index in groups
        for answer in range(GROUP_SIZE)
    ]
    return float(np.mean(lengths))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The three side by side."""
    lines = [
        "| on_stale | dropped | leased again | masked | mean length trained | of all prompts | mean lag | step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, found in results.items():
        lines.append(
            f"| `{policy}` | {found['dropped']} ({found['dropped_share']:.1%}) | {found['leased_again']} |"
            f" {found['masked_share']:.1%} | {found['mean_length_trained']} | {found['mean_length_of_all']} |"
            f" {found['mean_lag']} | × {found['step_over_wait']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_staleness", description=__doc__)
    parser.add_argument("--lag", type=int, default=1, help="replay.async_lag of all runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    args = parser.parse_args()
    out, data = args.out.resolve(), ROOT / "data" / f"sort6-seed{args.seed}"
    results: dict[str, dict[str, Any]] = {}
    try:
        run_module(["learner.examples.sort6", "--out", str(data), "--seed", str(args.seed)])
        model = with_room(data / "model", out)
        for policy in POLICIES:
            results[policy] = train(policy, model, data, out, lag=args.lag, seed=args.seed, steps=args.steps)
            results[policy]["step_over_wait"] = round(results[policy]["step_s"] / results["wait"]["step_s"], 3)
    except (CompareError, ConfigError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"compare_staleness: {error}\n")
        return 1
    sys.stdout.write(table(results) + "\n" + json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
