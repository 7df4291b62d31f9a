"""Plot of a sweep: a panel for each first value, a curve a setting."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from slipstream.view.plot import COLOURS

Curves = dict[str, list[list[tuple[int, float]]]]
"""By setting: (version, accuracy) of each seed's run."""


def panels(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Curves]:
    """The curves of each panel. A sweep over one thing has one panel, without a name.

    Example: runs named "a.b=1 mild seed=0" and "a.b=2 mild seed=0" make the panels "a.b=1" and "a.b=2", each with a
    curve "mild".
    """
    found: dict[str, Curves] = {}
    for name, numbers in runs.items():
        first, *others = name.split(" ")[:-1] or ["runs"]
        panel, setting = (first, " ".join(others)) if others else ("", first)
        found.setdefault(panel, {}).setdefault(setting, []).append(numbers["curve"])
    return found


def mean_and_range(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """(version, mean, least, most) over seeds, at the versions that all of them evaluated."""
    by_version = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*(set(each) for each in by_version)))
    values = [(version, [each[version] for each in by_version]) for version in common]
    return [(version, fmean(at), min(at), max(at)) for version, at in values]


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw means over seeds, with a band from the worst seed to the best."""
    found = panels(runs)
    figure = Figure(figsize=(4 * len(found) + 2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    settings = list(dict.fromkeys(setting for curves in found.values() for setting in curves))
    shared = all(list(curves) == settings for curves in found.values())
    for axis, (panel, curves) in zip(axes, found.items(), strict=True):
        for setting, seeds in curves.items():
            colour = COLOURS[(settings if shared else list(curves)).index(setting) % len(COLOURS)]
            versions, means, least, most = zip(*mean_and_range(seeds) or [(0, 0.0, 0.0, 0.0)], strict=True)
            axis.plot(versions, means, color=colour, linewidth=1.6, label=setting)
            axis.fill_between(versions, least, most, color=colour, alpha=0.15, linewidth=0)
        axis.set(title=panel, xlabel="policy version", ylim=(-0.03, 1.03))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    axes[0].set_ylabel("accuracy, sampled")
    for axis in axes[-1:] if shared else axes:
        axis.legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
