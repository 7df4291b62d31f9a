"""Retention: the newest checkpoints stay whole, the best as weights. Imports no torch.

An evaluation comes after the checkpoint of its version. Until it has come, the checkpoint stays as if it were the best.
"""

import json
import logging
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from configs.learner import Checkpoint
from learner.checkpoints.folders import (
    MARK,
    CheckpointError,
    incomplete,
    numbered,
    replace_json,
    step_of,
    weights_only,
)
from learner.record.metrics import FILE, GIVEN_UP, read_rows

log = logging.getLogger(__name__)

BEST = "best.json"
LINK = "best"
TO_GO_ON = ("dcp", "critic", "reference", "teachers")
"""What only a run that goes on needs: weights alone are without them."""


class Best:
    """Scores of evaluated versions (rank 0's). Another thread may read while one writes."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.scores: dict[int, float] = {}
        self._awaited: set[int] = set()
        self._names: dict[int, set[str]] = {}

    def read(self, run_dir: Path, version: int) -> list[int]:
        """Take over the scores of a run that goes on from a version.

        Returns:
            Earlier versions that have a checkpoint and wait for their evaluation as before; it may have come while no
            learner was there, so replay is to be asked again.

        Raises:
            MetricsError: metrics.jsonl has a line that is none.
        """
        if not self.settings.keep_best:
            return []
        answered: set[int] = set()
        for row in read_rows(run_dir / FILE) if (run_dir / FILE).is_file() else []:
            if "version" in row and isinstance(score := row.get(self.settings.best_metric or ""), float | int):
                self.scores[row["version"]] = score
            if "version" in row and any(GIVEN_UP.fullmatch(name) for name in row):
                answered.add(row["version"])
        found = {step_of(folder) for folder in numbered(run_dir / "checkpoints") if not incomplete(folder)}
        waiting = sorted(step for step in found - answered - self.scores.keys() if step < version)
        self._awaited.update(waiting)
        return waiting

    def expect(self, version: int) -> None:
        """The version is being evaluated."""
        if self.settings.keep_best:
            self._awaited.add(version)

    def record(self, version: int, values: Mapping[str, float]) -> None:
        """Numbers of an evaluation; they may come in several parts."""
        self._names.setdefault(version, set()).update(values)
        name = self.settings.best_metric
        if name is not None and math.isfinite(score := float(values.get(name, math.nan))):
            self.scores[version] = score
            self._awaited.discard(version)

    def closed(self, versions: Mapping[int, str]) -> None:
        """Nothing more comes of their evaluations; by version, why if that was too early.

        Raises:
            CheckpointError: an evaluation that came whole had nothing under the name checkpoint.best_metric.
        """
        for version in self._awaited.intersection(versions):
            self._awaited.discard(version)
            measured = self._names.get(version, set())
            # what was given up may be what best_metric names: the run goes on, and the version has no score
            is_whole = not versions[version] and not any(GIVEN_UP.fullmatch(name) for name in measured)
            if measured and is_whole:
                raise CheckpointError(
                    f"checkpoint.best_metric: {self.settings.best_metric!r} is not among what evaluations measure:"
                    f" {', '.join(sorted(measured))}"
                )

    def ranking(self, steps: Iterable[int]) -> list[int]:
        """Steps that have a score, best first; of equal ones the newer first."""
        sign = 1 if self.settings.best_is == "max" else -1
        scored = [step for step in steps if step in self.scores]
        return sorted(scored, key=lambda step: (sign * self.scores[step], step), reverse=True)

    def wanted(self, steps: Collection[int]) -> set[int]:
        """The checkpoint.keep_best best of the steps, and those whose evaluation has not come yet."""
        return {*self.ranking(steps)[: self.settings.keep_best], *self._awaited.intersection(steps)}


def choose(found: Mapping[int, str], keep: int, wanted: Collection[int]) -> tuple[list[int], list[int]]:
    """Steps that stay whole, the `keep` newest, and steps whose weights stay; the others go.

    Args:
        found: `whole`, `weights` or `broken`, by step.
        keep: at least 1.
        wanted: steps worth their weights.
    """
    newest = sorted((step for step, state in found.items() if state == "whole"), reverse=True)[:keep]
    weights = sorted(step for step in wanted if found.get(step, "broken") != "broken" and step not in newest)
    return newest, weights


def prune(parent: Path, best: Best) -> list[int]:
    """Delete what need not stay, list the best; returns the whole ones, newest first.

    A broken folder above the newest whole one stays: the user may put a file of it back.

    Raises:
        OSError: a folder could not be deleted.
    """
    folders = {step_of(folder): folder for folder in numbered(parent)}
    found = {step: _state(folder) for step, folder in folders.items()}
    usable = [step for step, state in found.items() if state != "broken"]
    newest, weights = choose(found, best.settings.keep, best.wanted(usable))
    if best.settings.keep_best:
        _list_best(parent, best, [*newest, *weights])
    for step, folder in folders.items():
        if step in weights:
            _strip(folder)
        elif step not in newest and not (found[step] == "broken" and step > max(newest, default=-1)):
            delete(folder)
    return newest


def clear(parent: Path) -> None:
    """Delete leftovers of a kill: unmarked folders, and optimizers of weights-only checkpoints."""
    for folder in numbered(parent):
        if not (folder / MARK).exists():
            log.warning("checkpoint %s was half written: deleted", folder.name)
            delete(folder)
        elif _state(folder) == "weights":
            _strip(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint, its mark first: a crash leaves no folder that looks complete."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _state(folder: Path) -> str:
    if incomplete(folder):
        return "broken"
    return "weights" if weights_only(folder) else "whole"


def _strip(folder: Path) -> None:
    """Leave the weights. First the mark, so that the folder is complete at every instant."""
    listed = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
    files = {name: size for name, size in listed.items() if name.partition("/")[0] not in TO_GO_ON}
    if not weights_only(folder):
        replace_json(folder / MARK, {"files": files, "weights_only": True})
    for name in TO_GO_ON:
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def _list_best(parent: Path, best: Best, steps: Collection[int]) -> None:
    """best.json, and a link to the best of all."""
    ranking = best.ranking(steps)[: best.settings.keep_best]
    listed = [{"step": step, "value": best.scores[step]} for step in ranking]
    what = {"metric": best.settings.best_metric, "best_is": best.settings.best_is, "checkpoints": listed}
    replace_json(parent / BEST, what)
    if (parent / LINK).exists() and not (parent / LINK).is_symlink():
        log.warning("%s is no link, and stays as it is: was the run folder copied?", parent / LINK)
    elif not ranking:
        (parent / LINK).unlink(missing_ok=True)  # what it led to was rolled back
    else:
        new = parent / f"{LINK}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(f"step_{ranking[0]}", target_is_directory=True)
        new.replace(parent / LINK)
