"""What was measured in the folder of a run, as a configuration and targets."""

import itertools
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
    """A run, per step, in seconds. None: not known."""

    name: str
    config: Config
    workload: Workload
    step_s: float
    train_s: float
    """An update, beside whatever shares its devices."""
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
    pause_s: float = 0.0
    flat_share: float = 0.0


def check(config: Config) -> None:
    """Refuse what the simulation has no part for. Raises ConfigError."""
    placement = config.placement
    if placement.device == "cpu":
        raise Contradiction("placement.device: 'cpu': there all processes share the cores; the advisor knows GPUs")
    if config.learner.facts.from_data:
        raise Contradiction(
            f"learner.objective: {config.learner.objective} samples nothing for training, so there is no split to"
            " plan; give every GPU to the learner"
        )
    if config.environment.function is not None:
        raise Contradiction("environment.function: the advisor knows single answers, not episodes; plan without")
    if placement.share_gpus and config.num_rollout_devices != config.num_learner_ranks:
        raise Contradiction(
            f"placement.share_gpus: true with {config.num_rollout_devices} rollout and {config.num_learner_ranks}"
            " learner devices: the advisor knows GPUs that all serve both sides, or one side each; take as many of both"
        )


def of_run(folder: Path) -> Measured:
    """Of config.yaml, metrics.jsonl and, for lengths, the journal. Raises ConfigError, MetricsError, JournalError."""
    if not folder.is_dir():
        raise InputMissing(f"{folder}: no run folder")
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
