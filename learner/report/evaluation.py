"""Evaluation results on the learner's side: rows for people and numbers for metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from replay.messages import EvaluationResult


def write_rows(run_dir: str, result: EvaluationResult) -> Path:
    """Write one evaluation to `evaluations/version_N_greedy.jsonl`, one prompt a line, in order."""
    mode = "greedy" if result.greedy else "sampled"
    path = Path(run_dir) / "evaluations" / f"version_{result.version}_{mode}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(result.texts, result.rewards.tolist(), result.lengths.tolist(), result.finish_reasons, strict=True)
    with path.open("w", encoding="utf-8") as file:
        for index, (text, reward, length, reason) in enumerate(rows):
            row = {"index": index, "text": text, "reward": reward, "tokens": length, "finish_reason": reason}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def values(result: EvaluationResult, data_source: str) -> dict[str, Any]:
    """Metrics of one evaluation under verl's names (`val-core/<data source>/<mode>`)."""
    mode = "greedy" if result.greedy else "sampled"
    return {
        f"val-core/{data_source}/{mode}": float(result.rewards.mean()),
        f"val-aux/{data_source}/{mode}/response_length": float(result.lengths.mean()),
        f"val-aux/{data_source}/{mode}/seconds": result.seconds,
    }
