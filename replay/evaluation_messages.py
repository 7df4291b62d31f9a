"""Messages about evaluations (replay/messages.py)."""

from dataclasses import dataclass, field

from replay.arrays import Float32, Int32, UInt8, no_bytes
from replay.channel.frames import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Message):
    """Rank 0: evaluate this version; sent before the version is published."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPart(Message):
    """About a part of an evaluation."""

    version: int
    set: str = ""  # name in data.eval; empty where that is one file
    greedy: bool
    first: int = 0  # number in its set of the first prompt
    samples: int = 1
    asked: str = ""  # hash of what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLease(OfPart):
    """Evaluate these prompts with exactly this version. Outside admission."""

    temperature: float
    max_new_tokens: int
    seed: int
    """Prompt i of the set has the seed `seed` + i, and each of its answers a stream of its own."""
    prompts: list[dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult(OfPart):
    """Scores of one EvaluationLease, in order, for rank 0; an answer that is left out (as in Group) has none."""

    seconds: float
    texts: list[str]
    finish_reasons: list[str]
    rewards: Float32
    lengths: Int32
    errors: list[str] = field(default_factory=list)
    left_out: UInt8 = field(default_factory=no_bytes)
    error_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed(Message):
    """From a rollout server: it cannot finish this evaluation; another server that holds the version may."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationClosed(Message):
    """From replay: nobody needs this version for evaluation any more (done, or given up with a reason)."""

    version: int
    reason: str = ""
