"""The pipeline as lanes of spans: what each process did when, and so where the bubbles are.

The learner's spans come from the timings of metrics.jsonl, whose order in a step is fixed (learner/train.py); those of
rollout servers and of the other ranks from replay's timeline.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("rollout", "train", "publish", "evaluate", "wait", "checkpoint", "join", "quarantined")
"""In the order of the page's legend."""
PHASES = (("wait_batch", "wait"), ("update_actor", "train"), ("publish_wait", "publish"), ("param_sync", "publish"))
MAX_SPANS = 3000
"""In one answer; a longer window comes as shares of time in bins."""
BINS = 400

Row = Mapping[str, Any]


@dataclass(slots=True)
class Lane:
    """One process. `spans` are [start, end, kind, label], in unix seconds and ascending."""

    name: str
    spans: list[tuple[float, float, str, str]] = field(default_factory=list)

    def add(self, start: float, end: float, kind: str, label: str) -> None:
        """Append a span that is not empty."""
        if end > start:
            self.spans.append((start, end, kind, label))


def lanes(rows: Sequence[Row], events: Sequence[Row]) -> list[Lane]:
    """Learner first, then the weight bus, then every peer of replay by name."""
    steps = [row for row in rows if "step" in row and "time" in row]
    found = [_learner(steps), _broadcasts([row for row in rows if "time" in row])]
    end = max([float(row["time"]) for row in (*rows, *events) if "time" in row], default=0.0)
    # the first rank is the first lane, with its phases
    found += [lane for lane in peer_lanes(events, end=end) if lane.name != "learner-0"]
    return [lane for lane in found if lane.spans]


def _learner(steps: Sequence[Row]) -> Lane:
    lane = Lane("learner")
    for row in steps:
        start = float(row["time"]) - float(row.get("timing_s/step") or 0.0)
        lane.add(start - float(row.get("timing_s/checkpoint") or 0.0), start, "checkpoint", "checkpoint")
        for phase, kind in PHASES:
            end = start + float(row.get(f"timing_s/{phase}") or 0.0)
            lane.add(start, end, kind, f"step {row['step']}: {phase}")
            start = end
    return lane


def _broadcasts(rows: Sequence[Row]) -> Lane:
    """Each begins when the row of its version's step is written."""
    lane, made = Lane("weight bus"), {int(row["step"]): float(row["time"]) for row in rows if "step" in row}
    for row in rows:
        version, seconds = row.get("weight_sync/version"), row.get("weight_sync/seconds")
        if version is not None and seconds is not None and int(version) in made:
            start = made[int(version)]
            lane.add(start, start + float(seconds), "publish", f"broadcast of version {int(version)}")
    return lane


def peer_lanes(events: Sequence[Row], *, end: float) -> list[Lane]:
    """States of every peer of replay by name, of the lines of timeline.jsonl; what goes on still ends at `end`."""
    found: dict[str, Lane] = {}
    since: dict[str, tuple[float, str, str]] = {}
    for event in events:
        name, moment = str(event.get("name", "?")), float(event.get("time", 0.0))
        if event.get("event") == "ended":
            for other, (start, state, label) in since.items():
                found[other].add(start, moment, state, label)
            since.clear()
        if "state" not in event and event.get("event") != "lost":
            continue
        lane = found.setdefault(name, Lane(name))
        if name in since:
            start, state, label = since.pop(name)
            lane.add(start, moment, state, label)
        if "state" in event:
            state = str(event["state"])
            since[name] = (moment, state, _label(name, state, event.get("version")))
    for name, (start, state, label) in since.items():
        found[name].add(start, end, state, label)
    return [found[name] for name in sorted(found)]


def _label(name: str, state: str, version: object) -> str:
    if name.startswith("learner"):
        return "waits for its batch" if state == "wait" else state
    return f"{'waits for leases' if state == 'wait' else state}, version {version}"


def window(found: Sequence[Lane], start: float | None, end: float | None) -> dict[str, Any]:
    """What lies between two moments: spans, or where they are too many, shares of each kind in BINS of time.

    `shares` are of each lane's own time in the window, by kind; `bubbles` the longest waits in it.
    """
    moments = [edge for lane in found for edge in (lane.spans[0][0], lane.spans[-1][1])]
    whole = (min(moments, default=0.0), max(moments, default=0.0))
    begin, finish = whole[0] if start is None else start, whole[1] if end is None else end
    inside = [[span for span in lane.spans if span[1] > begin and span[0] < finish] for lane in found]
    few = sum(map(len, inside)) <= MAX_SPANS
    edges = np.linspace(begin, finish, BINS + 1)
    named = [(lane.name, span) for lane, spans in zip(found, inside, strict=True) for span in spans]
    waits = [(span[1] - span[0], name, span[0], span[3]) for name, span in named if span[2] == "wait"]
    return {
        "kinds": KINDS,
        "whole": whole,
        "start": begin,
        "end": finish,
        "lanes": [
            {
                "name": lane.name,
                "shares": _shares(spans, begin, finish),
                **({"spans": spans} if few else {"bins": _bins(spans, edges)}),
            }
            for lane, spans in zip(found, inside, strict=True)
        ],
        "bubbles": [
            {"seconds": seconds, "lane": name, "start": since, "label": label}
            for seconds, name, since, label in sorted(waits, reverse=True)[:10]
        ],
    }


def _shares(spans: Sequence[tuple[float, float, str, str]], begin: float, finish: float) -> dict[str, float]:
    """Of the time from the lane's first span in the window to its last."""
    if not spans:
        return {}
    length = min(finish, spans[-1][1]) - max(begin, spans[0][0])
    seconds = {kind: 0.0 for kind in KINDS}
    for start, end, kind, _ in spans:
        seconds[kind] = seconds.get(kind, 0.0) + min(end, finish) - max(start, begin)
    return {kind: round(value / length, 4) for kind, value in seconds.items() if value and length > 0}


def _bins(spans: Sequence[tuple[float, float, str, str]], edges: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Share of each bin by kind: differences of the seconds that were covered up to each edge."""
    found = {}
    for kind in KINDS:
        own = [(start, end) for start, end, other, _ in spans if other == kind]
        if own:
            starts, ends = (np.sort(np.array(side)) for side in zip(*own, strict=True))
            covered = np.diff(_before(starts, edges) - _before(ends, edges)) / max(1e-9, edges[1] - edges[0])
            found[kind] = [round(float(share), 3) for share in covered]
    return found


def _before(moments: np.ndarray[Any, Any], edges: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each edge: Σ max(0, edge − moment), over ascending moments."""
    count = np.searchsorted(moments, edges)
    origin = edges[0]  # unix seconds squared would lose milliseconds
    sums = np.concatenate([[0.0], np.cumsum(moments - origin)])
    covered: np.ndarray[Any, Any] = count * (edges - origin) - sums[count]
    return covered
