"""What processes and torch wrote down, as spans on one clock: Unix time of replay's machine, in ns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import SlipstreamError
from replay.timeline import FILE as TIMELINE
from slipstream.runtime.trace import FOLDER
from slipstream.view.dashboard.pipeline import peer_lanes

REPLAY = "replay"
TORCH = "torch: "
"""Begins the names of lanes of torch's profile."""
IGNORED = ("External id", "Ev Idx", "Record function id", "Trace name", "Trace iter")
"""Arguments of torch's events that are for other tools."""


class TraceError(SlipstreamError, RuntimeError, code="SLIP-REPORT-03"):
    """There is nothing to merge, or a file is not what it should be."""


@dataclass(frozen=True, slots=True)
class Span:
    """In ns of Unix time."""

    start: int
    end: int
    name: str
    parts: tuple[tuple[str, int, int], ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Track:
    """Spans of a process that nest like calls, or with `at_once` overlap in any way."""

    spans: list[Span] = field(default_factory=list)
    at_once: bool = False


@dataclass(slots=True)
class TraceProcess:
    """One process of the run, over its restarts."""

    name: str
    role: str
    host: str = "?"
    clock: str = ""
    """How its times were brought onto replay's clock."""
    lanes: dict[str, Track] = field(default_factory=dict)

    def add(self, lane: str, span: Span, *, at_once: bool = False) -> None:
        """Append to a lane, unless the span is negative: a clock that was set back meanwhile."""
        if span.end >= span.start:
            self.lanes.setdefault(lane, Track(at_once=at_once)).spans.append(span)


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a process, from its line on."""

    head: Mapping[str, Any]
    lines: list[dict[str, Any]]

    @property
    def clock(self) -> Mapping[str, float] | None:
        """The most certain measurement against replay's clock."""
        found = [line["clock"] for line in self.lines if "clock" in line]
        return min(found, key=lambda clock: float(clock["error_s"]), default=None)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of JSON, without a torn last one. Raises TraceError: another one is broken, as by a disk that was full."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(lines):
                return  # killed while it wrote
            raise TraceError(f"{path}, line {number}: no JSON: {text[:60]!r}; delete the line, or the file") from error
        yield line


def starts(path: Path) -> list[Start]:
    """All starts of a process. Raises TraceError: a line that is not the last one is broken."""
    found: list[Start] = []
    for line in lines_of(path):
        if "process" in line:
            found.append(Start(line, []))
        elif found:
            found[-1].lines.append(line)
    return found


def read(run_dir: Path) -> list[TraceProcess]:
    """Every process of trace/, and what replay saw of rollout servers (timeline.jsonl).

    Raises:
        TraceError: there is no trace, or it is broken.
    """
    files = sorted((run_dir / FOLDER).glob("*.jsonl"))
    if not files:
        raise TraceError(f"{run_dir / FOLDER}: no spans; trace steps of a run with --profile 3:6 (tracking.profile)")
    all_starts = {path.stem: starts(path) for path in files}
    reference = next((start.head for start in all_starts.get(REPLAY, [])), None)
    found = {name: _process(name, of, reference) for name, of in all_starts.items() if of}
    for name, of in all_starts.items():
        path = run_dir / FOLDER / f"torch-{name.removeprefix('learner-')}.json"
        if name.startswith("learner-") and of and path.exists():
            add_torch(found[name], path, shift=_shift(of[-1], reference)[0] - int(of[-1].head["unix_ns"]))
    _add_states(found, run_dir / TIMELINE)
    return list(found.values())


def _process(name: str, of: Sequence[Start], reference: Mapping[str, Any] | None) -> TraceProcess:
    process = TraceProcess(name, str(of[-1].head.get("role", "?")), str(of[-1].head.get("host", "?")))
    for start in of:
        shift, process.clock = _shift(start, reference)
        for line in start.lines:
            if "lane" in line:
                parts = tuple((part[0], part[1] + shift, part[2] + shift) for part in line.get("parts", ()))
                span = Span(line["start"] + shift, line["end"] + shift, line["name"], parts, line.get("args", {}))
                process.add(line["lane"], span, at_once=line.get("at_once", False))
    return process


def _shift(start: Start, reference: Mapping[str, Any] | None) -> tuple[int, str]:
    """Ns from the monotonic clock of a start to Unix time of replay's machine, and how that is known."""
    own, clock = int(start.head["unix_ns"]), start.clock
    if reference is None:
        return own, "its own Unix time: replay wrote no spans"
    if start.head["boot"] == reference["boot"]:
        return int(reference["unix_ns"]), "the monotonic clock of replay's machine"
    if clock is None:
        return own, "its own Unix time: its clock was not measured against replay's"
    ahead, error = float(clock["ahead_s"]), float(clock["error_s"])
    said = f"its own Unix time {ahead * 1e3:+.3f} ms, measured over the channel, wrong by {error * 1e3:.3f} ms at most"
    return own + round(ahead * 1e9), said


def _add_states(found: dict[str, TraceProcess], path: Path) -> None:
    """What replay saw of its peers; of a server whose spans are on another host's disk it is all there is."""
    events = list(lines_of(path)) if path.exists() else []
    roles = {event["name"]: event for event in events if event.get("event") == "joined"}
    for lane in peer_lanes(events, end=max([float(event["time"]) for event in events], default=0.0)):
        about = roles.get(lane.name, {})
        if lane.name not in found:
            role, host = about.get("role", "?"), about.get("host", "?")
            found[lane.name] = TraceProcess(lane.name, role, host, "replay's, from timeline.jsonl")
        elif found[lane.name].role == "learner":
            continue
        for start, end, kind, label in lane.spans:
            args = {"state": kind}
            found[lane.name].add("state", Span(round(start * 1e9), round(end * 1e9), label, args=args))


def add_torch(process: TraceProcess, path: Path, *, shift: int) -> None:
    """Torch's profile as lanes of a rank: a thread or a stream each. Flows and counters are left out.

    Raises:
        TraceError: the file is not a profile.
    """
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        base, events = int(profile["baseTimeNanoseconds"]), profile["traceEvents"]
    except (ValueError, KeyError) as error:
        text = f"{path}: not a whole profile of torch ({type(error).__name__}: {error}); delete it, and merge again"
        raise TraceError(text) from error
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in _metadata(events, "thread_name")}
    labels = {event["pid"]: event["args"]["labels"] for event in _metadata(events, "process_labels")}
    for event in events:
        if event.get("ph") != "X" or not isinstance(event["pid"], int):
            continue
        start = base + round(event["ts"] * 1000) + shift
        end = base + round((event["ts"] + event["dur"]) * 1000) + shift
        place = f"{labels.get(event['pid'], '')} {names.get((event['pid'], event['tid']), event['tid'])}".strip()
        args = {key: value for key, value in event.get("args", {}).items() if key not in IGNORED}
        process.add(TORCH + place, Span(start, end, event["name"], args=args))


def _metadata(events: Sequence[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("ph") == "M" and event.get("name") == name)
