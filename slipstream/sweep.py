"""`python -m slipstream.sweep --vary algorithm.loss=ppo_clip,gspo --seeds 0,1,2`: one run under several settings.

Every combination of the values of `--vary` and the `--case`s, with every seed, is a run of its own below `--out`, one
after the other; a run that has ended is not made again, so a sweep goes on where it was stopped. `{seed}` in a value
stands for the seed. The table has a line for each combination, with means over the seeds; `sweep.png` below `--out`
shows the curves; the last line is one line of JSON.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from configs.errors import BadOption
from configs.loading import Parser, add_arguments, load, overrides_of
from configs.schema import Config
from learner.main import REFUSALS, run
from learner.record.metrics import FILE, MetricsError, read_rows
from learner.record.summary import evaluations, mean_lag
from slipstream.check import checks
from slipstream.launch.launcher import Launcher
from slipstream.launch.quickstart import make_input
from slipstream.launch.run_folder import claim_run_dir
from slipstream.launch.servers import RunFailed
from slipstream.launch.terminal import say
from slipstream.runtime.program import program
from slipstream.view.live_view import LiveView
from slipstream.view.plot import COLOURS

STATE = "sweep.json"
LAST = 3
"""Evaluations that a run's accuracy is the mean of."""
QUIET = ("tracking.live=off", "tracking.plot=false")
COUNTERS = {"dropped": "buffer/dropped", "leased_again": "buffer/stale_leased_again", "masked": "buffer/tokens_masked"}
Curves = dict[str, list[list[tuple[int, float]]]]
"""By setting: (version, accuracy) of each seed's run."""


def combinations(varied: Sequence[str], cases: Sequence[Sequence[str]] = ()) -> dict[tuple[str, ...], list[str]]:
    """Overrides of each combination, by its words; a case stands for its overrides by its name.

    Example: ["a.b=1,2"] and [("mild", "c.d=x", "c.e=y")] give {("a.b=1", "mild"): ["a.b=1", "c.d=x", "c.e=y"],
    ("a.b=2", "mild"): ["a.b=2", "c.d=x", "c.e=y"]}.

    Raises:
        ConfigError: an argument is no `a.b=v1,v2`, or a case has no name.
    """
    axes: list[list[tuple[str, list[str]]]] = []
    for text in varied:
        key, equals, values = text.partition("=")
        if not (key and equals and all(values.split(","))):
            raise BadOption(f"--vary {text!r}: expected a key and its values, such as algorithm.loss=ppo_clip,gspo")
        axes.append([(f"{key}={value}", [f"{key}={value}"]) for value in values.split(",")])
    for name, *_ in cases:
        if "=" in name:
            raise BadOption(f"--case {name!r}: expected a name first, such as tis algorithm.correction=token_tis")
    if cases:
        axes.append([(name, overrides) for name, *overrides in cases])
    chosen = itertools.product(*axes)
    return {tuple(word for word, _ in each): [text for _, texts in each for text in texts] for each in chosen}


def train(args: argparse.Namespace, overrides: Sequence[str], name: str) -> dict[str, Any]:
    """One run to its end, in a folder of its own, and its numbers. Raises REFUSALS, RunFailed and MetricsError."""
    config = load(args.config, [f"run.name={name}", f"run.dir={args.out}", *QUIET, *overrides])
    check_set(config, args.accuracy_of)
    make_input(config, args.config)
    checks.require(config, say, checks.AT_START)
    config = claim_run_dir(config, new=True)  # not that of an earlier attempt, which may have left half a run
    server = tuple(args.server.split())
    if code := run(Launcher(config, False, LiveView(config, "off"), server_command=server)):
        raise RunFailed(f"{config.run_dir}: ended with exit code {code}; see its logs/, and start the sweep again")
    return numbers_of(Path(config.run_dir), args.accuracy_of)


def check_set(config: Config, name: str) -> None:
    """Raises ConfigError when accuracy is wanted of a set that is not evaluated."""
    sets = [one.name for one in config.evaluation_sets]
    if name and name not in sets and any(sets):
        raise BadOption(f"--accuracy-of {name!r} is no set of data.eval; take one of {', '.join(sets)}")


def numbers_of(folder: Path, name: str = "") -> dict[str, Any]:
    """Accuracy by version and at the end, realised lag, lengths, what was too old, and seconds of a step.

    Accuracy is that of the evaluation set (or data source) `name`, or the mean over all.

    Raises:
        MetricsError: no step was trained.
    """
    rows = read_rows(folder / FILE)
    steps = [row for row in rows if "response_length/mean" in row]
    if not steps:
        raise MetricsError(f"{folder}/{FILE}: no step was trained")
    curve = evaluations(rows, "sampled", name) or evaluations(rows, "greedy", name)
    return {
        "accuracy": round(mean(value for _, value in curve[-LAST:]), 4) if curve else None,
        "mean_lag": round(mean_lag(rows) or 0.0, 3),
        "mean_length": round(mean(row["response_length/mean"] for row in steps), 2),
        **{name: steps[-1].get(key, 0) for name, key in COUNTERS.items()},
        "step_s": round(median(row["timing_s/step"] for row in steps), 4),
        "curve": curve,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line for each combination, means over seeds; the accuracy of the worst seed beside."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for run_name, numbers in found.items():
        by_case.setdefault(run_name.rpartition(" seed=")[0], []).append(numbers)
    names = ["accuracy", "mean_lag", "mean_length", *COUNTERS, "step_s"]
    lines = [["settings", "seeds", "worst accuracy", *names], ["---"] * (3 + len(names))]
    for case, runs in by_case.items():
        scores = [numbers["accuracy"] for numbers in runs if numbers["accuracy"] is not None]
        means = [[numbers[name] for numbers in runs if numbers[name] is not None] for name in names]
        cells = [f"{min(scores):.3f}" if scores else "-", *(f"{mean(each):.4g}" if each else "-" for each in means)]
        lines.append([case, str(len(runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    return [(version, mean(at), min(at), max(at)) for version, at in values]


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


def main() -> int:
    """Entry point; 1 when a run failed, 2 for arguments that make no run."""
    parser = Parser(prog=program("slipstream.sweep"), description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--vary", action="append", default=[], metavar="a.b=v1,v2", help="repeatable: all combinations")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        nargs="+",
        metavar=("NAME", "a.b=v"),
        help="settings that go together; a name alone is the configuration as it is",
    )
    parser.add_argument("--seeds", default="0", help="of run.seed, with commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="of all runs (default: %(default)s)")
    parser.add_argument("--accuracy-of", default="", metavar="SET", help="of data.eval (default: the mean over all)")
    parser.add_argument("--server", default="rollout_server.main", help="module of rollout servers, and its arguments")
    args = parser.parse_args()
    state = args.out / STATE
    found: dict[str, dict[str, Any]] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    chosen = {}
    try:
        wanted = combinations(args.vary, args.case)
        for case, seed in itertools.product(wanted, args.seeds.split(",")):
            settings = [*overrides_of(args), *wanted[case], f"run.seed={seed}"]
            overrides = [args.config, *(text.replace("{seed}", seed) for text in settings)]
            name = " ".join([*case, f"seed={seed}"])
            if name not in found:
                say(f"sweep: {name}")
                numbers = train(args, overrides[1:], re.sub(r"[^A-Za-z0-9.]+", "-", name))
                found[name] = numbers | {"settings": overrides}
                beside = state.with_suffix(".new")
                beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                beside.replace(state)
            if (ran := found[name]["settings"]) != overrides:
                raise BadOption(f"--out {args.out}: {name} was run with {ran}; take another folder")
            chosen[name] = found[name]
    except REFUSALS as error:
        say(f"refused: {error}")
        return 2
    except (RunFailed, MetricsError) as error:
        say(str(error))
        return 1
    plot(chosen, args.out / "sweep.png")
    sys.stdout.write(table(chosen) + "\n" + json.dumps({"out": str(args.out), "runs": chosen}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
