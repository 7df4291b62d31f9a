"""Evaluation results on the learner's side: rows for people and numbers for metrics.jsonl."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import comb, nan
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from configs.evaluation import PromptSet
from configs.schema import Config
from replay.data import DataError, evaluation_rows
from replay.data.rows import Row
from replay.messages import EvaluationResult
from replay.state.answers import ERRORS
from slipstream.runtime.disk import Disk

log = logging.getLogger(__name__)

Key = tuple[int, str, bool]
"""(version, name of the set, whether greedy)"""
News = tuple[int, str, dict[str, float]]
"""(version, name of the set, numbers) of a row for metrics.jsonl."""


class Evaluations:
    """Puts the results of an evaluation together, which come in parts; only what is whole is written and measured."""

    def __init__(self, config: Config, disk: Disk | None = None) -> None:
        """Read the prompts; answers are written through `disk`. Raises DataError."""
        self._disk = disk or Disk()
        self._run_dir, self._max_error_rate = config.run_dir, config.reward.max_error_rate
        self._sets = {one.name: one for one in config.evaluation_sets}
        self._rows = evaluation_rows(config)
        self._parts: dict[Key, dict[int, EvaluationResult]] = {}
        """What has come of those that are not whole, by the number of the first prompt."""
        self._ended: set[Key] = set()
        """Whole, or given up."""

    def news(self, results: list[EvaluationResult], closed: Mapping[int, str]) -> Iterator[News]:
        """Rows about what became whole with these results, which are taken, or was closed before that.

        Raises:
            DataError: a set has not as many answers as its file has prompts now.
        """
        while results:
            result = results.pop(0)
            key = (result.version, result.set, result.greedy)
            if result.set in self._sets and key not in self._ended:
                parts = self._parts.setdefault(key, {})
                parts[result.first] = result
                if sum(len(part.texts) // part.samples for part in parts.values()) >= len(self._rows[result.set]):
                    yield self._whole(key)
        for version, reason in closed.items():
            for one in self._sets.values():
                for greedy in [True] * one.greedy + [False] * bool(one.samples):
                    if (key := (version, one.name, greedy)) not in self._ended:
                        yield self._cut_short(key, reason)

    def _whole(self, key: Key) -> News:
        version, name, _ = key
        result, one, rows = joined(self._parts.pop(key)), self._sets[name], self._rows[name]
        self._ended.add(key)
        write_rows(self._run_dir, result, rows, self._disk)
        left_out, answers = int(result.left_out.sum()), len(result.texts)
        failed = sum(code in ERRORS for code, is_out in zip(result.errors, result.left_out, strict=True) if is_out)
        is_void = failed > self._max_error_rate * (answers - left_out + failed)
        if any(result.errors):
            log.warning(
                "guard: evaluation of version %d, %s, %s: %d of %d answers scored, %s%s: %s",
                version, one.key, _mode(result.greedy), answers - left_out, answers,
                ", ".join(f"{number} {code}" for code, number in sorted(_errors(result).items())),
                "; void, as reward.max_error_rate is passed" if is_void else "",
                result.error_detail,
            )  # fmt: skip
        if is_void:
            return version, name, _given_up(rows, name, greedy=result.greedy)
        return version, name, values(result, rows, one)

    def _cut_short(self, key: Key, reason: str) -> News:
        version, name, greedy = key
        parts, rows = self._parts.get(key, {}), self._rows[name]
        if parts and not reason:  # replay has them all
            _check_size(joined(parts), rows)
        parts = self._parts.pop(key, {})
        self._ended.add(key)
        done = sum(len(part.texts) // part.samples for part in parts.values())
        log.warning(
            "evaluation of version %d given up: %s, %s, with %d of %d prompts: %s",
            version,
            self._sets[name].key,
            _mode(greedy),
            done,
            len(rows),
            reason or "it was not asked for then",
        )
        return version, name, _given_up(rows, name, greedy=greedy)


def joined(parts: Mapping[int, EvaluationResult]) -> EvaluationResult:
    """One result of the parts of a set, by the number of the first prompt. They ran at the same time."""
    ordered = [parts[first] for first in sorted(parts)]
    first = ordered[0]
    return EvaluationResult(
        version=first.version,
        set=first.set,
        greedy=first.greedy,
        samples=first.samples,
        seconds=max(part.seconds for part in ordered),
        texts=[text for part in ordered for text in part.texts],
        finish_reasons=[reason for part in ordered for reason in part.finish_reasons],
        rewards=np.concatenate([part.rewards for part in ordered]),
        lengths=np.concatenate([part.lengths for part in ordered]),
        errors=[code for part in ordered for code in part.errors or [""] * len(part.texts)],
        left_out=np.concatenate([_left_out(part) for part in ordered]),
        error_detail=next((part.error_detail for part in ordered if part.error_detail), ""),
    )


def _left_out(result: EvaluationResult) -> NDArray[np.uint8]:
    """[answers] 1 where an answer has no score."""
    return result.left_out if result.left_out.size else np.zeros(len(result.texts), np.uint8)


def _errors(result: EvaluationResult) -> Counter[str]:
    """Failed answers by code, those that were given a score included."""
    return Counter(code for code in result.errors if code)


def file_of(run_dir: str | Path, version: int, name: str, *, greedy: bool) -> Path:
    """Where the answers to a set are: `evaluations/version_N_greedy.jsonl`, with the set's name where it has one."""
    parts = ["version", str(version), *([name] if name else []), _mode(greedy)]
    return Path(run_dir) / "evaluations" / f"{'_'.join(parts)}.jsonl"


def write_rows(run_dir: str, result: EvaluationResult, rows: Sequence[Row], disk: Disk) -> Path:
    """Write the answers to a set into its file, in the order of its prompts, one answer a line.

    Raises:
        DataError: there are not as many answers as `rows` want.
    """
    _check_size(result, rows)
    path = file_of(run_dir, result.version, result.set, greedy=result.greedy)
    rewards = np.where(_left_out(result), np.array(None), result.rewards.astype(object)).tolist()
    errors = result.errors or [""] * len(rewards)
    answers = zip(result.texts, rewards, result.lengths.tolist(), result.finish_reasons, errors, strict=True)
    lines = []
    for number, (text, reward, length, reason, error) in enumerate(answers):
        index, sample = divmod(number, result.samples)
        asked = rows[index]
        row = {
            **({"set": result.set} if result.set else {}),
            "index": index,
            **({"sample": sample} if result.samples > 1 else {}),
            "prompt": asked["prompt"],
            **({"tools": tools} if isinstance(tools := asked["columns"].get("tools"), list) else {}),
            "ground_truth": asked["ground_truth"],
            "data_source": asked["data_source"],
            "text": text,
            "reward": reward,
            "tokens": length,
            "finish_reason": reason,
            **({"error": error} if error else {}),
        }
        lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    disk.write(path, "".join(lines))
    return path


def values(result: EvaluationResult, rows: Sequence[Row], one: PromptSet) -> dict[str, float]:
    """Metrics of a set under verl's names: by its name, or without one for each data source of its rows.

    Args:
        result: `samples` answers to each prompt, prompt after prompt.
        rows: the prompts.
        one: the set.
    """
    labels, shape = np.array(_labels(rows, one.name)), (len(rows), result.samples)
    rewards, lengths = result.rewards.reshape(shape), result.lengths.reshape(shape)
    is_cut = np.array([reason == "length" for reason in result.finish_reasons]).reshape(shape)
    is_scored = _left_out(result).reshape(shape) == 0
    scored = is_scored.sum(axis=1)
    solved = ((rewards >= np.float32(one.solved_at)) & is_scored).sum(axis=1)
    mode, k, numbers = _mode(result.greedy), result.samples, dict[str, float]()
    for label in sorted(set(labels.tolist())):
        own = labels == label
        answered = max(1, int((lengths[own] > 0).sum()))
        numbers[f"val-aux/{label}/{mode}/response_length"] = float(lengths[own].sum()) / answered
        numbers[f"val-aux/{label}/{mode}/clip_ratio"] = float(is_cut[own].sum()) / answered
        numbers[f"val-aux/{label}/{mode}/seconds"] = result.seconds
        if not is_scored[own].all():
            numbers[f"val-aux/{label}/{mode}/not_scored"] = float((~is_scored[own]).sum())
        if not is_scored[own].any():
            numbers[f"val-aux/{label}/{mode}/given_up"] = 1.0
            continue
        if k == 1:
            numbers[f"val-core/{label}/{mode}"] = float(rewards[own][is_scored[own]].mean())
            numbers[f"val-aux/{label}/{mode}/pass@1"] = float(solved[own].sum() / scored[own].sum())
        else:
            numbers[f"val-core/{label}/reward/mean@{k}"] = float(rewards[own][is_scored[own]].mean())
            for few in (1, k):
                numbers[f"val-core/{label}/reward/pass@{few}"] = pass_at(few, scored[own], solved[own])
            for few in (2**power for power in range(1, (k - 1).bit_length())):
                numbers[f"val-aux/{label}/reward/pass@{few}"] = pass_at(few, scored[own], solved[own])
    return numbers


def pass_at(k: int, n: int | NDArray[np.int64], solved: Iterable[int] | NDArray[np.int64]) -> float:
    """Unbiased pass@k: the chance that one of k answers out of n solves its prompt, mean over prompts.

    1 - C(n - c, k) / C(n, k) for a prompt that c of its n answers solve (Chen et al. 2021, arXiv 2107.03374). With 4
    answers of which 1 is right, pass@2 = 1 - C(3, 2) / C(4, 2) = 0.5. Prompts with fewer than k scored answers are
    left out; NaN where there is no other.
    """
    found = list(solved)
    pairs = zip(np.broadcast_to(n, len(found)).tolist(), found, strict=True)
    chances = [1 - comb(of - int(c), k) / comb(of, k) for of, c in pairs if of >= k]
    return fmean(chances) if chances else nan


def _labels(rows: Sequence[Row], name: str) -> list[str]:
    return [name or str(row["data_source"]) for row in rows]


def _given_up(rows: Sequence[Row], name: str, *, greedy: bool) -> dict[str, float]:
    return {f"val-aux/{label}/{_mode(greedy)}/given_up": 1.0 for label in sorted(set(_labels(rows, name)))}


def _check_size(result: EvaluationResult, rows: Sequence[Row]) -> None:
    if len(result.texts) != len(rows) * result.samples:
        key = f"data.eval.{result.set}" if result.set else "data.eval"
        raise DataError(
            f"evaluation of version {result.version}: {len(result.texts)} answers, {key} has {len(rows)} rows now;"
            " do not change the file during a run"
        )


def _mode(greedy: bool) -> str:
    return "greedy" if greedy else "sampled"
