"""Which splits there are, which fit, what each would take, and the YAML of the best. Torch-free."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from configs.errors import BadOption
from configs.schema import Config
from learner.policy.memory import ENGINE_SHARE, GIB, Setup, available_bytes, choose, usable
from slipstream.families.sizes import Sizes
from slipstream.plan.costs import Fitted, Workload
from slipstream.plan.simulation import SimulatedRun, SimulationResult

ALL_SPLITS = 16
"""GPUs up to which every split is simulated; above, EIGHTHS of them."""
EIGHTHS = range(1, 8)
NODE = 8
"""GPUs of a node; above one, each node belongs to one side."""
LARGE = 16_384
"""Trajectories a step above which chance evens out, so that fewer steps are simulated."""
WARM_STEPS = 3
"""That do not count, beside as many as the lag may be."""
SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use the GPUs."""

    rollout: int
    learner: int
    lag: int
    tensor_parallel: int

    @classmethod
    def of(cls, config: Config) -> "Split":
        """The one of a configuration."""
        return cls(
            rollout=config.num_rollout_devices,
            learner=config.num_learner_ranks,
            lag=config.replay.async_lag,
            tensor_parallel=config.placement.tensor_parallel,
        )


@dataclass(frozen=True, slots=True)
class Advised:
    """A split with its prediction, or with why it cannot be."""

    split: Split
    refused: str = ""
    outcome: SimulationResult | None = None
    roll_s: float | None = None
    """T_roll: a step without its update."""

    @property
    def step_s(self) -> float:
        return self.outcome.step_s if self.outcome is not None else math.inf

    @property
    def eta(self) -> float | None:
        """Overlap efficiency max(T_roll, T_train) / T_step, as in docs/benchmarks/pipeline.md."""
        if self.outcome is None or self.roll_s is None:
            return None
        return max(self.roll_s, self.outcome.train_s) / self.outcome.step_s

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        split = self.split
        found = {"split": f"{split.rollout}:{split.learner}", "lag": split.lag, "tp": split.tensor_parallel}
        if self.outcome is None:
            return found | {"refused": self.refused}
        return found | {"eta": self.eta, "roll_s": self.roll_s, **asdict(self.outcome)}


def splits(
    gpus: int, *, lags: Sequence[int], tps: Sequence[int], model_ranks: int = 1, shared: bool = False
) -> Iterator[Split]:
    """All splits of so many GPUs, above ALL_SPLITS some of whole nodes; `shared` ones all serve both sides."""
    for tp, lag in itertools.product(tps, lags):
        unit = math.lcm(NODE, tp)
        some = sorted({max(unit, gpus * eighth // 8 // unit * unit) for eighth in EIGHTHS})
        for rollout in [gpus] if shared else range(1, gpus) if gpus <= ALL_SPLITS else some:
            learner = gpus if shared else gpus - rollout
            if rollout > 0 < learner and rollout % tp == 0 and learner % model_ranks == 0:
                yield Split(rollout=rollout, learner=learner, lag=lag, tensor_parallel=tp)


def _mean_length(workload: Workload) -> float:
    return sum(float(workload.draw(seed, 8).mean()) for seed in range(64)) / 64


@dataclass(frozen=True, slots=True)
class Memory:
    """What fits into placement.gpu_gib, by the budget that a run's own check has; all does where it is not known."""

    config: Config
    model: Mapping[str, Any]
    """Its config.json."""
    gib: float

    @classmethod
    def of(cls, config: Config, model: Mapping[str, Any] | None) -> "Memory | None":
        """None where nothing is known of the GPUs or the model."""
        gib = config.placement.gpu_gib
        return None if model is None or gib is None or config.placement.device == "cpu" else cls(config, model, gib)

    def refusal(self, split: Split) -> str:
        """Why a split does not fit; empty where it does."""
        ranks = max(1, split.learner // self.config.learner.mesh.replicate)
        available = available_bytes(self.config)
        needed = choose(replace(Setup.of(self.config, self.model), num_ranks=ranks), available).total
        if available is not None and needed > available:
            return f"a learner GPU would need {needed / GIB:.0f} GiB of {available / GIB:.0f}"
        weights = 2 * Sizes.of(self.model).parameters / split.tensor_parallel
        if weights > self._engine_bytes():
            return f"an engine's weights take {weights / GIB:.0f} GiB of a GPU"
        return ""

    def most_running(self, tp: int, tokens: float) -> int:
        """Answers of so many tokens that the KV cache of an engine of `tp` GPUs holds."""
        sizes = Sizes.of(self.model)
        room = self._engine_bytes() * tp - 2 * sizes.parameters
        return max(1, int(room / (2 * sizes.key_value * sizes.layers * tokens)))

    def _engine_bytes(self) -> float:
        """What an engine takes of each of its GPUs."""
        whole = usable(int(self.gib * GIB))
        if (available := available_bytes(self.config)) is not None and self.config.engines_share_gpus:
            return whole - available
        return ENGINE_SHARE * whole


def advise(
    config: Config,
    fitted: Fitted,
    candidates: Sequence[Split],
    *,
    model: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> list[Advised]:
    """Predictions of all candidates over so many counted steps, the fastest first. Raises ConfigError: no candidate."""
    if not candidates:
        raise BadOption("--gpus: no split of so many GPUs has both sides, with this tensor parallelism")
    memory = Memory.of(config, model)
    steps = steps or (4 if config.trajectories_per_step > LARGE else 16)
    return sorted((_advised(config, fitted, memory, steps, split) for split in candidates), key=lambda one: one.step_s)


def _advised(config: Config, fitted: Fitted, memory: Memory | None, steps: int, split: Split) -> Advised:
    trajectories = config.trajectories_per_step
    if trajectories < split.learner // config.learner.mesh.tensor:
        return Advised(split, f"{trajectories} trajectories a step are fewer than {split.learner} learner ranks")
    if memory is not None and (why := memory.refusal(split)):
        return Advised(split, why)
    tp, workload, running = split.tensor_parallel, fitted.workload, config.rollout.max_running
    if memory is not None:
        running = min(running, memory.most_running(tp, workload.prompt_tokens + _mean_length(workload)))
    rollout = config.rollout.model_copy(update={"max_running": running})
    there = with_lag(config.model_copy(update={"rollout": rollout}), split.lag)

    def outcome(*, trains: bool) -> SimulationResult:
        run = SimulatedRun(there, split.rollout // tp, split.learner, fitted.costs.on(tp), workload, trains)
        return run.run(split.lag + WARM_STEPS, steps)

    return Advised(split, "", outcome(trains=True), outcome(trains=False).step_s)


def with_lag(config: Config, lag: int) -> Config:
    """The configuration at another bound of the lag."""
    return config.model_copy(update={"replay": config.replay.model_copy(update={"async_lag": lag})})


def table(found: Sequence[Advised], present: Advised | None) -> str:
    """A line for each split."""
    lines = ["split        lag  tp    step s   eta  rollout idle  learner idle    tokens/s  beside now"]
    for advised in found[:SHOWN]:
        split, outcome = advised.split, advised.outcome
        head = f"{split.rollout}:{split.learner}".ljust(12) + f"{split.lag:>4}{split.tensor_parallel:>4}"
        if outcome is None:
            lines.append(f"{head}  refused: {advised.refused}")
            continue
        beside = f"{present.step_s / advised.step_s:>10.2f}x" if present is not None else ""
        lines.append(
            f"{head}{outcome.step_s:>10.3g}{advised.eta:>6.2f}{outcome.rollout_idle:>14.0%}"
            f"{outcome.learner_idle:>14.0%}{outcome.tokens_per_s:>12,.0f}{beside}"
        )
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} slower ones (--out has them)")
    return "\n".join(lines)


def yaml_of(config: Config, split: Split) -> str:
    """The keys to set."""
    shares = config.placement.share_gpus
    lines = ["placement:", *["  share_gpus: true"] * shares]
    if split.learner + split.rollout * (not shares) <= NODE:
        lines.append(f'  split: "{split.rollout}:{split.learner}"')
    else:
        nodes = 0 if shares else -(-split.learner // NODE)
        lines.append(f'  learner: "{_devices(0, split.learner)}"')
        lines.append(f'  rollout: "{_devices(nodes, split.rollout)}"')
    lines += [f"  tensor_parallel: {split.tensor_parallel}", "replay:", f"  async_lag: {split.lag}"]
    return "\n".join(lines)


def _devices(first: int, gpus: int) -> str:
    """`node0:0-7; node1:0-7` of whole nodes and a last part."""
    parts = []
    for number in range(-(-gpus // NODE)):
        last = min(NODE, gpus - number * NODE) - 1
        parts.append(f"node{first + number}:0-{last}" if last else f"node{first + number}:0")
    return "; ".join(parts)
