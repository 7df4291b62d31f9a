"""One picture of a run, plots/summary.png: did it learn, how stale was it, and which side waited.

`python -m slipstream.view.plot runs/quickstart` draws it anew from metrics.jsonl, also while the run goes on.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from learner.record.metrics import FILE, MetricsError, evaluation_scores, read_rows, tokens_by_lag
from learner.record.summary import curves
from slipstream.runtime.program import program
from slipstream.view.live_text import Row, duration, title_of, worth_of

REWARD_COLOUR = "#8a8f98"
COLOURS = ("#1f6feb", "#d1580b", "#1a7f37", "#8250df", "#bf3989", "#6e7781")
LINES = {"greedy": "-", "sampled": "--", "mean": "--", "pass": ":"}
"""Of a set's modes, where several sets share the picture: each has a colour then."""
SMOOTHED_STEPS = 5
FEW_CURVES = 5


def plot_run(run_dir: str | Path) -> Path:
    """Draw plots/summary.png of a run folder and return its path.

    Raises:
        MetricsError: metrics.jsonl is missing, broken, or has no row of a step or of an evaluation yet.
    """
    folder = Path(run_dir)
    rows = read_rows(folder / FILE)
    steps = [row for row in rows if "step" in row]
    evaluations = [row for row in rows if evaluation_scores(row)]
    if not steps and not evaluations:
        raise MetricsError(f"{folder / FILE}: no step and no evaluation yet; run it again later")
    path = folder / "plots" / "summary.png"
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".new.png")
    _draw(folder.resolve().name, steps, evaluations, beside)
    beside.replace(path)
    return path


def series(steps: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, rows that have no finite value of it left out."""
    rows = [row for row in steps if row.get(name) is not None]
    return [row["step"] for row in rows], [row[name] for row in rows]


def smoothed(values: Sequence[float], width: int = SMOOTHED_STEPS) -> list[float]:
    """Mean of each value and up to `width` − 1 before it."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def _draw(name: str, steps: Sequence[Row], evaluations: Sequence[Row], path: Path) -> None:
    # a figure of its own, not pyplot: nothing of the caller's matplotlib state is touched
    with mpl.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplot_mosaic(
            [["reward", "reward", "lag"], ["idle", "idle", "idle"]], height_ratios=[1.6, 1]
        )
        _reward(axes["reward"], steps, evaluations)
        _lag(axes["lag"], tokens_by_lag(steps))
        _idle(axes["idle"], steps)
        figure.suptitle(_title(name, steps), x=0.01, ha="left", fontsize=13, fontweight="bold")
        for axis in axes.values():
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.set_axisbelow(True)
        end = max([2, *(int(row["step"]) for row in steps), *(int(row["version"]) for row in evaluations)])
        for axis in (axes["reward"], axes["idle"]):
            axis.set_xlim(-0.01 * end, 1.01 * end)
            axis.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(path, dpi=130)


def _title(name: str, steps: Sequence[Row]) -> str:
    if not steps:
        return f"{name}: no step yet"
    seconds = steps[-1].get("time", 0.0) - steps[0].get("time", 0.0)
    return f"{name}: {len(steps)} step{'s' if len(steps) > 1 else ''}, {duration(seconds)} from the first to the last"


def _line(axis: Any, where: Sequence[int], values: Sequence[float], *, colour: str, label: str) -> None:
    """A faint measured line and a strong smoothed one; points for too few values."""
    marker = "o" if len(where) < 3 else None
    axis.plot(where, values, color=colour, alpha=0.3, linewidth=1)
    axis.plot(where, smoothed(values), color=colour, linewidth=2, marker=marker, markersize=4, label=label)


def _reward(axis: Any, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
    last = steps[-1] if steps else {}
    where, values = series(steps, worth_of(last))
    worth = title_of(last)
    shown = [0.0, 1.0, *values]
    if values:
        _line(axis, where, values, colour=REWARD_COLOUR, label=f"{worth}, mean of {SMOOTHED_STEPS} steps")
    # pass@1 is mean@k for rewards of 0 and 1
    found = {mode: curve for mode, curve in curves(evaluations).items() if mode.rpartition("/")[2] != "pass@1"}
    sets = list(dict.fromkeys(mode.rpartition("/")[0] for mode in found))
    many = len(found) > FEW_CURVES
    for number, (mode, (versions, scores)) in enumerate(found.items()):
        label = f"{'' if many else 'evaluation, '}{mode} ({scores[0]:.2f} → {scores[-1]:.2f})"
        name, _, kind = mode.rpartition("/")
        colour = COLOURS[(number if len(sets) == 1 else sets.index(name)) % len(COLOURS)]
        line = "-" if len(sets) == 1 else LINES.get(kind.partition("@")[0], "-")
        axis.plot(versions, scores, line, color=colour, marker="o", markersize=4, linewidth=1.6, label=label)
        shown += scores
    margin = 0.03 * (max(shown) - min(shown))
    title, label = f"{worth[0].upper()}{worth[1:]} and evaluation", "mean reward" if worth == "reward" else worth
    axis.set(title=title, xlabel="step, or policy version of an evaluation", ylabel=label)
    axis.set_ylim(min(shown) - margin, max(shown) + margin)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right", frameon=many, fontsize=8 if many else None, ncols=1 + many)


def _lag(axis: Any, tokens: Mapping[int, int]) -> None:
    axis.set(title="Lag of trained tokens", xlabel="policy versions", ylabel="share of tokens")
    total = sum(tokens.values())
    if not total:
        axis.text(0.5, 0.5, "no token trained yet", ha="center", va="center", transform=axis.transAxes)
        return
    shares = {lag: tokens.get(lag, 0) / total for lag in range(min(tokens), max(tokens) + 1)}
    few = len(shares) < 5
    bars = axis.bar(shares.keys(), shares.values(), color=COLOURS[0], width=0.7)
    labels = [_share(share, 1 if few else 0) for share in shares.values()]
    axis.bar_label(bars, labels, padding=2, fontsize=10 if few else 8)
    axis.set_xticks(list(shares))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_ylim(0, max(shares.values()) * 1.12)
    axis.set_xlim(min(shares) - 0.8, max(shares) + 0.8)


def _share(share: float, digits: int) -> str:
    least = 0.1**digits / 100
    return f"<{100 * least:g}%" if 0 < share < least else f"{100 * share:.{digits}f}%"


def _idle(axis: Any, steps: Sequence[Row]) -> None:
    axis.set(title="Idle share", xlabel="step", ylabel="share of time", ylim=(-0.02, 1.02))
    for name, label, colour in (
        ("trainer/idle_ratio", "learner waits for its batch", COLOURS[1]),
        ("rollout/idle_ratio", "rollout servers have nothing to decode", COLOURS[0]),
    ):
        where, values = series(steps, name)
        if not values:
            continue
        _line(axis, where, values, colour=colour, label=f"{label} (mean {100 * statistics.fmean(values):.0f}%)")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper right", frameon=False, ncols=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: draw, and say where the picture is."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.plot"), description=__doc__)
    parser.add_argument("run_dir", help="run folder, such as runs/quickstart")
    args = parser.parse_args(argv)
    try:
        path = plot_run(args.run_dir)
    except MetricsError as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
