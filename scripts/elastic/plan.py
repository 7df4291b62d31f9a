"""What happens in a run, and at which step at the latest: who joins how, who leaves how."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Literal

FIRST = "first"
"""The rollout server that is there from the beginning."""
MID_UPDATE_HOLD_S = 2.0
"""Longest that a broadcast is held while somebody joins; below weight_bus.collective_timeout_s."""

How = Literal["as it comes", "in the middle of an update", "far from the next one"]


@dataclass(frozen=True, slots=True)
class Join:
    """A late rollout server, and the moment at which it asks for a place on the weight bus."""

    server: str
    how: How


@dataclass(frozen=True, slots=True)
class Leave:
    """A rollout server that goes while it holds leases."""

    server: str
    signal: Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. Example: FULL goes from 1 to 4 to 2 rollout servers."""

    steps: int
    joins: tuple[Join, ...]
    leaves: tuple[Leave, ...]
    alone: int
    """Steps with the first server only."""
    between: int
    """Steps with all of them, after each has had a group trained; and steps after each departure."""
    latest: float
    """Share of all steps at which the last departure is over; the run is slowed down where it would be later."""
    samples_per_step: int
    settings: tuple[str, ...]
    """What differs from the quick start."""
    target: float | None
    """Sampled accuracy, mean of the last three evaluations; None where nothing is evaluated."""


FULL = Plan(
    steps=80,
    joins=(
        Join("late-1", "as it comes"),
        Join("late-2", "in the middle of an update"),
        Join("late-3", "far from the next one"),
    ),
    leaves=(Leave("late-1", SIGTERM), Leave("late-2", SIGKILL)),
    alone=4,
    between=6,
    latest=0.75,
    samples_per_step=512,
    settings=(),
    target=0.9,
)
SHORT = Plan(
    steps=30,
    joins=(Join("late-1", "in the middle of an update"),),
    leaves=(Leave("late-1", SIGKILL),),
    alone=2,
    between=2,
    latest=0.75,
    samples_per_step=128,
    settings=(
        "rollout.groups_per_step=16",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=0",
        "placement.split=1:1",
    ),
    target=None,
)

REWARD = '''"""The quick start's reward at the pace that the script sets; answers of evaluations are not slowed."""

import time

from rollout_server.rewards.exact import reward as exact


def reward(sample):
    if sample["data_source"] == "train":
        with open({pace!r}, encoding="utf-8") as file:
            time.sleep(float(file.read()))
    return exact(sample)
'''


def settings(plan: Plan, work: Path, data: Path) -> Sequence[str]:
    """`--set` arguments of the run; writes the reward function that they name."""
    pace, reward = work / "pace", work / "paced_reward.py"
    pace.write_text("0", encoding="utf-8")
    reward.write_text(REWARD.format(pace=str(pace)), encoding="utf-8")
    values = [
        f"run.dir={work}",
        f"model.path={data}/model",
        f"data.train={data}/train.jsonl",
        f"data.eval={data}/eval.jsonl",
        f"reward.function={reward}:reward",
        f"learner.total_steps={plan.steps}",
        "replay.journal_keep=all",  # the checker tells the life of every group from the first record on
        "tracking.live=plain",
        "tracking.plot=false",
        *plan.settings,
    ]
    return [word for value in values for word in ("--set", value)]
