"""The runs that faults are injected into: tiny, quick, and unlike each other where faults may matter."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config

ROOT = Path(__file__).parents[2]
START_S = 60.0
"""How long a process may take to start on a busy machine; no key of the configuration says that."""
STEPS_PER_FAULT = 12
SPARE_STEPS = 30
SERVERS = ("rollout-a", "rollout-b")


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of one run that differ from the others'."""

    name: str
    settings: tuple[str, ...]
    keys: bool = False
    """CURVE on every socket: then the proxy sees sealed messages."""


VARIANTS = (
    Variant("lag 1", ("replay.async_lag=1",)),
    Variant("lag 0, fsync every", ("replay.async_lag=0", "replay.fsync=every")),
    Variant(
        "lag 4, drop, partial rollouts, fsync never",
        ("replay.async_lag=4", "replay.on_stale=drop", "replay.partial_rollouts=true", "replay.fsync=never"),
    ),
    Variant("lag 1, mask, two ranks", ("replay.async_lag=1", "replay.on_stale=mask", "placement.split=2:2")),
    Variant("lag 1, keys", ("replay.async_lag=1",), keys=True),
    Variant(
        "lag 4, partial rollouts, all of the journal",
        ("replay.async_lag=4", "replay.partial_rollouts=true", "replay.journal_keep=all"),
    ),
)

SMALL = (
    "rollout.group_size=4",
    "rollout.groups_per_step=8",
    "rollout.max_running=32",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=12",
    "learner.lr=1e-4",
    "limits.flat_reward_steps=0",
    "placement.local_rollouts=false",
    "tracking.live=plain",
    "tracking.plot=false",
    # every deadline short, so that a fault costs seconds
    "network.heartbeat_s=0.5",
    "network.silent_after_s=5",
    "weight_bus.heartbeat_s=0.5",
    "weight_bus.collective_timeout_s=2",
    "weight_bus.deadline_s=10",
    "replay.lease_s=8",
    "replay.max_attempts=6",
    "replay.restarts=1000",
    "learner.restarts=1000",
    "learner.batch_deadline_s=120",
    "replay.wait_for_learner_s=120",
    "rollout.wait_for_servers_s=120",
)

REWARD = '''"""The exact reward at a pace that the harness sets, so that a run lasts as long as its faults."""

import time

def reward(sample):
    with open({pace!r}, encoding="utf-8") as file:
        time.sleep(float(file.read() or 0))
    return float(sample["completion"] == sample["ground_truth"])
'''


def arguments(variant: Variant, work: Path, data: Path, name: str, num_faults: int) -> Sequence[str]:
    """`--set` arguments of a run; writes the reward function and the keys that they name."""
    pace = work / "pace"
    pace.write_text("0", encoding="utf-8")
    reward = work / "paced_reward.py"
    reward.write_text(REWARD.format(pace=str(pace)), encoding="utf-8")
    values = [
        f"run.dir={work}",
        f"run.name={name}",
        f"model.path={data}/model",
        f"data.train={data}/train.jsonl",
        f"data.eval={data}/eval.jsonl",
        f"reward.function={reward}:reward",
        f"learner.total_steps={STEPS_PER_FAULT * num_faults + SPARE_STEPS}",
        "placement.split=2:1",
        *SMALL,
        *variant.settings,
    ]
    if variant.keys:
        command = (sys.executable, "-m", "replay.keys", "--out", str(work / "keys"))
        subprocess.run(command, cwd=ROOT, check=True, timeout=START_S, stdout=subprocess.DEVNULL)
        values.append(f"network.keys={work}/keys")
    return [word for value in values for word in ("--set", value)]


def recovery_s(config: Config) -> float:
    """How long a run may take until it goes on after a fault: its own deadlines in a row, and a process's start."""
    network, bus = config.network, config.weight_bus
    waits = 2 * network.silent_after_s + 2 * config.replay.lease_s + bus.deadline_s + 2 * bus.collective_timeout_s
    return waits + START_S


def naming_s(config: Config) -> float:
    """How long a fault may last until some log names it."""
    return config.network.silent_after_s + config.replay.lease_s + config.weight_bus.deadline_s
