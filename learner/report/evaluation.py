"""Evaluation results on the learner's side: rows for people and numbers for metrics.jsonl."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from replay.messages import EvaluationResult
from replay.prompts import DataError, read_rows
from replay.prompts.rows import Row


def evaluation_rows(config: Config) -> list[Row]:
    """The evaluation prompts, as replay leases them; empty without evaluations. Raises DataError."""
    if config.data.eval is None or not config.evaluation.every_steps:
        return []
    return list(islice(read_rows(config.data.eval), config.evaluation.num_prompts))


def write_rows(run_dir: str, result: EvaluationResult, rows: Sequence[Row]) -> Path:
    """Write one evaluation to `evaluations/version_N_greedy.jsonl`, one prompt a line, in order.

    Raises:
        DataError: there are not as many answers as rows.
    """
    if len(result.texts) != len(rows):
        raise DataError(
            f"evaluation of version {result.version}: {len(result.texts)} answers, data.eval has {len(rows)} rows now;"
            " do not change the file during a run"
        )
    path = Path(run_dir) / "evaluations" / f"version_{result.version}_{_mode(result)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = zip(result.texts, result.rewards.tolist(), result.lengths.tolist(), result.finish_reasons, strict=True)
    with path.open("w", encoding="utf-8") as file:
        for index, (asked, (text, reward, length, reason)) in enumerate(zip(rows, answers, strict=True)):
            row = {
                "index": index,
                "prompt": asked["prompt"],
                "ground_truth": asked["ground_truth"],
                "data_source": asked["data_source"],
                "text": text,
                "reward": reward,
                "tokens": length,
                "finish_reason": reason,
            }
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return path


def values(result: EvaluationResult, rows: Sequence[Row]) -> dict[str, Any]:
    """Metrics of one evaluation under verl's names (`val-core/<data source>/<mode>`), for each of its data sources."""
    mode = _mode(result)
    sources = np.array([row["data_source"] for row in rows])
    numbers = {}
    for source in sorted(set(sources.tolist())):
        own = sources == source
        numbers[f"val-core/{source}/{mode}"] = float(result.rewards[own].mean())
        numbers[f"val-aux/{source}/{mode}/response_length"] = float(result.lengths[own].mean())
        numbers[f"val-aux/{source}/{mode}/seconds"] = result.seconds
    return numbers


def _mode(result: EvaluationResult) -> str:
    return "greedy" if result.greedy else "sampled"
