"""Gauges of many processes as one number a name, for metrics.jsonl."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

PREFIX = "vitals/"
MEANS = "vitals/gpu_utilization/"


def merged(gauges: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Those of processes' watches: the mean of utilizations, the most of everything else."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for of_one in gauges:
        for name, value in of_one.items():
            if name.startswith(PREFIX):
                values[name].append(value)
    return {name: fmean(found) if name.startswith(MEANS) else max(found) for name, found in values.items()}
