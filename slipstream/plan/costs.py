"""What a run's work costs: constants of engines, learner and weight bus, each with its source and its uncertainty."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from configs.errors import BadOption
from configs.schema import Config
from learner.advantages import leave_out_flat_groups

Int64 = NDArray[np.int64]
Draw = Callable[[int, int], Int64]
"""draw(seed, n): tokens of the n answers to the prompt with this seed; the same for the same arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of each part of the work, as measured with `engine_gpus` GPUs an engine.

    A decode step of b answers takes decode_step_s + b · decode_answer_s. An update takes update_s, and train_token_s
    for each token of the fullest rank, microbatch by microbatch; (1 + exchange_share) times that on several ranks.
    """

    decode_step_s: float
    decode_answer_s: float
    prefill_token_s: float = 0.0
    """Of a prompt's token; the answers of a group share their prompt's."""
    group_s: float = 0.0
    """Of a rollout server's own work on a finished group, one after the other: texts, rewards, message."""
    score_token_s: float = 0.0
    """Of a teacher's processes together, for a token of a group whose answers have ended."""
    train_token_s: float
    """Of one GPU that works alone."""
    update_s: float = 0.0
    exchange_share: float = 0.085
    """What gathering weights and summing gradients adds on more than one rank, in proportion."""
    commit_s: float = 0.0
    """Digest and commit, in which the learner does nothing else."""
    record_s: float = 0.0
    """Of the learner from a commit to its next Take: gather, metrics."""
    publish_s: float = 0.0
    """From a commit until engines stand still for the version, the gather included."""
    pause_s: float = 0.0
    """Of an engine, until the version is live."""
    engine_gpus: int = 1
    tensor_exponent: float = 0.8
    """An engine of k times as many GPUs decodes k to this power times as fast."""
    sharing: float = 1.0
    """Seconds that a second of work takes on a GPU that an engine and the learner share, while both are busy."""
    flat_share: float = 0.0
    """Of groups that dynamic sampling drops."""

    def on(self, gpus: int) -> "Costs":
        """The same with engines of so many GPUs."""
        return replace(self.slower((self.engine_gpus / gpus) ** self.tensor_exponent), engine_gpus=gpus)

    def slower(self, engine: float) -> "Costs":
        """The same with engines that take `engine` times as long for everything."""
        names = ("decode_step_s", "decode_answer_s", "prefill_token_s")
        return replace(self, **{name: getattr(self, name) * engine for name in names})

    def kept_groups(self, config: Config) -> int:
        """Groups of a step that are trained."""
        flat = self.flat_share if leave_out_flat_groups(config.algorithm) else 0.0
        return max(1, round(config.rollout.groups_per_step * (1 - flat)))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked and answered."""

    draw: Draw
    prompt_tokens: int
    described: str
    """Of the lengths, for people."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Costs and the workload, and where each comes from."""

    costs: Costs
    workload: Workload
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name of a constant to where it was read or what it was assumed from."""

    def with_costs(self, given: Mapping[str, float], source: str) -> "Fitted":
        """Some constants by hand. Raises ConfigError: there is no such constant, or it is negative."""
        known = [one.name for one in fields(Costs)]
        for name, value in given.items():
            if name not in known:
                raise BadOption(f"--cost {name}: there is no such constant; there are {', '.join(known)}")
            if not math.isfinite(value) or value < 0:
                raise BadOption(f"--cost {name}={value:g}: give a number of at least 0")
        whole = {name: int(value) if name == "engine_gpus" else value for name, value in given.items()}
        costs = replace(self.costs, **whole)  # type: ignore[arg-type]
        return Fitted(costs, self.workload, {**self.sources, **dict.fromkeys(given, source)})

    def describe(self) -> str:
        """A line for each constant: name, value, unit by its name, source."""
        lines = [
            f"  {name:<18}{value:>12.6g}  {self.sources.get(name, 'default')}"
            for name, value in asdict(self.costs).items()
        ]
        return "\n".join([*lines, f"  {'lengths':<18}{'':>12}  {self.workload.described}"])


@dataclass(frozen=True, slots=True)
class Recorded:
    """Answers of whole recorded groups, drawn with the seed: how alike the answers of a prompt are is kept."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, seed: int, n: int) -> Int64:
        rng = np.random.default_rng(seed)
        lengths = np.array(self.groups[int(rng.integers(len(self.groups)))], dtype=np.int64)
        return lengths if len(lengths) == n else rng.choice(lengths, n)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The law of the lengths that `python -m scripts.bench.server` forces."""

    median: float
    sigma: float
    cap: int

    def __call__(self, seed: int, n: int) -> Int64:
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), self.sigma, n)
        lengths: Int64 = np.clip(np.rint(drawn), 1, self.cap).astype(np.int64)
        return lengths
