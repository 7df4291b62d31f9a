"""`python -m learner.record.summary runs/x [--train-seconds S]`: one line of JSON about a finished run.

Everything is read from the run folder: metrics.jsonl (evaluations, lag, broadcasts), ledger.jsonl (which groups were
trained in which step) and config.yaml (the bound of the lag). Exit code 1 where tokens above that bound were trained.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.loading import load
from learner.record import ledger
from learner.record.metrics import EVALUATION, FILE, MetricsError, evaluation_scores, read_rows, tokens_by_lag
from slipstream.runtime.program import program


def summarize(run_dir: Path, train_seconds: float | None) -> dict[str, Any]:
    """The summary of a run; a value that the run did not produce is None. Raises MetricsError."""
    rows = read_rows(run_dir / FILE)
    surviving = {line["step"]: line["groups"] for line in ledger.read(run_dir)}  # the last line of a step counts
    groups = [tuple(group) for step in surviving.values() for group in step]
    by_lag, config = {lag: tokens for lag, tokens in tokens_by_lag(rows).items() if tokens}, run_dir / "config.yaml"
    bound = load(str(config), []).replay.async_lag if config.is_file() else None
    syncs = [row["weight_sync/digests_equal"] for row in rows if "weight_sync/digests_equal" in row]
    greedy, sampled = evaluations(rows, "greedy"), evaluations(rows, "sampled")
    sets = {label: [scores[0], scores[-1]] for label, (_, scores) in curves(rows).items() if "/" in label}
    return {
        "greedy_before": greedy[0][1] if greedy else None,
        "greedy_after": greedy[-1][1] if greedy else None,
        "sampled_last3": sum(value for _, value in sampled[-3:]) / len(sampled[-3:]) if sampled else None,
        "train_seconds": round(train_seconds, 1) if train_seconds is not None else None,
        "max_lag": max(by_lag, default=None),
        "mean_lag": mean_lag(rows),
        "tokens_by_lag": {str(lag): tokens for lag, tokens in by_lag.items()},
        "tokens_above_bound": None if bound is None else sum(n for lag, n in by_lag.items() if lag > bound),
        **(logprob_difference(rows) if bound == 0 else {}),
        "groups_trained": len(groups),
        "groups_trained_twice": len(groups) - len(set(groups)),
        "digests_equal": bool(syncs) and all(syncs),
        **({"sets": sets} if sets else {}),
        **({"left_out": left_out} if (left_out := _left_out(rows)) else {}),
    }


def mean_lag(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Versions a trained token."""
    by_lag = tokens_by_lag(rows)
    total = sum(by_lag.values())
    return sum(lag * tokens for lag, tokens in by_lag.items()) / total if total else None


def logprob_difference(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Largest and mean |behaviour - trainer logprob| of a run at lag 0, where it is rounding and nothing else.

    The mean counts every token in the loss once. Both are None where a value was not finite, or nothing was trained.
    """
    names = ("training/loss_tokens", "training/rollout_logprobs_diff_max", "training/rollout_logprobs_diff_mean")
    seen = [[row[name] for name in names] for row in rows if names[1] in row]
    if not seen or any(value is None for step in seen for value in step):
        return {"logprob_diff_max": None, "logprob_diff_mean": None}
    weighted = sum(tokens * mean for tokens, _, mean in seen) / sum(tokens for tokens, _, _ in seen)
    return {"logprob_diff_max": max(largest for _, largest, _ in seen), "logprob_diff_mean": weighted}


def _left_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the last step: failed answers and dropped groups by reason, and mean lengths, where anything was left out."""
    steps = [row for row in rows if "step" in row]
    last = steps[-1] if steps else {}
    found = {k: v for k, v in last.items() if k.startswith(("answers/", "buffer/dropped/")) and v}
    return found if found.keys() - {"answers/kept_length"} else {}


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Mode, of its set where there are several, to (versions, scores), ascending; the newest of a version counts."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for label, score in evaluation_scores(row).items():
            if score is not None:
                points.setdefault(label, {})[int(row["version"])] = score
    return {label: (sorted(scores), [scores[v] for v in sorted(scores)]) for label, scores in sorted(points.items())}


def evaluations(rows: list[dict[str, Any]], mode: str, name: str = "") -> list[tuple[int, float]]:
    """(version, accuracy) of all evaluations of a mode, oldest version first.

    Of the set or data source `name`, or the mean over all of them; a version that some were given up for has none.
    `sampled` is the mean over the sampled answers, however many to a prompt.
    """
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if not name or any(key.startswith(f"{EVALUATION}{name}/") for key in row):
            for label, value in evaluation_scores(row).items():
                source, _, kind = label.rpartition("/")
                wanted = kind == mode or (mode == "sampled" and kind.startswith("mean@"))
                if wanted and value is not None and source in (name or source, ""):
                    found.setdefault(row["version"], {})[label] = value
    every = {label for scores in found.values() for label in scores}
    return sorted((version, fmean(scores.values())) for version, scores in found.items() if scores.keys() == every)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=program("learner.record.summary"), description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--train-seconds", type=float, default=None)
    args = parser.parse_args()
    try:
        summary = summarize(args.run_dir, args.train_seconds)
    except MetricsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if summary["tokens_above_bound"] else 0


if __name__ == "__main__":
    sys.exit(main())
