"""Evaluations at one stated version."""

from dataclasses import dataclass
from typing import Any, ClassVar

from replay.channel.frames import Message
from replay.messages.arrays import Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Message):
    """Rank 0: evaluate this version; sent before the version is published."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLease(Message):
    """Evaluate these prompts with exactly this version. Outside admission."""

    version: int
    greedy: bool
    seed: int
    prompts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult(Message):
    """Scores of one evaluation, in the order of its prompts; replay forwards it to rank 0."""

    ARRAYS: ClassVar[dict[str, str]] = {"rewards": "float32", "lengths": "int32"}
    version: int
    greedy: bool
    seconds: float
    texts: list[str]
    finish_reasons: list[str]
    rewards: Float32
    lengths: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed(Message):
    """From a rollout server: it cannot finish this evaluation; another server that holds the version may."""

    version: int
    greedy: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationClosed(Message):
    """From replay: nobody needs this version for evaluation any more (done, or given up with a reason)."""

    version: int
    reason: str = ""
