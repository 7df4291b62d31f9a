"""An index of the saved trajectories and evaluation answers of a run: filters, orders, pages.

Numbers of every line are a table of SQLite in memory (some 100 bytes each), texts stay in their files and are read a
page at a time. A thread builds the index, newest step first, so a page is there at once.
"""

import json
import math
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import SlipstreamError

SORTABLE = ("step", "reward", "advantage", "length", "lag", "turns", "ratio", "index")
COLUMNS = ("file", "kind", "offset", "step", "reward", "advantage", "length", "lag", "turns", "ratio", "index",
           "trajectory", "problem")  # fmt: skip
NAMES = ", ".join(f'"{column}"' for column in COLUMNS)
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
Row = Mapping[str, Any]
"""A line by COLUMNS."""


class GoneError(SlipstreamError, ValueError, code="SLIP-REPORT-04"):
    """A line that the index has is no longer in its file."""


class Trajectories:
    """The index of one run. Safe to use from several threads."""

    def __init__(self, folder: Path, max_new_tokens: int) -> None:
        self.folder, self.max_new_tokens = folder, max_new_tokens
        self._lock = threading.Lock()
        self._table = sqlite3.connect(":memory:", check_same_thread=False)
        self._table.row_factory = sqlite3.Row
        self._table.execute(f"CREATE TABLE lines ({NAMES})")
        self._stamps: dict[str, tuple[int, int]] = {}
        """Size and modification time in ns of each file in the table: another one is another file."""
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
        wanted = [f'"{_known(SORTABLE, column)}" BETWEEN ? AND ?' for column in filters]
        values: list[Any] = [bound for bounds in filters.values() for bound in bounds]
        for column, names, value in (("kind", KINDS, kind), ("problem", PROBLEMS, problem)):
            if value:
                wanted.append(f"{column} = ?")
                values.append(_known(names, value))
        chosen, way = f"FROM lines WHERE {' AND '.join(wanted or ['1'])}", "DESC" if descending else "ASC"
        column = f'"{_known(SORTABLE, sort)}"'
        # lines without such a number come last either way; ties by place, so pages never overlap
        order = f"ORDER BY {column} IS NULL, {column} {way}, rowid {way} LIMIT ? OFFSET ?"
        with self._lock:
            (total,) = self._table.execute("SELECT count(*) FROM lines").fetchone()
            (found,) = self._table.execute(f"SELECT count(*) {chosen}", values).fetchone()
            shown = self._table.execute(f"SELECT * {chosen} {order}", [*values, min(count, MAX_PAGE), first]).fetchall()
        gone: list[str] = []
        return {
            "rows": [self._brief(row, gone) for row in shown],
            "total": total,
            "found": found,
            "files": self._files,
            "files_read": self._looked_at,
            "broken": next(filter(None, [*gone, self._broken, *self._left_out]), ""),
        }

    def one(self, name: str) -> dict[str, Any]:
        """The whole line of an id that a page gave: file and offset, both of which the index must have.

        Raises:
            KeyError: it has not.
            GoneError: the file was deleted or written anew since.
        """
        with self._lock:
            row = self._table.execute("SELECT * FROM lines WHERE file || ':' || offset = ?", [name]).fetchone()
            if row is None:
                raise KeyError(f"{name}: no line there; if it was, its file was deleted or written anew since")
            same = "SELECT file, offset FROM lines WHERE kind = 'trained' AND step = ? AND trajectory = ? ORDER BY 1, 2"
            samples = self._table.execute(same, [row["step"], row["trajectory"]]).fetchall()
        # all samples of its trajectory, itself included: one, mostly
        ids = [_id(each) for each in samples] if row["kind"] == "trained" else []
        return {**_numbers(row), "samples": ids, "line": self._line(row)}

    def _line(self, row: Row) -> dict[str, Any]:
        """Raises GoneError: it is no longer where the index has it."""
        try:
            with (self.folder / row["file"]).open("rb") as file:
                file.seek(row["offset"])
                found = json.loads(file.readline())
        except FileNotFoundError:
            why = "was deleted since this page listed it; a run deletes none, so see what else cleans its folder"
        except ValueError:
            why = "was written anew since this page listed it, as by --resume; draw the page again"
        else:
            return found if isinstance(found, dict) else {}
        raise GoneError(f"{row['file']} {why}")

    def _brief(self, row: Row, gone: list[str]) -> dict[str, Any]:
        """A line of a page; of one that is no longer in its file the numbers, and why among the `gone`."""
        line: Mapping[str, Any] = {}
        try:
            line = self._line(row)
        except GoneError as error:
            gone.append(str(error))
        return {**_numbers(row), "prompt": _prompt(line)[:TEXT_CHARS], "text": str(line.get("text", ""))[:TEXT_CHARS]}

    def _scan(self) -> None:
        left_out: list[str] = []
        named = sorted(self._named(left_out), reverse=True)
        for file in self._stamps.keys() - {file for _, _, file in named}:
            self._put(file, [])
            del self._stamps[file]
        self._files = len(named)
        for number, (step, kind, file) in enumerate(named, start=1):
            if self._closed:
                return
            try:
                stat = (self.folder / file).stat()
                stamp = (stat.st_size, stat.st_mtime_ns)
                if self._stamps.get(file) != stamp:
                    self._put(file, list(self._read(file, kind, step)))
                    self._stamps[file] = stamp
            except (OSError, *BAD_LINE) as error:  # pruned meanwhile, or a disk
                left_out.append(_why_not(file, error))
            self._looked_at = number
        self._left_out = left_out

    def _put(self, file: str, rows: Sequence[Sequence[Any]]) -> None:
        """Take the lines of a file in, in place of those of before."""
        with self._lock, self._table:  # all of them or none
            self._table.execute("DELETE FROM lines WHERE file = ?", [file])
            self._table.executemany(f"INSERT INTO lines VALUES ({', '.join('?' * len(COLUMNS))})", rows)

    def _named(self, left_out: list[str]) -> Iterator[tuple[int, str, str]]:
        """Step or version, kind and name of each file; one whose name does not say them is `left_out`."""
        for kind, (pattern, name) in zip(KINDS, FILES, strict=True):
            for path in self.folder.glob(pattern):
                file = str(path.relative_to(self.folder))
                match = name.fullmatch(file)
                if match is None:
                    left_out.append(f"{file} is left out: it is not named as {pattern.replace('*', 'N')}")
                else:
                    yield int(match[1]), kind, file

    def _read(self, file: str, kind: str, step: int) -> Iterator[tuple[Any, ...]]:
        offset = 0
        with (self.folder / file).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    try:
                        yield file, kind, offset, step, *self._measure(json.loads(line), kind, step)
                    except BAD_LINE as error:
                        self._broken = self._broken or _why_not(f"{file}, line {number}", error)
                offset += len(line)

    def _measure(self, line: Mapping[str, Any], kind: str, step: int) -> tuple[Any, ...]:
        """The columns from `reward` to `problem` of a line."""
        reward = float(line["reward"])
        if kind == "evaluation":
            problem = "cut" if line.get("finish_reason") == "length" else "none"
            return reward, None, int(line["tokens"]), 0, 1, None, int(line["index"]), None, problem
        mask, versions = line["loss_mask"], line["versions"]
        sampled = [bool(trained or logprob) for trained, logprob in zip(mask, line["logprobs"], strict=True)]
        oldest = min((v for v, trained in zip(versions, mask, strict=True) if trained), default=step - 1)
        turns = sum(1 for before, now in zip([False, *sampled], sampled, strict=False) if now and not before)
        ratio, advantage = _largest_ratio(line), float(line["advantage"])
        problem = "none"
        if self.max_new_tokens and len(mask) >= self.max_new_tokens:
            problem = "cut"
        elif advantage == 0:
            problem = "no_signal"
        elif ratio is not None and ratio > DRIFTED:
            problem = "drifted"
        elif sum(sampled) > sum(mask):
            problem = "masked"
        place = (int(line["group"][1]), int(line["trajectory"]))
        return reward, advantage, len(mask), step - 1 - oldest, turns, ratio, *place, problem


def _why_not(what: str, error: Exception) -> str:
    return f"{what} is left out: {type(error).__name__}: {error}"


def _largest_ratio(line: Mapping[str, Any]) -> float | None:
    """Of a token's ratio of trainer and behaviour probability or its inverse, the largest; None without any."""
    pairs = zip(line.get("trainer_logprobs") or (), line["logprobs"], strict=False)
    largest = max((abs(trainer - behaviour) for trainer, behaviour in pairs if trainer is not None), default=None)
    return None if largest is None else math.exp(min(largest, 80.0))


def _prompt(line: Mapping[str, Any]) -> str:
    """As text; of chat messages, what they say."""
    prompt = line.get("prompt", "")
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def _known(names: Sequence[str], name: str) -> str:
    """Raises KeyError: it is none of the names."""
    if name not in names:
        raise KeyError(f"{name!r} is none of {', '.join(names)}")
    return name


def _id(row: Row) -> str:
    return f"{row['file']}:{row['offset']}"


def _numbers(row: Row) -> dict[str, Any]:
    numbers = {name: None if row[name] is None else round(row[name], 6) for name in SORTABLE}
    return {"id": _id(row), **numbers, "kind": row["kind"], "problem": row["problem"], "file": row["file"]}
