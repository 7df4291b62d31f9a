"""What every start looks at, within a second and without a connection: this machine, packages, disk, memory."""

import importlib.util
import os
from collections.abc import Callable, Iterator

from configs.errors import ConfigError, NoRoom, PackageMissing
from configs.machine import has_usable_gpu
from configs.plan import NCCL_DEFAULTS
from configs.schema import Config
from learner.doctor import disk, facts, machine
from learner.doctor.findings import Finding, Severity
from learner.doctor.memory import check_engine, sizes_of

TRIAL_STEPS = 10
"""A run of so few steps tries something out, and needs no learning rate."""


def at_start(config: Config) -> Iterator[Finding]:
    """Beside what learner/launch/preflight.py refuses."""
    sizes, here = sizes_of(config), config.shares[0].node
    try:
        check_engine(config)
    except ConfigError as error:
        yield Finding("stop", "memory", str(error))
    yield disk.room(config, sizes)
    yield from schedule(config)
    if config.placement.local_rollouts:
        shared = facts.shared_memory()
        yield machine.shared_memory(config, sizes, shared, machine.engines_on(config, here), "")
    else:
        yield from by_hand(config)
    yield from machine.limits(facts.limits(), "")
    for pin in facts.broken_pins():
        yield Finding("warn", "versions", pin, mend="bash scripts/install.sh --venv .venv installs what fits")
    roles = ("learner", "rollout") if config.placement.local_rollouts else ("learner",)
    names = {name for role in roles for name in machine.needed_kernels(config, role)}
    absent = {name: "it is not installed" for name in sorted(names) if importlib.util.find_spec(name) is None}
    if absent and has_usable_gpu(os.environ):  # elsewhere, this is not the machine of the run
        yield from machine.kernels(absent, facts.compiler(), "")


def schedule(config: Config) -> Iterator[Finding]:
    """A learning rate that no step has."""
    learner = config.learner
    if learner.warmup_steps >= learner.total_steps > TRIAL_STEPS:
        yield Finding(
            "warn",
            "learning rate",
            f"learner.warmup_steps {learner.warmup_steps} of learner.total_steps {learner.total_steps}: it ends below"
            f" learner.lr {learner.lr:g}",
            why="a run that never reaches its learning rate looks fine and learns little",
            mend=f"--set learner.warmup_steps={learner.total_steps // 10}",
        )


def by_hand(config: Config, severity: Severity = "warn") -> Iterator[Finding]:
    """Rollout servers that a shell starts take NCCL's environment from it, not from the plan."""
    if config.weight_bus.backend != "nccl":
        return
    for name, default in NCCL_DEFAULTS.items():
        value = config.network.env.get(name, default)
        if os.environ.get(name, value) != value:
            yield Finding(
                severity,
                "environment",
                f"{name} is {os.environ[name]} in this shell and {value} in the run",
                why="a rollout server that is started from such a shell is refused by the weight bus",
                mend=f"unset {name} here, or --set 'network.env={{{name}: \"{os.environ[name]}\"}}' for the whole run",
            )


def say_at_start(config: Config, say: Callable[[str], None]) -> None:
    """Show what is to be looked at. Raises ConfigError with what would stop the run."""
    found = list(at_start(config))
    for finding in found:
        if finding.severity == "warn":
            say(f"doctor: {finding.line}")
    if stops := [finding for finding in found if finding.severity == "stop"]:
        kind = PackageMissing if all(finding.check == "kernel" for finding in stops) else NoRoom
        raise kind("\n".join(finding.line for finding in stops))
