"""The run's numbers: one JSON line per step in metrics.jsonl, and the same rows to trackers where wanted.

Every name stands in docs/reference/metrics.md. Rank 0 writes; this module imports no torch. A row is one of

    {"step": 12, "time": 1760000000.0, "critic/score/mean": 0.61, "training/lag_histogram": {"0": 90, "1": 3410}, ...}
    {"version": 10, "time": 1760000000.0, "val-core/sort6/greedy": 0.83}         an evaluation of one policy version
    {"version": 10, "set": "aime", "time": ..., "val-core/aime/greedy": 0.2}     of one with several sets
    {"version": 80, "time": 1760000000.0, "final": true, ...}                    what was left after the last step
"""

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.data import Tracking
from configs.errors import kind_of
from learner.record.trackers import MetricsError as MetricsError
from learner.record.trackers import Trackers
from slipstream.runtime.disk import Disk

Numbers = Mapping[str, float | Mapping[str, float]]
"""Metric name to number (Python, numpy or a tensor of one element), or to a map of numbers."""

FILE = "metrics.jsonl"
DISCARDED = "metrics.discarded.jsonl"
LAG_HISTOGRAM = "training/lag_histogram"
EVALUATION = "val-core/"
GIVEN_UP = re.compile("val-aux/(.*)/given_up")


class Spans:
    """Seconds by phase. Called with a name it is a context manager; spans may nest.

    `observe` is called at the end of each with its name, beginning and end, in seconds of time.perf_counter.
    """

    def __init__(self, observe: Callable[[str, float, float], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._observe = observe

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds inside to `timing_s/<name>`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            key, ended = f"timing_s/{name}", time.perf_counter()
            self._seconds[key] = self._seconds.get(key, 0.0) + ended - started
            if self._observe is not None:
                self._observe(name, started, ended)

    def take(self) -> dict[str, float]:
        """Seconds per `timing_s/<name>` since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class Metrics:
    """Writes metrics.jsonl and feeds the trackers. Not safe to share between threads."""

    def __init__(
        self,
        run_dir: str | Path,
        tracking: Tracking,
        run_config: dict[str, Any],
        *,
        resume_step: int | None,
        disk: Disk | None = None,
    ) -> None:
        """Open the file for appending; the run folder is made if it is missing.

        Args:
            run_dir: run folder.
            tracking: the `tracking` section of the configuration.
            run_config: the resolved configuration, for trackers.
            resume_step: step that the run goes on from, or None for a new run; see `set_aside`.
            disk: that rows are written through.

        Raises:
            MetricsError: a tracker does not start.
        """
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers = Trackers(folder, tracking, run_config, resume_step)
        self.last: dict[str, Any] = {}
        """Numbers of the last step's row."""
        set_aside(folder, after=-1 if resume_step is None else resume_step)
        self._path, self._disk = folder / FILE, disk or Disk()
        self._disk.append(self._path, "")

    def log(self, step: int, values: Numbers) -> None:
        """Write the row of a step.

        NaN and infinity become null and are counted in `metrics/nonfinite`.

        Raises:
            TypeError: a value is not a number.
        """
        self._write({"step": step}, {"training/global_step": step, **values})

    def log_evaluation(self, version: int, values: Numbers, name: str = "") -> None:
        """Write the row of an evaluation of policy version `version`, of the set `name`. Raises TypeError as `log`."""
        self._write({"version": version, **({"set": name} if name else {})}, values)

    def log_final(self, version: int, values: Numbers) -> None:
        """Write what was measured after the last step's row. Raises TypeError as `log` does."""
        self._write({"version": version, "final": True}, values)

    def close(self) -> None:
        """Close the trackers."""
        self._trackers.close()

    def _write(self, head: dict[str, Any], values: Numbers) -> None:
        numbers, nonfinite = finite(values)
        if nonfinite or "step" in head:
            numbers["metrics/nonfinite"] = nonfinite
        if self._trackers.wanted:
            numbers["metrics/trackers_failed"] = float(len(self._trackers.failed))
        if "step" in head:
            self.last = numbers
        self._disk.append(self._path, json.dumps({**head, "time": time.time(), **numbers}, allow_nan=False) + "\n")
        self._trackers.log(head.get("step", head.get("version", 0)), "step" not in head, flat(numbers))


def finite(values: Numbers) -> tuple[dict[str, Any], int]:
    """Plain JSON numbers, None for NaN and infinity, and how many those were.

    Raises:
        TypeError: a value is not a number; the message names its key.
    """
    plain: dict[str, Any] = {}
    nonfinite = 0
    for name, value in values.items():
        if isinstance(value, Mapping):
            plain[name], inside = finite({str(key): item for key, item in value.items()})
            nonfinite += inside
            continue
        number = getattr(value, "item", lambda value=value: value)()
        if not isinstance(number, int | float):
            raise TypeError(f"metric {name!r}: {value!r} is {kind_of(value)}, not a number")
        good = math.isfinite(number)
        plain[name] = number if good else None
        nonfinite += not good
    return plain, nonfinite


def flat(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Maps as `name/key`, values that are None left out, for trackers that know scalars only."""
    scalars: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            scalars |= {f"{name}/{key}": item for key, item in flat(value).items()}
        elif value is not None:
            scalars[name] = float(value)
    return scalars


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, oldest first, without an unfinished last line.

    Raises:
        MetricsError: the file is missing, or another line is not a JSON object; the message shows its number.
    """
    if not path.is_file():
        raise MetricsError(f"{path}: missing; name the folder of a run that has trained, such as runs/quickstart")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines) or line.endswith("\n"):
            raise MetricsError(f"{path}, line {number}: {line[:60]!r} is not a row of metrics; remove the line")
    return rows


def tokens_by_lag(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Trained tokens of these rows by lag in versions, ascending."""
    total: Counter[int] = Counter()
    for row in rows:
        total.update({int(lag): int(tokens) for lag, tokens in (row.get(LAG_HISTOGRAM) or {}).items()})
    return dict(sorted(total.items()))


def evaluation_scores(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Scores in a row, by mode; by `set/mode` or `source/mode` where there are several. None for what was given up.

    Modes are `greedy`, `sampled`, and with several samples `mean@4` and `pass@4` or alike.
    """
    scores = {
        name.removeprefix(EVALUATION).replace("/reward/", "/"): row[name] for name in row if name.startswith(EVALUATION)
    }
    scores |= {found[1]: None for name in row if (found := GIVEN_UP.fullmatch(name))}
    modes = [label.rsplit("/", 1)[-1] for label in scores]
    if "set" in row or len(set(modes)) < len(modes):
        return scores
    return dict(zip(modes, scores.values(), strict=True))


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and line.endswith("\n") else None


def set_aside(folder: Path, *, after: int) -> None:
    """Move rows above step or version `after`, and broken lines, to metrics.discarded.jsonl: a row a step stays.

    So do evaluations of version `after` itself: the learner publishes it again, and it is evaluated again.
    """
    path = folder / FILE
    if not path.exists():
        return
    kept: list[str] = []
    discarded: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        row = _parse(line) or {}
        step, version = row.get("step"), row.get("version")
        stays = step <= after if isinstance(step, int) else isinstance(version, int) and version < after
        (kept if stays else discarded).append(line if line.endswith("\n") else line + "\n")
    if not discarded:
        return
    with (folder / DISCARDED).open("a", encoding="utf-8") as file:
        file.writelines(discarded)
        file.flush()
        os.fsync(file.fileno())
    beside = path.with_suffix(".jsonl.new")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
