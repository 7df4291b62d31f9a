"""`python -m scripts.compare_corrections --lag 4`: what the off-policy correction is worth (negative control).

Two runs of the quick start at the same lag, from the same model, prompts and seed: one with the loss `ppo_clip`,
whose ratio against the behaviour logprobs is the correction, one with `policy_gradient`, which has none. Prints both
evaluation curves and the mean lag that each run realised; the last line is one line of JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from learner.report.lag import ReportError, read_rows, report
from learner.report.summary import evaluations

ROOT = Path(__file__).parents[1]
VARIANTS = {
    "ppo_clip": ["algorithm.loss=ppo_clip"],
    "off": ["algorithm.loss=policy_gradient", "algorithm.i_know_this_is_biased=true"],
}
LR = "5e-4"
SPLIT = "2:1"
"""Two rollout servers to one learner rank: training must not outrun generation, or tokens are trained too fresh, and
one server goes on while the other evaluates."""
NUM_PROMPTS = 256
EVALUATE_EVERY = 5
LAST = 3
"""Evaluations that the reported value is the mean of."""


class CompareError(RuntimeError):
    """One of the commands failed; the message is its own last word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to: sampled accuracy by version, and the mean lag of its trained tokens in versions."""

    curve: list[tuple[int, float]]
    mean_lag: float
    seconds: float

    @property
    def value(self) -> float:
        """Mean of the last three sampled evaluations."""
        last = [accuracy for _, accuracy in self.curve[-LAST:]]
        return sum(last) / len(last)


def train(variant: str, data: Path, out: Path, *, lag: int, seed: int, steps: int) -> Outcome:
    """One run to its end.

    Raises:
        CompareError: the run failed, or wrote no evaluation.
    """
    name = f"compare-{variant}-lag{lag}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [
        *(f"model.path={data}/model", f"data.train={data}/train.jsonl", f"data.eval={data}/eval.jsonl"),
        *(f"run.dir={out}", f"learner.lr={LR}", f"evaluation.every_steps={EVALUATE_EVERY}"),
        f"evaluation.num_prompts={NUM_PROMPTS}",
        *("evaluation.greedy=false", "evaluation.sampled=true", "checkpoint.every_steps=0"),
        *("tracking.live=off", "tracking.plot=false", f"placement.split={SPLIT}", *VARIANTS[variant]),
    ]
    command = ["learner.main", "--async-lag", str(lag), "--seed", str(seed), "--steps", str(steps), "--name", name]
    started = time.monotonic()
    run_module([*command, *(word for setting in settings for word in ("--set", setting))])
    seconds = time.monotonic() - started
    try:
        curve = evaluations(read_rows(out / name / "metrics.jsonl"), "sampled")
        mean_lag = report(out / name)["mean_lag"]
    except ReportError as error:
        raise CompareError(str(error)) from error
    if not curve or mean_lag is None:
        raise CompareError(f"{out / name}: no evaluation or no trained token in metrics.jsonl; look at its logs/")
    return Outcome(curve=curve, mean_lag=mean_lag, seconds=seconds)


def run_module(command: list[str]) -> None:
    """Run `python -m ...` in this checkout. Raises CompareError with the end of what it said."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise CompareError(f"python -m {command[0]} ended with exit code {done.returncode}: {said}")


def show(outcomes: dict[str, Outcome], lag: int) -> str:
    """Both curves side by side, and whether the lag that was realised makes them worth comparing."""
    versions = sorted({version for outcome in outcomes.values() for version, _ in outcome.curve})
    lines = ["sampled accuracy by policy version", "version  " + "  ".join(f"{name:>10}" for name in outcomes)]
    for version in versions:
        found = [dict(outcome.curve).get(version) for outcome in outcomes.values()]
        cells = "  ".join(f"{accuracy:>10.3f}" if accuracy is not None else " " * 9 + "-" for accuracy in found)
        lines.append(f"{version:>7}  {cells}")
    for name, outcome in outcomes.items():
        lines.append(f"{name}: mean realised lag {outcome.mean_lag:.2f} of at most {lag}, {outcome.seconds:.0f} s")
    low = [name for name, outcome in outcomes.items() if outcome.mean_lag < meaningful(lag)]
    verdict = (
        f"meaningful: both runs realised a mean lag of {meaningful(lag):g} or more"
        if not low
        else f"NOT meaningful: the mean realised lag of {' and '.join(low)} is below {meaningful(lag):g}, so this says"
        f" little about lag {lag}; give the rollout server more room (placement.split, rollout.max_running)"
    )
    return "\n".join([*lines, verdict])


def meaningful(lag: int) -> float:
    """Mean realised lag, in versions, below which a comparison says little about the bound: three quarters of it."""
    return 0.75 * lag


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_corrections", description=__doc__)
    parser.add_argument("--lag", type=int, default=4, help="replay.async_lag of both runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    args = parser.parse_args()
    if args.lag < 1:
        parser.error(f"--lag {args.lag}: without lag there is nothing to correct; take 1 to 8")
    out = args.out.resolve()
    data = ROOT / "data" / f"sort6-seed{args.seed}"
    outcomes: dict[str, Outcome] = {}
    try:
        run_module(["learner.examples.sort6", "--out", str(data), "--seed", str(args.seed)])
        for variant in VARIANTS:
            outcomes[variant] = train(variant, data, out, lag=args.lag, seed=args.seed, steps=args.steps)
    except CompareError as error:
        sys.stderr.write(f"compare_corrections: {error}\n")
        return 1
    sys.stdout.write(show(outcomes, args.lag) + "\n")
    summary = {
        **{variant: round(outcome.value, 4) for variant, outcome in outcomes.items()},
        "difference": round(outcomes["ppo_clip"].value - outcomes["off"].value, 4),
        **{f"mean_lag_{variant}": round(outcome.mean_lag, 3) for variant, outcome in outcomes.items()},
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
