"""Spans of all processes as one file of Chrome's trace format, which Perfetto opens: trace/steps_3_5.json.gz."""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.runtime.trace import FOLDER
from slipstream.view.trace.sources import Span, TraceError, TraceProcess, Track, read

STEP = re.compile(r"step (\d+)")
ORDER = ("learner", "replay", "rollout_server")
MICRO = 1000


def merge(run_dir: Path) -> tuple[Path, list[TraceProcess], range]:
    """Write the trace of a run folder; where it is, the processes cut to its window, and the steps.

    Raises:
        TraceError: there is no trace, it is broken, or no step of it was trained.
    """
    processes = read(run_dir)
    steps = _steps(processes, run_dir)
    numbers = sorted(steps)
    begin, end = min(span.start for span in steps.values()), max(span.end for span in steps.values())
    for process in processes:
        for lane in process.lanes.values():
            lane.spans = [span for span in lane.spans if span.start < end and span.end > begin]
    processes = [process for process in processes if any(lane.spans for lane in process.lanes.values())]
    processes.sort(key=lambda process: (ORDER.index(process.role) if process.role in ORDER else 9, process.name))
    path = run_dir / FOLDER / f"steps_{numbers[0]}_{numbers[-1]}.json.gz"
    beside = path.with_suffix(".new")
    with gzip.open(beside, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps(_about(processes, begin)))
        file.write(',\n"traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events(processes)))
        file.write("\n]}\n")
    beside.replace(path)
    return path, processes, range(numbers[0], numbers[-1] + 1)


def _steps(processes: Sequence[TraceProcess], run_dir: Path) -> dict[int, Span]:
    """Steps of the first rank: those that are whole; of one that was trained again, the last time."""
    first = next((process for process in processes if process.name == "learner-0"), None)
    spans = first.lanes["steps"].spans if first is not None and "steps" in first.lanes else []
    found = {int(match[1]): span for span in spans if (match := STEP.fullmatch(span.name))}
    if not found:
        raise TraceError(f"{run_dir / FOLDER}: learner rank 0 has no whole step there yet; merge again later")
    return found


def _about(processes: Sequence[TraceProcess], begin: int) -> dict[str, Any]:
    clocks = {process.name: process.clock for process in processes}
    return {"unix_ns_of_first_step": str(begin), "clock": "Unix time of replay's machine", "clocks": clocks}


def events(processes: Sequence[TraceProcess]) -> Iterator[dict[str, Any]]:
    """Chrome's events, in microseconds from the first span on: no two of a track overlap, but they nest."""
    spans = [span for process in processes for lane in process.lanes.values() for span in lane.spans]
    origin = min(span.start for span in spans)
    for pid, process in enumerate(processes, start=1):
        host = {"name": f"{process.name} ({process.host})"}
        about = {"process_name": host, "process_sort_index": {"sort_index": pid}}
        yield from ({"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args} for name, args in about.items())
        tid = 0
        for name, lane in process.lanes.items():
            for number, track in enumerate(tracks(lane), start=1):
                tid += 1
                shown = f"{name} {number}" if number > 1 or lane.at_once else name
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": shown}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
                for span in track:
                    yield from _events(span, origin, pid=pid, tid=tid)


def _events(span: Span, origin: int, *, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    for name, start, end in ((span.name, span.start, span.end), *span.parts):
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": (start - origin) / MICRO}
        event["dur"] = (end - start) / MICRO
        yield {**event, **({"args": dict(span.args)} if span.args and name == span.name else {})}


def tracks(lane: Track) -> list[list[Span]]:
    """A lane's spans divided so that those of a track nest or lie apart; with `at_once` they lie apart."""
    found: list[list[Span]] = []
    open_: list[list[int]] = []
    """Of each track, the ends of the spans around the present moment."""
    for span in sorted(lane.spans, key=lambda span: (span.start, -span.end)):
        for ends in open_:
            while ends and ends[-1] <= span.start:
                ends.pop()
        fits = (i for i, ends in enumerate(open_) if not ends or (not lane.at_once and span.end <= ends[-1]))
        place = next(fits, None)
        if place is None:
            place = len(found)
            found.append([])
            open_.append([])
        found[place].append(span)
        open_[place].append(span.end)
    return found
