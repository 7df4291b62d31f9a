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
from learner import ledger
from learner.launch.launcher import Launcher
from learner.launch.servers import RunFailed
from learner.main import run
from learner.report.lag import report
from learner.report.live_view import LiveView
from learner.report.metrics import FILE, MetricsError, read_rows
from learner.report.summary import evaluations
from replay.prompts import PromptSource, load_rows, stream_seed
from scripts.bench.core import table
from scripts.bench.server import forced_length

LOSSES = {"ppo_clip": "algorithm.loss=ppo_clip", "off": "algorithm.loss=policy_gradient"}
# two servers to one rank: training must not outrun generation, or tokens are trained too fresh
MEASURED = """
    evaluation.every_steps=5 evaluation.num_prompts=256 evaluation.greedy=false evaluation.sampled=true
    learner.lr=5e-4 placement.split=2:1 algorithm.i_know_this_is_biased=true
"""
LAST = 3  # evaluations that a run's value is the mean of
GROUP_SIZE, GROUPS = 4, 8
MEDIAN, SIGMA, CAP = 24, 0.9, 240
LONG = f"""
    rollout.group_size={GROUP_SIZE} rollout.groups_per_step={GROUPS} rollout.max_new_tokens={CAP} rollout.max_running=64
    evaluation.every_steps=0 placement.split=1:1 algorithm.drop_zero_advantage=false
    limits.flat_reward_steps=0 limits.zero_gradient_steps=0
"""


def train(name: str, args: argparse.Namespace, settings: list[str], *server: str) -> Path:
    """One run of the quick start's task to its end; its folder. Raises RunFailed."""
    name = f"{name}-lag{args.lag}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    given = [f"run.name={name}", f"run.dir={args.out}", f"run.seed={args.seed}", f"model.path={args.data}/model"]
    given += [f"data.train={args.data}/train.jsonl", f"data.eval={args.data}/eval.jsonl"]
    given += [f"replay.async_lag={args.lag}", f"learner.total_steps={args.steps}", "checkpoint.every_steps=0"]
    config = load("quickstart", [*given, "tracking.live=off", "tracking.plot=false", *settings])
    launcher = Launcher(config, False, LiveView(config, "off"), server_command=server or ("rollout_server.main",))
    if run(launcher) != 0:
        raise RunFailed(f"{config.run_dir}: the run failed; look at its logs/")
    return Path(config.run_dir)


def corrections(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Sampled accuracy by policy version as a table, and the summary."""
    rows: list[dict[Any, Any]] = []
    summary: dict[str, float] = {}
    for name, loss in LOSSES.items():
        folder = train(f"compare-{name}", args, [*MEASURED.split(), loss])
        curve, lag = dict(evaluations(read_rows(folder / FILE), "sampled")), report(folder)["mean_lag"] or 0.0
        if not curve:
            raise RunFailed(f"{folder}: no evaluation in {FILE}; look at its logs/")
        rows.append({"version": name, **curve, "mean lag": lag})
        summary |= {name: mean(list(curve.values())[-LAST:]), f"mean_lag_{name}": lag}
    summary["difference"] = summary["ppo_clip"] - summary["off"]
    text, enough = table(rows, "version"), 0.75 * args.lag
    if min(row["mean lag"] for row in rows) >= enough:
        text += f"meaningful: both runs realised a mean lag of {enough:g} or more"
    else:
        text += f"NOT meaningful: a mean realised lag is below {enough:g} (bound {args.lag}); give the rollout servers "
        text += "more room (placement.split, rollout.max_running)"
    return text, {name: round(value, 4) for name, value in summary.items()}


def staleness(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What each policy has dropped and trained as a table, and the same by policy."""
    model = args.out / "model-for-long-answers"
    shutil.copytree(args.data / "model", model, dirs_exist_ok=True)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2 * CAP}), encoding="utf-8")
    server = ("scripts.bench.server", "--median", str(MEDIAN), "--sigma", str(SIGMA))
    results: dict[str, dict[str, Any]] = {}
    for policy in ("wait", "mask", "drop"):
        settings = [*LONG.split(), f"model.path={model}", f"replay.on_stale={policy}"]
        results[policy] = stale_numbers(train(f"stale-{policy}", args, settings, *server), args)
        results[policy]["step_over_wait"] = round(results[policy]["step_s"] / results["wait"]["step_s"], 3)
    return table([{"on_stale": policy, **row} for policy, row in results.items()], "on_stale"), results


def stale_numbers(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What was dropped and masked, and the lengths of what was trained and of all prompts up to then."""
    lag = report(folder)["mean_lag"]  # MetricsError where no step was trained
    rows = [row for row in read_rows(folder / FILE) if "response_length/mean" in row]
    trained, last = sum(len(line["groups"]) for line in ledger.read(folder)), rows[-1]
    dropped = int(last["buffer/dropped"])
    source = PromptSource(load_rows(args.data / "train.jsonl"), shuffle=True, seed=args.seed)
    drawn = [
        forced_length(stream_seed(args.seed, pass_, index), answer, median=MEDIAN, sigma=SIGMA, limit=CAP)
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
        "mean_lag": round(lag, 3),
        "step_s": median(row["timing_s/step"] for row in rows[1:]),
    }


# what makes the comparison, and its lag and steps where none are given
COMPARISONS = {"corrections": (corrections, 4, 50), "staleness": (staleness, 1, 60)}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m scripts.compare", description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=COMPARISONS)
    parser.add_argument("--lag", type=int, help="replay.async_lag of all runs (default: 4, or 1 for staleness)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: 50, or 60 for staleness")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    args = parser.parse_args()
    compare, lag, steps = COMPARISONS[args.what]
    args.lag, args.steps = (lag if args.lag is None else args.lag), args.steps or steps
    args.out, args.data = args.out.resolve(), Path(f"data/sort6-seed{args.seed}").resolve()
    try:
        make = [sys.executable, "-m", "learner.examples.sort6", "--out", str(args.data), "--seed", str(args.seed)]
        subprocess.run(make, check=True)
        text, summary = compare(args)
    except (RunFailed, ConfigError, MetricsError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return 1
    sys.stdout.write(text + "\n" + json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
