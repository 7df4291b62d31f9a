"""Settings of the runs that faults are injected into: tiny, and quick to notice a fault."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from scripts.chaos.polling import replace_text

ROOT = Path(__file__).parents[2]
START_S = 60.0  # how long a process may take to start on a busy machine; no key of the configuration says that
SERVERS = ("rollout-a", "rollout-b")
SHOWN = ("tracking.live=plain", "tracking.plot=false")


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: tuple[str, ...]
    keys: bool = False  # CURVE on every socket: then the proxy sees sealed messages


PARTIAL = ("replay.async_lag=4", "replay.partial_rollouts=true")
VARIANTS = (
    Variant("lag 1", ("replay.async_lag=1",)),
    Variant("lag 0, fsync every", ("replay.async_lag=0", "replay.fsync=every")),
    Variant("lag 4, drop, partial rollouts, fsync never", (*PARTIAL, "replay.on_stale=drop", "replay.fsync=never")),
    Variant("lag 1, mask, two ranks", ("replay.async_lag=1", "replay.on_stale=mask", "placement.split=2:2")),
    Variant("lag 1, keys", ("replay.async_lag=1",), keys=True),
    Variant("lag 4, partial rollouts, all of the journal", (*PARTIAL, "replay.journal_keep=all")),
)

# every deadline is short, so that a fault costs seconds
SMALL = """
    rollout.group_size=4 rollout.groups_per_step=8 rollout.max_running=32 placement.local_rollouts=false
    evaluation.every_steps=0 checkpoint.every_steps=12 learner.lr=1e-4 limits.flat_reward_steps=0
    network.heartbeat_s=0.5 network.silent_after_s=5
    weight_bus.heartbeat_s=0.5 weight_bus.collective_timeout_s=2 weight_bus.deadline_s=10
    replay.lease_s=8 replay.max_attempts=6 replay.restarts=1000 replay.wait_for_learner_s=120
    learner.restarts=1000 learner.batch_deadline_s=120 rollout.wait_for_servers_s=120
"""
REWARD = '''"""The quick start's reward at a pace that the harness sets; evaluations are not slowed."""

import time

from rollout_server.rewards.exact import reward as exact


def reward(sample):
    if sample["data_source"] == "train":
        with open({pace!r}, encoding="utf-8") as file:
            time.sleep(float(file.read()))
    return exact(sample)
'''


def set_pace(work: Path, seconds: float) -> None:
    """How long the reward of one trajectory takes from now on; every rollout server has one reward process."""
    replace_text(work / "pace", f"{seconds:.6f}")


def run_settings(work: Path, data: Path) -> list[str]:
    """Settings of every run in a work folder; writes the paced reward."""
    set_pace(work, 0.0)
    (work / "paced_reward.py").write_text(REWARD.format(pace=str(work / "pace")), encoding="utf-8")
    paths = {"model.path": "model", "data.train": "train.jsonl", "data.eval": "eval.jsonl"}
    run = [f"run.dir={work}", "run.name=run", f"reward.function={work}/paced_reward.py:reward"]
    return [*run, *(f"{key}={data}/{name}" for key, name in paths.items()), *SHOWN]


def variant_settings(variant: Variant, work: Path) -> list[str]:
    """Settings of a small run; writes the keys that they name."""
    values = ["placement.split=2:1", *SMALL.split(), *variant.settings]
    if variant.keys:
        command = (sys.executable, "-m", "replay.keys", "--out", str(work / "keys"))
        subprocess.run(command, cwd=ROOT, check=True, timeout=START_S, stdout=subprocess.DEVNULL)
        values.append(f"network.keys={work}/keys")
    return values


def make_data(folder: Path, *, seed: int = 0) -> Path:
    """The quick start's model and prompts, made where they are missing."""
    command = [sys.executable, "-m", "learner.examples.sort6", "--out", str(folder), "--seed", str(seed)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return (ROOT / folder).resolve()


def recovery_s(config: Config) -> float:
    """Deadline for a run to go on after a fault: its own deadlines in a row, and a process's start."""
    network, bus = config.network, config.weight_bus
    waits = 2 * network.silent_after_s + 2 * config.replay.lease_s + bus.deadline_s + 2 * bus.collective_timeout_s
    return waits + START_S


def naming_s(config: Config) -> float:
    return config.network.silent_after_s + config.replay.lease_s + config.weight_bus.deadline_s
