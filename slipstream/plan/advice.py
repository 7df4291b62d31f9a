"""Which plans there are, which fit, what each would take, and the YAML of the best. Torch-free."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import BadOption
from configs.schema import Config
from learner.policy.memory import ENGINE_SHARE, GIB, Setup, Sizes, available_bytes, choose, usable
from slipstream.plan.costs import Costs, Fitted, Workload
from slipstream.plan.simulation import Fleet, Outcome, Prediction, SimulatedRun, with_lag

ALL_SPLITS = 16
"""GPUs up to which every split is simulated; above, those around the balance of both sides."""
AROUND = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Rollout GPUs over those at which both sides would be equally busy."""
NODE = 8
"""GPUs of a node; above one, each node belongs to one side."""
LARGE = 16_384
"""Trajectories a step above which less is simulated of each plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to use the GPUs."""

    rollout: int
    learner: int
    lag: int
    tensor_parallel: int

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.rollout // self.tensor_parallel, self.learner)

    @property
    def gpus(self) -> int:
        return self.rollout + self.learner


@dataclass(frozen=True, slots=True)
class Advised:
    """A plan with its prediction, or with why it cannot be."""

    plan: Plan
    prediction: Prediction | None
    refused: str = ""

    @property
    def step_s(self) -> float:
        return self.prediction.outcome.step_s if self.prediction is not None else math.inf

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        plan = self.plan
        found: dict[str, Any] = {"split": f"{plan.rollout}:{plan.learner}", "lag": plan.lag, "tp": plan.tensor_parallel}
        if self.prediction is None:
            return found | {"refused": self.refused}
        outcome = self.prediction.outcome
        return found | {
            "step_s": outcome.step_s,
            "eta": self.prediction.eta,
            "t_rollout": self.prediction.roll_s,
            "t_train": outcome.train_s,
            "rollout_idle": outcome.rollout_idle,
            "learner_idle": outcome.learner_idle,
            "tokens_per_s": outcome.tokens_per_s,
            "max_lag": outcome.max_lag,
        }


def plans(
    gpus: int, balance: float, *, lags: Sequence[int], tps: Sequence[int], model_ranks: int = 1, shared: bool = False
) -> Iterator[Plan]:
    """All plans of so many GPUs, or above ALL_SPLITS those around `balance`, the share of GPUs for rollouts.

    Where GPUs are `shared`, all of them serve both sides.
    """
    if shared:
        together = (Plan(rollout=gpus, learner=gpus, lag=lag, tensor_parallel=tp) for tp in tps for lag in lags)
        yield from (plan for plan in together if gpus % plan.tensor_parallel == gpus % model_ranks == 0)
        return
    for tp, lag in itertools.product(tps, lags):
        for rollout in _splits(gpus, balance, tp):
            if 0 < rollout < gpus and rollout % tp == 0 and (gpus - rollout) % model_ranks == 0:
                yield Plan(rollout=rollout, learner=gpus - rollout, lag=lag, tensor_parallel=tp)


def _splits(gpus: int, balance: float, tp: int) -> list[int]:
    if gpus <= ALL_SPLITS:
        return list(range(1, gpus))
    unit = math.lcm(NODE, tp)
    wanted = [1 / (1 + (1 / balance - 1) / factor) for factor in AROUND]
    rounded = [min(gpus - unit, max(unit, round(gpus * share / unit) * unit)) for share in wanted]
    return sorted(dict.fromkeys(rounded))


def balance_of(config: Config, costs: Costs, workload: Workload) -> float:
    """Share of the GPUs at which a step's decoding, at full batches, takes as long as its update."""
    n = config.rollout.group_size
    drawn = [workload.draw(seed, n) for seed in range(64)]
    tokens = sum(float(lengths.sum()) for lengths in drawn) / len(drawn)
    full = min(config.rollout.max_running, n * config.rollout.groups_per_step)
    decode = tokens * (costs.decode_step_s / full + costs.decode_answer_s) * costs.engine_gpus
    train = (tokens + n * workload.prompt_tokens) * costs.train_token_s * (1 - costs.flat_share)
    return decode / (decode + train)


def refusal(config: Config, model: Mapping[str, Any] | None, plan: Plan) -> str:
    """Why a plan cannot be; empty where it can, or nothing is known of the memory."""
    trajectories = config.rollout.groups_per_step * config.rollout.group_size
    if trajectories < plan.learner // config.learner.mesh.tensor:
        return f"{trajectories} trajectories a step are fewer than {plan.learner} learner ranks"
    gib = config.placement.gpu_gib
    if model is None or config.placement.device == "cpu" or gib is None:
        return ""
    setup = replace(Setup.of(config, model), num_ranks=max(1, plan.learner // config.learner.mesh.replicate))
    available = available_bytes(config)
    budget = choose(setup, available)
    if available is not None and budget.total > available:
        return f"a learner GPU would need {budget.total / GIB:.0f} GiB of {available / GIB:.0f}"
    weights = 2 * Sizes.of(model).parameters / plan.tensor_parallel
    if weights > _engine_bytes(config, gib):
        return f"an engine's weights take {weights / GIB:.0f} GiB of a GPU"
    return ""


def most_running(config: Config, model: Mapping[str, Any] | None, tp: int, tokens: float) -> int:
    """Answers of so many tokens that an engine's KV cache holds, at most rollout.max_running."""
    gib = config.placement.gpu_gib
    if model is None or config.placement.device == "cpu" or gib is None:
        return config.rollout.max_running
    sizes = Sizes.of(model)
    room = _engine_bytes(config, gib) * tp - 2 * sizes.parameters
    return max(1, min(config.rollout.max_running, int(room / (2 * sizes.key_value * sizes.layers * tokens))))


def _engine_bytes(config: Config, gib: float) -> float:
    """What an engine takes of each of its GPUs."""
    whole = usable(int(gib * GIB))
    if (available := available_bytes(config)) is not None and config.engines_share_gpus:
        return whole - available
    return ENGINE_SHARE * whole


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated of each plan."""

    steps: int = 16
    """That count."""
    warmup: int = 3
    """That do not, beside as many as the lag may be."""
    etas: int | None = None
    """Plans, the fastest ones, whose rollouts are also simulated without a learner, for eta; None: all."""

    @classmethod
    def of(cls, config: Config, steps: int | None = None) -> "Effort":
        """Less for runs with many trajectories, which even out what chance does to a step."""
        if config.trajectories_per_step > LARGE:
            return cls(steps or 4, 1, 4)
        return cls(steps or cls().steps)


def simulate(config: Config, fitted: Fitted, model: Mapping[str, Any] | None, effort: Effort, plan: Plan) -> Advised:
    """What a plan would take."""
    if why := refusal(config, model, plan):
        return Advised(plan, None, why)
    return Advised(plan, Prediction(_outcome(config, fitted, model, effort, plan, trains=True)))


def with_eta(
    config: Config, fitted: Fitted, model: Mapping[str, Any] | None, effort: Effort, advised: Advised
) -> Advised:
    """The same with T_roll."""
    if advised.prediction is None:
        return advised
    roll = _outcome(config, fitted, model, effort, advised.plan, trains=False)
    return replace(advised, prediction=replace(advised.prediction, roll_s=roll.step_s))


def _outcome(
    config: Config, fitted: Fitted, model: Mapping[str, Any] | None, effort: Effort, plan: Plan, *, trains: bool
) -> Outcome:
    costs, workload = fitted.costs.on(plan.tensor_parallel), fitted.workload
    mean = sum(float(workload.draw(seed, 8).mean()) for seed in range(64)) / 64
    running = most_running(config, model, plan.tensor_parallel, workload.prompt_tokens + mean)
    rollout = config.rollout.model_copy(update={"max_running": running})
    config = with_lag(config.model_copy(update={"rollout": rollout}), plan.lag)
    return SimulatedRun(config, plan.fleet, costs, workload, trains).run(plan.lag + effort.warmup, effort.steps)


def advise(
    config: Config,
    fitted: Fitted,
    candidates: Sequence[Plan],
    *,
    model: Mapping[str, Any] | None = None,
    effort: Effort | None = None,
) -> list[Advised]:
    """Predictions of all candidates, the fastest first. Raises ConfigError: there is none."""
    if not candidates:
        raise BadOption("--gpus: no split of so many GPUs has both sides, with this tensor parallelism")
    effort = effort or Effort.of(config)
    found = [simulate(config, fitted, model, effort, plan) for plan in candidates]
    found.sort(key=lambda advised: advised.step_s)
    etas = len(found) if effort.etas is None else effort.etas
    return [*(with_eta(config, fitted, model, effort, advised) for advised in found[:etas]), *found[etas:]]


def table(found: Sequence[Advised], present: Advised | None, most: int = 24) -> str:
    """A line for each plan."""
    lines = ["split        lag  tp    step s   eta  rollout idle  learner idle    tokens/s  beside now"]
    for advised in found[:most]:
        plan = advised.plan
        head = f"{plan.rollout}:{plan.learner}".ljust(12) + f"{plan.lag:>4}{plan.tensor_parallel:>4}"
        if advised.prediction is None:
            lines.append(f"{head}  refused: {advised.refused}")
            continue
        outcome, eta = advised.prediction.outcome, advised.prediction.eta
        shown = f"{eta:>6.2f}" if eta is not None else "     –"
        beside = f"{present.step_s / advised.step_s:>10.2f}x" if present is not None else ""
        lines.append(
            f"{head}{outcome.step_s:>10.3g}{shown}{outcome.rollout_idle:>14.0%}"
            f"{outcome.learner_idle:>14.0%}{outcome.tokens_per_s:>12,.0f}{beside}"
        )
    if len(found) > most:
        lines.append(f"... and {len(found) - most} slower ones (--out has them)")
    return "\n".join(lines)


def yaml_of(config: Config, plan: Plan) -> str:
    """The keys to set."""
    shares = config.placement.share_gpus
    lines = ["placement:", *["  share_gpus: true"] * shares]
    if (plan.learner if shares else plan.gpus) <= NODE or config.placement.device == "cpu":
        lines.append(f'  split: "{plan.rollout}:{plan.learner}"')
    else:
        nodes = 0 if shares else -(-plan.learner // NODE)
        lines.append(f'  learner: "{_devices(0, plan.learner)}"')
        lines.append(f'  rollout: "{_devices(nodes, plan.rollout)}"')
    lines += [f"  tensor_parallel: {plan.tensor_parallel}", "replay:", f"  async_lag: {plan.lag}"]
    return "\n".join(lines)


def _devices(first: int, gpus: int) -> str:
    """`node0:0-7; node1:0-7` of whole nodes and a last part."""
    parts = []
    for number in range(-(-gpus // NODE)):
        last = min(NODE, gpus - number * NODE) - 1
        parts.append(f"node{first + number}:0-{last}" if last else f"node{first + number}:0")
    return "; ".join(parts)
