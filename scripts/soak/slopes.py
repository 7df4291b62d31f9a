"""How memory, descriptors and threads of each role grew, from vitals/*.jsonl of runs."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replay.vitals.growth import HOUR_S, MIB, growth
from scripts.chaos.polling import JsonLines

SETTLE_S = 600.0
"""After its start a process makes its buffers and caches; samples of that time are left out."""
QUANTITIES = {"memory_mib_per_h": ("memory_bytes", MIB), "descriptors_per_h": ("descriptors", 1)}
QUANTITIES |= {"threads_per_h": ("threads", 1)}


def slopes(folders: Iterable[Path], settle_s: float = SETTLE_S) -> dict[str, dict[str, float]]:
    """By role: growth an hour, the mean over lives of its processes by their length; hours judged; the last memory.

    A life is what one process and one file say until the process is another one. Lives that are too short for a
    slope do not count.
    """
    weighted: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    hours: defaultdict[str, float] = defaultdict(float)
    last: dict[str, float] = {}
    for path in sorted(path for folder in folders for path in (folder / "vitals").glob("*.jsonl")):
        for role, samples in lives(path):
            last[role] = samples[-1]["memory_bytes"] / MIB
            settled = [one for one in samples if one["time"] - samples[0]["time"] >= settle_s]
            times = [one["time"] for one in settled]
            found = {name: growth(times, [one[key] for one in settled]) for name, (key, _) in QUANTITIES.items()}
            span = (times[-1] - times[0]) / HOUR_S if times else 0.0
            for name, slope in found.items():
                if slope is not None:
                    weighted[role][name] += slope.per_hour / QUANTITIES[name][1] * span
            if found["memory_mib_per_h"] is not None:
                hours[role] += span
    return {
        role: {
            **{name: round(weighted[role][name] / hours[role], 2) for name in QUANTITIES if hours[role]},
            "hours": round(hours[role], 2),
            "memory_mib": round(last[role], 1),
        }
        for role in sorted(last)
    }


def lives(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(role, samples) of each life of each role in a file."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for sample in JsonLines.read(path):
        found.setdefault((sample["role"], sample["pid"]), []).append(sample)
    return [(role, samples) for (role, _), samples in found.items()]
