"""`python -m learner.record.lag RUN_DIR...`: trained tokens by lag, from metrics.jsonl and config.yaml of each run.

One line per run: its bound (`replay.async_lag`), mean lag, tokens above the bound (which must be none) and the
tokens of each lag. For runs at lag 0 also how far the engine's logprobs are from the trainer's, which is rounding
there and nothing else. The last line is one line of JSON. Exit code 1 when a run has tokens above its bound.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from configs.loading import ConfigError, load
from learner.record.metrics import FILE, LAG_HISTOGRAM, MetricsError, read_rows, tokens_by_lag
from slipstream.runtime.program import program

DIFF_MAX = "training/rollout_logprobs_diff_max"
DIFF_MEAN = "training/rollout_logprobs_diff_mean"
WEIGHT = "training/loss_tokens"


def report(run_dir: Path) -> dict[str, Any]:
    """What the table shows of a run.

    Histogram: trained tokens by lag in versions. `mean_lag` is in versions a token, `above_bound` in tokens. The
    logprob differences are |behaviour - trainer| in nats, mean over the tokens in the loss, None above lag 0.

    Raises:
        MetricsError: the folder has no readable config.yaml or metrics.jsonl, or no step was trained.
    """
    try:
        bound = load(str(run_dir / "config.yaml")).replay.async_lag
    except ConfigError as error:
        raise MetricsError(f"{run_dir}: is this the folder of a run, such as runs/quickstart? {error}") from error
    steps = [row for row in read_rows(run_dir / FILE) if LAG_HISTOGRAM in row]
    if not steps:
        raise MetricsError(f"{run_dir}/{FILE}: no step was trained yet; wait for the first, or name another run")
    histogram = tokens_by_lag(steps)
    total = sum(histogram.values())
    return {
        "run": str(run_dir),
        "bound": bound,
        "histogram": {str(lag): tokens for lag, tokens in histogram.items()},
        "mean_lag": sum(lag * tokens for lag, tokens in histogram.items()) / total if total else None,
        "above_bound": sum(tokens for lag, tokens in histogram.items() if lag > bound),
        **(logprob_difference(steps) if bound == 0 else {"logprob_diff_max": None, "logprob_diff_mean": None}),
    }


def logprob_difference(steps: list[dict[str, Any]]) -> dict[str, float | int | None]:
    """Largest and mean |behaviour - trainer logprob| over all steps; the mean counts every token in the loss once.

    A step that logged null (a value that was not finite) is counted in `not_finite` and leaves both numbers None, so
    that it never reads as a good number.
    """
    seen = [row for row in steps if DIFF_MAX in row]  # absent for a batch without a token in the loss
    broken = sum(row[DIFF_MAX] is None or row[DIFF_MEAN] is None for row in seen)
    tokens = sum(row[WEIGHT] for row in seen)
    if broken or not tokens:
        return {"logprob_diff_max": None, "logprob_diff_mean": None, "not_finite": broken}
    weighted = sum(row[DIFF_MEAN] * row[WEIGHT] for row in seen)
    largest = max(row[DIFF_MAX] for row in seen)
    return {"logprob_diff_max": largest, "logprob_diff_mean": weighted / tokens, "not_finite": 0}


def table(runs: list[dict[str, Any]]) -> str:
    """The report for people: a line per run, a column per lag that occurs."""
    lags = sorted({int(lag) for run in runs for lag in run["histogram"]})
    is_exact = any(run["logprob_diff_max"] is not None for run in runs)
    exact = ["logprob diff max", "logprob diff mean"] if is_exact else []
    lines = [["run", "bound", "mean lag", "above bound", *(f"lag {lag}" for lag in lags), *exact]]
    for run in runs:
        found = {lag: run["histogram"].get(str(lag), 0) for lag in lags}
        total = max(1, sum(found.values()))
        line = [run["run"], str(run["bound"]), "-" if run["mean_lag"] is None else f"{run['mean_lag']:.3f}"]
        line.append(f"{run['above_bound'] / total:.2%}")
        line += [f"{tokens} ({tokens / total:.1%})" if tokens else "0" for tokens in found.values()]
        numbers = (run["logprob_diff_max"], run["logprob_diff_mean"])
        lines.append(line + ["-" if number is None else f"{number:.2e}" for number in numbers][: len(exact)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines)


def main() -> int:
    """Entry point; 0 when every run kept its bound."""
    parser = argparse.ArgumentParser(prog=program("learner.record.lag"), description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    args = parser.parse_args()
    try:
        runs = [report(run_dir) for run_dir in args.run_dirs]
    except MetricsError as error:
        sys.stderr.write(f"lag: {error}\n")
        return 2
    sys.stdout.write(table(runs) + "\n")
    sys.stdout.write(json.dumps({"runs": runs}) + "\n")
    return 1 if any(run["above_bound"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
