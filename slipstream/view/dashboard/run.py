"""One run folder, followed as it grows: metrics, timeline, logs and trajectories."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.errors import BadFile, InputMissing
from learner.record.metrics import FILE as METRICS
from replay.timeline import FILE as TIMELINE
from slipstream.launch.children import Tail
from slipstream.runtime.ending import read
from slipstream.runtime.trace import FOLDER as TRACES
from slipstream.view.dashboard import fleet, pipeline, series
from slipstream.view.dashboard.trajectories import Trajectories
from slipstream.view.live_text import MetricRows, Row
from slipstream.view.logs import Warned, Warnings

SECTIONS = ("learner", "replay", "rollout")
"""Of the configuration: those that are read here."""

MAX_WARNINGS = 200


@dataclass(slots=True)
class Lines:
    """JSON objects of a file that grows. Broken lines are left out, and the first one is named."""

    path: Path
    tail: Tail = field(init=False)
    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: str = ""
    """The first broken line and its number, for the reader."""
    _inode: int = 0
    _count: int = 0

    def __post_init__(self) -> None:
        self.tail = Tail(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All rows so far; from the start again where the file was written anew, as `--resume` does."""
        new = self.tail.new_lines()
        if self.tail.inode != self._inode:
            self._inode, self.rows, self.broken, self._count = self.tail.inode, [], "", 0
        for line in new:
            self._count += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                why = f"{line[:60]!r} is no JSON object"
            elif not isinstance(row.get("step", 0), int | float):
                why = f"step {row['step']!r} is no number"
            else:
                self.rows.append(row)
                continue
            self.broken = self.broken or f"{self.path.name}, line {self._count}: {why}"
        return self.rows

    @property
    def stamp(self) -> str:
        """Changes with the file."""
        return f"{self.tail.inode}-{self.tail.offset}"


class RunReader:
    """A run folder. Safe to use from several threads; nothing in the folder is changed."""

    def __init__(self, folder: Path) -> None:
        """Follow a folder. Raises ConfigError: it has neither a configuration nor metrics."""
        if not (folder / "config.yaml").is_file() and not (folder / METRICS).is_file():
            raise InputMissing(
                f"{folder}: no config.yaml and no {METRICS} there; name a run folder, as runs/quickstart"
            )
        self.folder, self.name = folder.resolve(), folder.resolve().name
        self._lock = threading.Lock()
        self._metrics, self._timeline = Lines(self.folder / METRICS), Lines(self.folder / TIMELINE)
        self._warnings, self._warned = Warnings(self.folder / "logs"), list[Warned]()
        self._lanes: tuple[tuple[str, str], list[pipeline.Lane]] = (("", ""), [])
        """Of the files' stamps: a reader who zooms asks for the same ones again."""
        self.config = _config(self.folder / "config.yaml")
        self.trajectories = Trajectories(self.folder, self._of("rollout", "max_new_tokens"))

    def _of(self, section: str, key: str, default: int = 0) -> int:
        value = self.config.get(section, {}).get(key, default)
        return value if isinstance(value, int) else default

    def metrics(self, stamp: str = "") -> dict[str, Any]:
        """Curves and facts; `{"same": true}` where nothing came since the answer with this stamp."""
        with self._lock:
            rows = self._metrics.read()
            ending = read(self.folder)
            head: dict[str, Any] = {"stamp": f"{self._metrics.stamp}{'-ended' if ending else ''}", "name": self.name}
            if stamp == head["stamp"]:
                return {**head, "same": True}
            progress = self._progress(rows)
            facts = {"total_steps": progress.total_steps, "async_lag": progress.async_lag, **self.ending()}
            facts["eta_s"] = None if ending is not None else progress.eta_s()
            broken = self._metrics.broken or self._timeline.broken
            return {**head, **facts, "broken": broken, **series.of(progress, rows)}

    def _progress(self, rows: Sequence[Row]) -> MetricRows:
        progress = MetricRows(self._of("learner", "total_steps"), self._of("replay", "async_lag"), kept=None)
        for row in rows:
            progress.add(row)
        return progress

    def series(self, names: Sequence[str]) -> dict[str, Any]:
        """Curves of metrics by name. Raises ValueError: too many."""
        with self._lock:
            return series.chosen(self._progress(self._metrics.read()).steps, names)

    def pipeline(self, start: float | None, end: float | None) -> dict[str, Any]:
        """What each process did between two moments (unix seconds); all of the run without them."""
        with self._lock:
            rows, events = self._metrics.read(), self._timeline.read()
            stamp = (self._metrics.stamp, self._timeline.stamp)
            if self._lanes[0] != stamp:
                self._lanes = (stamp, pipeline.lanes(rows, events))
            lanes = self._lanes[1]
        return {**pipeline.window(lanes, start, end), "traces": sorted(self.traces())}

    def traces(self) -> dict[str, Path]:
        """Merged traces (`--profile`) by the names of their files."""
        return {path.name: path for path in (self.folder / TRACES).glob("steps_*.json.gz")}

    def fleet(self) -> dict[str, Any]:
        """Every peer of replay, and what happened to it."""
        with self._lock:
            events, rows = self._timeline.read(), self._metrics.read()
            last: Row = next((row for row in reversed(rows) if "step" in row), {})
            found = fleet.of(events, last)
            self._warned = sorted([*self._warned, *self._warnings.new()], key=lambda line: line.time)[-MAX_WARNINGS:]
            log = [asdict(line) for line in reversed(self._warned)]
        return {**found, "has_timeline": self._timeline.path.is_file(), "log": log}

    def ending(self) -> dict[str, Any]:
        """How the run has ended: `ending` in words, empty while it goes on, and whether it `failed`."""
        ending = read(self.folder)
        return (
            {"ending": ending.said, "failed": ending.failed} if ending is not None else {"ending": "", "failed": False}
        )

    def age_s(self) -> float | None:
        """Seconds since the run wrote metrics or its timeline; None before it has."""
        paths = [path for path in (self._metrics.path, self._timeline.path) if path.exists()]
        return max(0.0, time.time() - max(path.stat().st_mtime for path in paths)) if paths else None


def _config(path: Path) -> Mapping[str, Any]:
    """The resolved configuration; empty where there is none. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BadFile(f"{path}: not YAML: {error}; restore the run's configuration") from error
    found = found if isinstance(found, dict) else {}
    for section in SECTIONS:
        if not isinstance(found.get(section, {}), dict):
            raise BadFile(f"{path}: {section}: {found[section]!r} has no keys; restore the run's configuration")
    return found
