"""`python -m learner.report.summary runs/x [--train-seconds S]`: one line of JSON about a finished run.

Everything is read from the run folder: metrics.jsonl (evaluations, lag, broadcasts) and ledger.jsonl (which
groups were trained in which step).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from learner import ledger
from learner.report.metrics import FILE, MetricsError, evaluation_scores, read_rows, tokens_by_lag


def summarize(run_dir: Path, train_seconds: float | None) -> dict[str, Any]:
    """The summary of a run; a value that the run did not produce is None. Raises MetricsError."""
    rows = read_rows(run_dir / FILE)
    surviving = {line["step"]: line["groups"] for line in ledger.read(run_dir)}  # the last line of a step counts
    groups = [tuple(group) for step in surviving.values() for group in step]
    lags = [lag for lag, tokens in tokens_by_lag(rows).items() if tokens]
    syncs = [row["weight_sync/digests_equal"] for row in rows if "weight_sync/digests_equal" in row]
    greedy, sampled = evaluations(rows, "greedy"), evaluations(rows, "sampled")
    return {
        "greedy_before": greedy[0][1] if greedy else None,
        "greedy_after": greedy[-1][1] if greedy else None,
        "sampled_last3": sum(value for _, value in sampled[-3:]) / len(sampled[-3:]) if sampled else None,
        "train_seconds": round(train_seconds, 1) if train_seconds is not None else None,
        "max_lag": max(lags, default=None),
        "groups_trained": len(groups),
        "groups_trained_twice": len(groups) - len(set(groups)),
        "digests_equal": bool(syncs) and all(syncs),
    }


def evaluations(rows: list[dict[str, Any]], mode: str) -> list[tuple[int, float]]:
    """(version, accuracy) of all evaluations of a mode, oldest version first; the mean over their data sources."""
    found = {}
    for row in rows:
        labelled = evaluation_scores(row).items()
        scores = [value for label, value in labelled if label.rsplit("/")[-1] == mode and value is not None]
        if scores:
            found[row["version"]] = sum(scores) / len(scores)
    return sorted(found.items())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m learner.report.summary", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--train-seconds", type=float, default=None)
    args = parser.parse_args()
    try:
        summary = summarize(args.run_dir, args.train_seconds)
    except MetricsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
