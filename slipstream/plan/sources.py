"""What was measured: the folder of a run, or a result of the pipeline benchmark, as a configuration and targets."""

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs import loading
from configs.errors import Contradiction, InputMissing
from configs.schema import Config
from learner.advantages import leave_out_flat_groups
from learner.record.metrics import FILE, read_rows
from replay.journal import JournalReader
from replay.messages import Group
from slipstream.plan.costs import Draw, Lognormal, Recorded, Workload

Row = Mapping[str, Any]
SYNC = "weight_sync/"
WARM_STEPS, FEWEST_STEPS = 5, 10
"""Steps of a run that do not count, and how many must be left."""
GAP = 10.0
"""Times as long as usual between two rows is no step."""
MOST_GROUPS = 2048
"""Groups of the journal that lengths are taken from, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run or case, per step, in seconds. None: not known."""

    name: str
    config: Config
    workload: Workload
    step_s: float | None
    train_s: float
    """An update; of a case: alone, of a run: beside whatever shares its devices."""
    roll_s: float | None = None
    """T_roll: a step without its update."""
    busy_s: float | None = None
    """Time that an engine had requests, in a step."""
    group_s: float | None = None
    """Mean from lease to the group's last token."""
    update_fit: tuple[float, float] | None = None
    """(seconds, seconds a trained token) of an update, where steps had different numbers of them."""
    commit_s: float = 0.0
    record_s: float = 0.0
    """With the gather of the new weights, which comes after the commit."""
    publish_s: float = 0.0
    roll_publish_s: float = 0.0
    """The same in the steps of T_roll."""
    pause_s: float = 0.0
    flat_share: float = 0.0


def read(source: Path, case: str = "") -> Measured:
    """A run, or the first case of a file whose name begins so. Raises ConfigError, MetricsError, JournalError."""
    if source.is_dir():
        return of_run(source)
    if not source.is_file():
        raise InputMissing(f"{source}: no run folder and no JSON file of `python -m scripts.bench pipeline --out`")
    try:
        found = list(_cases(json.loads(source.read_text(encoding="utf-8"))))
    except ValueError as error:
        raise InputMissing(f"{source}: not JSON: {error}") from error
    chosen = next((one for one in found if str(one["config"]).startswith(case)), None)
    if chosen is None:
        names = "; ".join(str(one["config"]) for one in found) or "none with `t_rollout`, `t_train` and `settings`"
        raise InputMissing(f"{source}: no case {case!r}; there are {names}")
    return of_case(chosen)


def check(config: Config) -> None:
    """Refuse what the simulation has no part for. Raises ConfigError."""
    placement = config.placement
    if placement.device == "cpu":
        raise Contradiction("placement.device: 'cpu': there all processes share the cores; the advisor knows GPUs")
    if config.environment.function is not None:
        raise Contradiction("environment.function: the advisor knows single answers, not episodes; plan without")
    if placement.share_gpus and config.num_rollout_devices != config.num_learner_ranks:
        raise Contradiction(
            f"placement.share_gpus: true with {config.num_rollout_devices} rollout and {config.num_learner_ranks}"
            " learner devices: the advisor knows GPUs that all serve both sides, or one side each; take as many of both"
        )


def _cases(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict) and {"t_rollout", "t_train", "t_step", "settings", "config"} <= found.keys():
        yield found
    elif isinstance(found, dict | list):
        for inner in found.values() if isinstance(found, dict) else found:
            yield from _cases(inner)


# ---- a run ------------------------------------------------------------------------------------------------


def of_run(folder: Path) -> Measured:
    """A run folder: config.yaml, metrics.jsonl and, for lengths, the journal."""
    config = loading.load(str(folder / "config.yaml"))
    steps = [row for row in read_rows(folder / FILE) if "step" in row][WARM_STEPS:]
    if len(steps) < FEWEST_STEPS:
        raise InputMissing(
            f"{folder}: {len(steps)} steps after the first {WARM_STEPS}; at least {FEWEST_STEPS} are needed to take"
            " times from"
        )
    groups = list(_groups(folder / "journal"))

    def mean(key: str) -> float:
        return statistics.fmean([row[key] for row in steps if row.get(key) is not None] or [0.0])

    step_s, gather_s = _step_s(steps), mean(f"{SYNC}gather_s")
    is_known = any(row.get("rollout/idle_ratio") is not None for row in steps)
    return Measured(
        name=str(folder),
        config=config,
        workload=_workload(config, steps, groups),
        step_s=step_s,
        train_s=mean("timing_s/update_actor"),
        busy_s=(1 - mean("rollout/idle_ratio")) * step_s if is_known else None,
        group_s=statistics.fmean(group.generate_s for group in groups) if groups else None,
        update_fit=_update_fit(config, steps),
        commit_s=max(0.0, mean("timing_s/param_sync") - gather_s),
        record_s=max(0.0, statistics.fmean(_between(steps) or [0.0])) + gather_s,
        publish_s=mean(f"{SYNC}seconds"),
        pause_s=mean(f"{SYNC}apply_s"),
        flat_share=mean("reward/flat_groups_ratio") if leave_out_flat_groups(config.algorithm) else 0.0,
    )


def _groups(journal: Path) -> Iterator[Group]:
    """The newest groups; none where the journal has no file any more."""
    reader = JournalReader(journal)
    places = [record.location for record in reader.records() if record.kind == "group"] if journal.is_dir() else []
    for place in places[-MOST_GROUPS:]:
        group = reader.read(place)
        if isinstance(group, Group):
            yield group


def _between(steps: Sequence[Row]) -> list[float]:
    """Seconds of the learner between two steps; empty where rows do not say."""
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if b.get("timing_s/step") is not None]
    return [b["time"] - a["time"] - b["timing_s/step"] for a, b in pairs]


def _step_s(steps: Sequence[Row]) -> float:
    """Mean seconds from row to row, those over a restart or an evaluation that all wait for left out."""
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(steps)]
    usual = statistics.fmean(sorted(gaps)[: max(1, len(gaps) * 9 // 10)])
    return statistics.fmean([gap for gap in gaps if gap <= GAP * usual] or gaps)


def _workload(config: Config, steps: Sequence[Row], groups: Sequence[Group]) -> Workload:
    prompt = round(statistics.fmean(row["prompt_length/mean"] for row in steps))
    if groups:
        lengths = [_sampled(group).tolist() for group in groups]
        everything = np.concatenate([np.asarray(each) for each in lengths])
        said = (
            f"{len(groups)} groups of the journal, mean {everything.mean():.0f}, 95th percentile"
            f" {np.quantile(everything, 0.95):.0f}, longest {everything.max()}"
        )
        return Workload(Recorded(tuple(map(tuple, lengths))), prompt, said)
    mean = statistics.fmean(row["response_length/mean"] for row in steps)
    longest = statistics.fmean(row["response_length/max"] for row in steps)
    said = f"assumed lognormal by the mean {mean:.0f} and the longest of a step {longest:.0f}: no journal was read"
    return Workload(_of_two(mean, longest, config), prompt, said)


def _sampled(group: Group) -> NDArray[np.int64]:
    """[n] tokens that the policy has sampled for each trajectory."""
    sampled = np.concatenate([[0], np.cumsum(group.loss_mask, dtype=np.int64)])
    ends = np.cumsum(group.lengths, dtype=np.int64)
    if group.samples.size:
        ends = ends[np.cumsum(group.samples, dtype=np.int64) - 1]
    found: NDArray[np.int64] = np.diff(sampled[ends], prepend=0)
    return found


def _of_two(mean: float, longest: float, config: Config) -> Draw:
    """Lognormal lengths whose mean and expected longest of a step are as measured."""
    z = statistics.NormalDist().inv_cdf(1 - 1 / (config.trajectories_per_step + 1))
    # longest / mean of a lognormal is exp(z·sigma - sigma² / 2), which grows up to sigma = z
    sigma = z - math.sqrt(max(0.0, z**2 - 2 * math.log(max(1.0, longest / mean))))
    return Lognormal(mean * math.exp(-(sigma**2) / 2), sigma, config.rollout.max_new_tokens)


def _update_fit(config: Config, steps: Sequence[Row]) -> tuple[float, float] | None:
    """Least squares of the update's seconds over its trained tokens, where those differ enough from step to step."""
    flat = leave_out_flat_groups(config.algorithm)
    tokens = [row["perf/total_num_tokens"] * (1 - flat * row.get("reward/flat_groups_ratio", 0.0)) for row in steps]
    seconds = [row["timing_s/update_actor"] for row in steps]
    if np.std(tokens) < 0.1 * np.mean(tokens):
        return None
    slope, start = np.polyfit(tokens, seconds, 1)
    return (float(start), float(slope)) if slope > 0 and start > 0 else None


# ---- a case of the benchmark --------------------------------------------------------------------------------


def of_case(case: Mapping[str, Any]) -> Measured:
    """A result of `python -m scripts.bench pipeline`, whose lengths follow from its settings."""
    settings = case["settings"]
    split = str(case["config"]).partition("@")[2]
    given = {
        "rollout.engine": "sglang",
        "rollout.group_size": settings["group_size"],
        "rollout.groups_per_step": settings["groups"],
        "rollout.max_new_tokens": settings["length_cap"],
        "rollout.max_running": settings["max_running"],
        "data.max_prompt_tokens": settings["prompt"],
        "replay.async_lag": settings["lag"],
        "run.seed": settings["seed"],
        "learner.max_tokens_per_microbatch": max(
            settings["microbatch_tokens"], settings["prompt"] + settings["length_cap"]
        ),
        "learner.lr": settings["lr"],
        "placement.split": split,
        "placement.share_gpus": str(settings.get("share_gpus", False)).lower(),
        "model.path": "model",
        "data.train": "prompts.jsonl",
        "evaluation.every_steps": 0,
    }
    overrides = [f"{key}={value}" for key, value in given.items()]
    config = loading.parse("reward: {function: exact}", f"case {case['config']}", overrides)
    median, sigma, cap = settings["length_median"], settings["length_sigma"], settings["length_cap"]
    pause = case.get("pause_ms_p50")
    idle = case.get("rollout_idle")
    gather_s = case.get("bus_phases", {}).get("gather_s") or 0.0
    return Measured(
        name=f"case {case['config']}, {settings['groups']} groups, {settings['max_running']} running",
        config=config,
        workload=Workload(
            Lognormal(median, sigma, cap),
            settings["prompt"],
            f"lognormal, median {median}, sigma {sigma:g}, cut at {cap}, as the benchmark forces them",
        ),
        step_s=case["t_step"],
        train_s=case["t_train"],
        roll_s=case["t_rollout"],
        busy_s=(1 - idle) * case["t_step"] if idle is not None else None,
        commit_s=max(0.0, (case.get("param_sync_s") or 0.0) - gather_s),
        record_s=gather_s,
        publish_s=case.get("sync_s") or 0.0,
        roll_publish_s=case.get("sync_idle_s") or case.get("sync_s") or 0.0,
        pause_s=(pause or 0.0) / 1000,
    )
