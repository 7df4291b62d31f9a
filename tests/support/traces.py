"""A reader of traces in Chrome's format that knows nothing of how they are made."""

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """`lanes` are (process, name) by (pid, tid)."""

    spans: list[Event]
    lanes: dict[tuple[int, int], tuple[str, str]]
    other: dict[str, Any]

    def of(self, process: str, lane: str) -> list[Event]:
        """Spans of a lane, in order of time."""
        found = [event for event in self.spans if self.lanes[event["pid"], event["tid"]] == (process, lane)]
        return sorted(found, key=lambda event: float(event["ts"]))

    def span(self, process: str, lane: str, name: str) -> Event:
        """The first of a name."""
        return next(event for event in self.of(process, lane) if event["name"] == name)


def parsed(path: Path) -> Trace:
    """Read a trace/steps_A_B.json.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        whole = json.load(file)
    events = whole["traceEvents"]
    names = {event["pid"]: event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"}
    lanes = {
        (event["pid"], event["tid"]): (names[event["pid"]], event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }
    return Trace([event for event in events if event["ph"] == "X"], lanes, whole["otherData"])


def problems(spans: Sequence[Event], *, nested: bool = True) -> list[str]:
    """Spans that begin before 0, are negative, or cross another one of their lane; or lie in it, unless `nested`.

    Times are in microseconds with three digits, so they are compared in ns.
    """
    found = []
    by_lane: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in spans:
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        if start < 0 or length < 0:
            found.append(f"{event['name']}: begins at {start} ns and lasts {length} ns")
        by_lane[event["pid"], event["tid"]].append((start, start + length, event["name"]))
    for lane, own in by_lane.items():
        around: list[tuple[int, str]] = []
        for start, end, name in sorted(own, key=lambda span: (span[0], -span[1])):
            while around and around[-1][0] <= start:
                around.pop()
            if around and (end > around[-1][0] or not nested):
                found.append(f"lane {lane}: {name} crosses {around[-1][1]}")
            around.append((end, name))
    return found
