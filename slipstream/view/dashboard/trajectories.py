"""An index of the saved trajectories and evaluation answers of a run: filters, orders, pages.

Numbers of every line are in memory (some 50 bytes each), texts stay in their files and are read a page at a time. A
thread builds the index, newest step first, so a page is there at once.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import SlipstreamError

Array = np.ndarray[Any, Any]

COLUMNS = np.dtype([
    ("offset", "<i8"), ("step", "<i4"), ("reward", "<f4"), ("advantage", "<f4"), ("length", "<i4"), ("lag", "<i2"),
    ("turns", "<i2"), ("ratio", "<f4"), ("index", "<i4"), ("trajectory", "<i4"), ("problem", "i1"), ("kind", "i1"),
])  # fmt: skip
SORTABLE = ("step", "reward", "advantage", "length", "lag", "turns", "ratio", "index")
KINDS = ("trained", "evaluation")
FILES = (
    ("rollouts/step_*/rank_*.jsonl", re.compile(r"rollouts/step_(\d{1,9})/rank_\d+\.jsonl")),
    ("evaluations/version_*.jsonl", re.compile(r"evaluations/version_(\d{1,9})(_.+)?\.jsonl")),
)
"""Of each kind: what is looked at, and which of that has a step or version."""
BAD_LINE = (ValueError, LookupError, TypeError, ArithmeticError)
"""What a line that is not as the learner writes it may raise."""
PROBLEMS = ("none", "cut", "no_signal", "drifted", "masked")
"""Cut at rollout.max_new_tokens; advantage 0, so it teaches nothing; a token whose ratio left [0.5, 2]; sampled tokens
that are outside the loss (too old, a turn that was left out). The first that applies."""
DRIFTED = 2.0
MAX_PAGE = 200
TEXT_CHARS = 160
"""Of prompt and answer in a page."""


class GoneError(SlipstreamError, ValueError, code="SLIP-REPORT-04"):
    """A line that the index has is no longer in its file."""


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """One file of lines."""

    path: Path
    kind: int
    step: int
    """Of trained ones; of an evaluation, the version."""
    stamp: tuple[int, int]
    """Size and modification time in ns: another one is another file."""


class Trajectories:
    """The index of one run. Safe to use from several threads."""

    def __init__(self, folder: Path, max_new_tokens: int) -> None:
        self.folder, self.max_new_tokens = folder, max_new_tokens
        self._lock = threading.Lock()
        self._parts: dict[Path, tuple[TrajectoryFile, Array]] = {}
        self._table: tuple[list[TrajectoryFile], Array, Array] | None = None
        """Of all parts; None where they have changed."""
        self._files, self._looked_at = 0, 0
        """Of the scan that runs, or of the last one."""
        self._broken = ""
        """The first line that is left out."""
        self._left_out: list[str] = []
        """Files that the last scan could not take in, and why."""
        self._scanning: threading.Thread | None = None
        self._closed = False

    def scan(self) -> None:
        """Look for new files in a thread of its own, unless one looks already."""
        with self._lock:
            if self._closed or (self._scanning is not None and self._scanning.is_alive()):
                return
            self._scanning = threading.Thread(target=self._scan, name="trajectory-index", daemon=True)
            self._scanning.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the scan that runs ended within so many seconds."""
        thread = self._scanning
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Have a scan that runs end soon."""
        self._closed = True

    def page(
        self, filters: Mapping[str, tuple[float, float]], *, kind: str, problem: str, sort: str, descending: bool,
        first: int, count: int,
    ) -> dict[str, Any]:  # fmt: skip
        """`count` lines from the `first` one on, of those whose columns lie within `filters` (bounds included).

        Raises:
            KeyError: an unknown column, kind or problem.
        """
        self.scan()
        sources, rows, files = self._joined()
        chosen = np.ones(len(rows), bool)
        for column, (low, high) in filters.items():
            values = rows[SORTABLE[_place(SORTABLE, column)]]
            chosen &= (values >= low) & (values <= high)
        if kind:
            chosen &= rows["kind"] == _place(KINDS, kind)
        if problem:
            chosen &= rows["problem"] == _place(PROBLEMS, problem)
        order = np.flatnonzero(chosen)
        values = rows[SORTABLE[_place(SORTABLE, sort)]][order]
        order = order[np.argsort(values, kind="stable")]  # ties by place, so pages never overlap
        if descending:
            known = len(values) - int(np.isnan(values).sum())  # lines without such a number come last either way
            order = np.concatenate([order[:known][::-1], order[known:]])
        shown = order[first : first + min(count, MAX_PAGE)].tolist()
        gone: list[str] = []
        briefs = [self._brief(sources[files[i]], rows[i], gone) for i in shown]
        return {
            "total": len(rows),
            "found": len(order),
            "files": self._files,
            "files_read": self._looked_at,
            "broken": next(filter(None, [*gone, self._broken, *self._left_out]), ""),
            "rows": briefs,
        }

    def one(self, name: str) -> dict[str, Any]:
        """The whole line of an id that a page gave: file and offset, both of which the index must have.

        Raises:
            KeyError: it has not.
            GoneError: the file was deleted or written anew since.
        """
        sources, rows, files = self._joined()
        file, _, offset = name.rpartition(":")
        number = next((i for i, source in enumerate(sources) if self._relative(source) == file), None)
        found = np.zeros(0, np.int64)
        if number is not None and offset.isdecimal() and len(offset) < 18:
            found = np.flatnonzero((files == number) & (rows["offset"] == int(offset)))
        if number is None or not found.size:
            raise KeyError(f"{name}: no line there; if it was, its file was deleted or written anew since")
        row = rows[int(found[0])]
        return {
            **self._numbers(sources[number], row),
            "samples": self._samples(sources, rows, files, row),
            "line": self._line(sources[number], int(offset)),
        }

    def _samples(self, sources: Sequence[TrajectoryFile], rows: Array, files: Array, row: Array) -> list[str]:
        """Ids of all samples of a line's trajectory, the line itself included: one, mostly."""
        if row["kind"] != KINDS.index("trained"):
            return []
        alike = (rows["kind"] == row["kind"]) & (rows["step"] == row["step"])
        places = np.flatnonzero(alike & (rows["trajectory"] == row["trajectory"])).tolist()
        found = sorted((self._relative(sources[files[i]]), int(rows["offset"][i])) for i in places)
        return [f"{file}:{offset}" for file, offset in found]

    def _joined(self) -> tuple[list[TrajectoryFile], Array, Array]:
        """Sources, and the lines of all of them with their source's number; newest file last."""
        with self._lock:
            if self._table is None:
                parts = list(self._parts.values())
                rows = np.concatenate([np.zeros(0, COLUMNS), *(part for _, part in parts)])
                files = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for _, part in parts])
                self._table = ([source for source, _ in parts], rows, files)
            return self._table

    def _line(self, source: TrajectoryFile, offset: int) -> dict[str, Any]:
        """Raises GoneError: it is no longer where the index has it."""
        try:
            with source.path.open("rb") as file:
                file.seek(offset)
                found = json.loads(file.readline())
        except FileNotFoundError:
            why = "was deleted since this page listed it; a run deletes none, so see what else cleans its folder"
        except ValueError:
            why = "was written anew since this page listed it, as by --resume; draw the page again"
        else:
            return found if isinstance(found, dict) else {}
        raise GoneError(f"{self._relative(source)} {why}")

    def _brief(self, source: TrajectoryFile, row: Array, gone: list[str]) -> dict[str, Any]:
        """A line of a page; of one that is no longer in its file the numbers, and why among the `gone`."""
        line: Mapping[str, Any] = {}
        try:
            line = self._line(source, int(row["offset"]))
        except GoneError as error:
            gone.append(str(error))
        prompt, text = _prompt(line), str(line.get("text", ""))
        return {**self._numbers(source, row), "prompt": prompt[:TEXT_CHARS], "text": text[:TEXT_CHARS]}

    def _numbers(self, source: TrajectoryFile, row: Array) -> dict[str, Any]:
        numbers = {column: _plain(row[column]) for column in SORTABLE}
        words = {"kind": KINDS[int(row["kind"])], "problem": PROBLEMS[int(row["problem"])]}
        file = self._relative(source)
        return {"id": f"{file}:{row['offset']}", **numbers, **words, "file": file}

    def _relative(self, source: TrajectoryFile) -> str:
        return str(source.path.relative_to(self.folder))

    def _scan(self) -> None:
        left_out: list[str] = []
        named = sorted(self._named(left_out), reverse=True)
        self._keep({path for _, _, path in named})
        self._files = len(named)
        for number, (step, kind, path) in enumerate(named, start=1):
            if self._closed:
                return
            try:
                self._take_in(path, kind, step)
            except (OSError, *BAD_LINE) as error:  # pruned meanwhile, or a disk
                left_out.append(_why_not(str(path.relative_to(self.folder)), error))
            self._looked_at = number
        self._left_out = left_out

    def _keep(self, there: set[Path]) -> None:
        """Leave out lines of all other files."""
        with self._lock:
            kept = {path: part for path, part in self._parts.items() if path in there}
            self._table = self._table if len(kept) == len(self._parts) else None
            self._parts = kept

    def _take_in(self, path: Path, kind: int, step: int) -> None:
        """Index a file that is new or another one than before. Raises OSError, BAD_LINE."""
        stat = path.stat()
        source = TrajectoryFile(path, kind, step, (stat.st_size, stat.st_mtime_ns))
        with self._lock:
            before = self._parts.get(path)
        if before is None or before[0] != source:
            rows = self._read(source)
            with self._lock:
                self._parts[path] = (source, rows)
                self._table = None

    def _named(self, left_out: list[str]) -> Iterator[tuple[int, int, Path]]:
        """Step or version, kind and path of each file; one whose name does not say them is `left_out`."""
        for kind, (pattern, name) in enumerate(FILES):
            for path in self.folder.glob(pattern):
                relative = str(path.relative_to(self.folder))
                match = name.fullmatch(relative)
                if match is None:
                    left_out.append(f"{relative} is left out: it is not named as {pattern.replace('*', 'N')}")
                else:
                    yield int(match[1]), kind, path

    def _read(self, source: TrajectoryFile) -> Array:
        rows: list[tuple[float, ...]] = []
        offset = 0
        with source.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    try:
                        rows.append((offset, source.step, *self._measure(json.loads(line), source), source.kind))
                    except BAD_LINE as error:
                        self._broken = self._broken or _why_not(f"{self._relative(source)}, line {number}", error)
                offset += len(line)
        return np.array(rows, COLUMNS)

    def _measure(self, line: Mapping[str, Any], source: TrajectoryFile) -> tuple[float, ...]:
        """The columns from `reward` to `problem` of a line."""
        reward = float(line["reward"])
        if source.kind == 1:
            cut = line.get("finish_reason") == "length"
            numbers = (int(line["tokens"]), 0, 1, np.nan, int(line["index"]), -1)
            return reward, np.nan, *numbers, PROBLEMS.index("cut") if cut else 0
        mask, versions = line["loss_mask"], line["versions"]
        sampled = [bool(trained or logprob) for trained, logprob in zip(mask, line["logprobs"], strict=True)]
        oldest = min((v for v, trained in zip(versions, mask, strict=True) if trained), default=source.step - 1)
        turns = sum(1 for before, now in zip([False, *sampled], sampled, strict=False) if now and not before)
        ratio, advantage = _largest_ratio(line), float(line["advantage"])
        problem = 0
        if self.max_new_tokens and len(mask) >= self.max_new_tokens:
            problem = PROBLEMS.index("cut")
        elif advantage == 0:
            problem = PROBLEMS.index("no_signal")
        elif ratio > DRIFTED:
            problem = PROBLEMS.index("drifted")
        elif sum(sampled) > sum(mask):
            problem = PROBLEMS.index("masked")
        place = (int(line["group"][1]), int(line["trajectory"]))
        return reward, advantage, len(mask), source.step - 1 - oldest, turns, ratio, *place, problem


def _why_not(what: str, error: Exception) -> str:
    return f"{what} is left out: {type(error).__name__}: {error}"


def _largest_ratio(line: Mapping[str, Any]) -> float:
    """Of a token's ratio of trainer and behaviour probability or its inverse, the largest; NaN without any."""
    pairs = zip(line.get("trainer_logprobs") or (), line["logprobs"], strict=False)
    largest = max((abs(trainer - behaviour) for trainer, behaviour in pairs if trainer is not None), default=np.nan)
    return float(np.exp(min(largest, 80.0)))


def _prompt(line: Mapping[str, Any]) -> str:
    """As text; of chat messages, what they say."""
    prompt = line.get("prompt", "")
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def _place(names: Sequence[str], name: str) -> int:
    """Raises KeyError: it is none of the names."""
    if name not in names:
        raise KeyError(f"{name!r} is none of {', '.join(names)}")
    return names.index(name)


def _plain(value: Any) -> float | int | None:
    number = value.item()
    return None if number != number else round(number, 6)
