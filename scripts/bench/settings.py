"""What a benchmark run is: the options of the command, and the configuration that they make. Imports no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.loading import apply_override, validate
from configs.schema import Config
from scripts.bench.plan import Plan
from scripts.bench.random_model import SHAPES

REWARD = Path(__file__).with_name("reward.py")
STREAM_LAG = 8


class BadOption(ValueError):
    """An option of the command cannot be used; the message says which."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a shape, and devices for rollout servers and learner ranks."""

    shape: str
    rollout: int
    learner: int

    def __str__(self) -> str:
        return f"{self.shape}@{self.rollout}:{self.learner}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`0.6B@1:3`. Raises BadOption."""
        match = re.fullmatch(r"([\w.]+)@(\d+):(\d+)", text.strip())
        if match is None or match[1] not in SHAPES:
            raise BadOption(
                f"--configs {text!r}: expected SHAPE@R:L, such as 0.6B@1:3, with one of {', '.join(SHAPES)}"
            )
        return cls(match[1], int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command that are the same for all its cases."""

    device: str
    prompt: int
    median: int
    sigma: float
    cap: int
    groups: int
    group_size: int
    lag: int
    steps: int
    warmup: int
    max_running: int
    microbatch: int
    bucket_bytes: int
    limit_s: float
    quiet_s: float
    seed: int
    work: Path
    stream: bool = False
    overrides: Sequence[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The phases of the main run."""
        return Plan(warmup=self.warmup, idle=self.steps, full=self.steps, train=self.steps, quiet_s=self.quiet_s)

    @property
    def stream_plan(self) -> Plan:
        """The phases of the run without a barrier."""
        return Plan(warmup=self.warmup, idle=self.steps, full=0, train=0, quiet_s=self.quiet_s)


def config_of(options: Options, case: Case, *, model: Path, data: Path, name: str, stream: bool = False) -> Config:
    """The configuration of one run. Raises ConfigError when the options do not fit together."""
    cuda = options.device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    plan = options.stream_plan if stream else options.plan
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(options.work / "runs"), "seed": options.seed},
        "model": {"path": str(model)},
        "data": {"train": str(data), "max_prompt_tokens": options.prompt, "shuffle": False},
        "reward": {"function": f"{REWARD}:spread"},
        "rollout": {
            "engine": "sglang" if cuda else "torch",
            "group_size": options.group_size,
            "groups_per_step": options.groups,
            "max_new_tokens": options.cap,
            "max_running": options.max_running,
            "dtype": dtype,
            "restarts": 0,
        },
        "replay": {"async_lag": STREAM_LAG if stream else options.lag},
        "learner": {
            "total_steps": plan.total_steps,
            "lr": 1e-6,
            "warmup_steps": 0,
            "max_tokens_per_microbatch": max(options.microbatch, options.prompt + options.cap),
            "compute_dtype": dtype,
            "batch_deadline_s": options.limit_s,
        },
        "evaluation": {"every_steps": 0},
        "weight_bus": {
            "backend": "nccl" if cuda else "gloo",
            "bucket_bytes": options.bucket_bytes,
            "deadline_s": 60.0,
            "collective_timeout_s": 30.0,
        },
        "network": {"silent_after_s": 60.0, "heartbeat_s": 0.5},
        "placement": {"device": options.device, "split": f"{case.rollout}:{case.learner}"},
        "tracking": {"live": "off", "plot": False},
        "limits": {"flat_reward_steps": 0},
    }
    for override in options.overrides:
        apply_override(tree, override)
    return validate(tree, f"the settings of {case}")
