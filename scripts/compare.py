"""`python -m scripts.compare corrections|staleness`: the quick start's task under several settings, side by side.

corrections  What the off-policy correction is worth: the loss `ppo_clip`, whose ratio against the behaviour logprobs is
             the correction, and `policy_gradient`, which has none; evaluation curves and the mean lag of both.
staleness    What `replay.on_stale` does to long answers: `wait`, `mask` and `drop` with answers of forced lognormal
             lengths; a mean length trained that differs from that of all prompts is a length bias.

All runs of a comparison have the same model, prompts, seed and lag. The last line is one line of JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from configs.loading import ConfigError, load
from learner.launch.launcher import Launcher
from learner.main import run
from learner.report.lag import report
from learner.report.live_view import LiveView
from learner.report.metrics import MetricsError, read_rows
from learner.report.summary import evaluations
from replay.prompts import PromptSource, load_rows, stream_seed
from scripts.bench.core import table
from scripts.bench.server import forced_length

LOSSES = {
    "ppo_clip": {"algorithm.loss": "ppo_clip"},
    "off": {"algorithm.loss": "policy_gradient", "algorithm.i_know_this_is_biased": "true"},
}
LAST = 3
"""Evaluations that a run's value is the mean of."""
GROUP_SIZE, GROUPS = 4, 8
MEDIAN, SIGMA, CAP = 24, 0.9, 240


class CompareError(RuntimeError):
    """A run failed, or left nothing to compare."""


def train(name: str, args: argparse.Namespace, data: Path, settings: dict[str, Any], *server: str) -> Path:
    """One run of the quick start's task to its end; its folder. Raises CompareError."""
    given = {
        "run.name": f"{name}-lag{args.lag}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}",
        "run.dir": args.out.resolve(),
        "run.seed": args.seed,
        "model.path": data / "model",
        "data.train": data / "train.jsonl",
        "data.eval": data / "eval.jsonl",
        "replay.async_lag": args.lag,
        "learner.total_steps": args.steps,
        "checkpoint.every_steps": 0,
        "tracking.live": "off",
        "tracking.plot": "false",
    }
    config = load("quickstart", [f"{key}={value}" for key, value in (given | settings).items()])
    launcher = Launcher(config, False, LiveView(config, "off"), **({"server_command": server} if server else {}))
    if run(launcher) != 0:
        raise CompareError(f"{config.run_dir}: the run failed; look at its logs/")
    return Path(config.run_dir)


def corrections(args: argparse.Namespace, data: Path) -> tuple[str, dict[str, Any]]:
    """Sampled accuracy by policy version as a table, and the summary."""
    curves: dict[str, dict[int, float]] = {}
    lags: dict[str, float] = {}
    for name, loss in LOSSES.items():
        # Two servers to one rank: training must not outrun generation, or tokens are trained too fresh
        measured = {"evaluation.every_steps": 5, "evaluation.num_prompts": 256, "evaluation.greedy": "false"}
        measured |= {"evaluation.sampled": "true", "learner.lr": "5e-4", "placement.split": "2:1"}
        folder = train(f"compare-{name}", args, data, measured | loss)
        curves[name] = dict(evaluations(read_rows(folder / "metrics.jsonl"), "sampled"))
        lags[name] = report(folder)["mean_lag"] or 0.0
        if not curves[name]:
            raise CompareError(f"{folder}: no evaluation in metrics.jsonl; look at its logs/")
    text = table([{"version": name, **curve, "mean lag": lags[name]} for name, curve in curves.items()], "version")
    enough = 0.75 * args.lag
    if min(lags.values()) >= enough:
        text += f"meaningful: both runs realised a mean lag of {enough:g} or more"
    else:
        text += f"NOT meaningful: a mean realised lag is below {enough:g} (bound {args.lag}); give the rollout servers "
        text += "more room (placement.split, rollout.max_running)"
    values = {name: mean(list(curve.values())[-LAST:]) for name, curve in curves.items()}
    summary = values | {"difference": values["ppo_clip"] - values["off"]}
    summary |= {f"mean_lag_{name}": lag for name, lag in lags.items()}
    return text, {name: round(value, 4) for name, value in summary.items()}


def staleness(args: argparse.Namespace, data: Path) -> tuple[str, dict[str, Any]]:
    model = args.out.resolve() / "model-for-long-answers"
    shutil.copytree(data / "model", model, dirs_exist_ok=True)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2 * CAP}), encoding="utf-8")
    settings = {"model.path": model, "evaluation.every_steps": 0, "placement.split": "1:1"}
    settings |= {"rollout.group_size": GROUP_SIZE, "rollout.groups_per_step": GROUPS}
    settings |= {"rollout.max_new_tokens": CAP, "rollout.max_running": 64, "algorithm.drop_zero_advantage": "false"}
    settings |= {"limits.flat_reward_steps": 0, "limits.zero_gradient_steps": 0}
    server = ("scripts.bench.server", "--median", str(MEDIAN), "--sigma", str(SIGMA))
    results: dict[str, dict[str, Any]] = {}
    for policy in ("wait", "mask", "drop"):
        folder = train(f"stale-{policy}", args, data, settings | {"replay.on_stale": policy}, *server)
        results[policy] = stale_numbers(folder, data, args.seed)
        results[policy]["step_over_wait"] = round(results[policy]["step_s"] / results["wait"]["step_s"], 3)
    return table([{"on_stale": policy, **row} for policy, row in results.items()], "on_stale"), results


def stale_numbers(folder: Path, data: Path, seed: int) -> dict[str, Any]:
    """What was dropped and masked, and the lengths of what was trained and of all prompts up to then."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "response_length/mean" in row]
    if not rows:
        raise CompareError(f"{folder}: no step in metrics.jsonl; look at its logs/")
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    trained, last = sum(len(line["groups"]) for line in ledger), rows[-1]
    dropped = int(last["buffer/dropped"])
    source = PromptSource(load_rows(data / "train.jsonl"), shuffle=True, seed=seed)
    drawn = [
        forced_length(stream_seed(seed, pass_, index), answer, median=MEDIAN, sigma=SIGMA, limit=CAP)
        for pass_, index, *_ in (source.next() for _ in range(trained + dropped))
        for answer in range(GROUP_SIZE)
    ]
    lengths = [row["response_length/mean"] for row in rows]
    return {
        "dropped": dropped,
        "dropped_share": round(dropped / (dropped + trained), 4),
        "leased_again": int(last["buffer/stale_leased_again"]),
        "masked_share": round(last["buffer/tokens_masked"] / (sum(lengths) * GROUPS * GROUP_SIZE), 4),
        "mean_length_trained": round(mean(lengths), 2),
        "mean_length_of_all": round(mean(drawn), 2),
        "mean_lag": round(report(folder)["mean_lag"], 3),
        "step_s": median(row["timing_s/step"] for row in rows[1:]),
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m scripts.compare", description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["corrections", "staleness"])
    parser.add_argument("--lag", type=int, help="replay.async_lag of all runs (default: 4, or 1 for staleness)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: 50, or 60 for staleness")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    args = parser.parse_args()
    compare, lag, steps = (corrections, 4, 50) if args.what == "corrections" else (staleness, 1, 60)
    args.lag, args.steps = (lag if args.lag is None else args.lag), args.steps or steps
    data = Path(f"data/sort6-seed{args.seed}").resolve()
    try:
        make = [sys.executable, "-m", "learner.examples.sort6", "--out", str(data), "--seed", str(args.seed)]
        subprocess.run(make, check=True)
        text, summary = compare(args, data)
    except (CompareError, ConfigError, MetricsError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return 1
    sys.stdout.write(text + "\n" + json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
