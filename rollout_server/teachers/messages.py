"""What rollout servers and the process of a teacher say to each other: a request and its answer, each idempotent."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from replay.channel.frames import Message, registry
from replay.messages import Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRequest(Message):
    """About one request of one rollout server, which counts them."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(OfRequest):
    """Score these sequences, each from its first scored token on; sent again, it is answered again."""

    teacher: str
    tokenizer: str
    """Of the run's fingerprint, which must be the teacher's own."""
    temperature: float
    top: int
    lengths: Int32
    firsts: Int32
    token_ids: Int32
    """As in Engine.score, concatenated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(OfRequest):
    """As Scored of an engine, with the digest of the weights."""

    version: int
    digest: str
    logprobs: Float32
    ids: Int32 = field(default_factory=partial(np.empty, 0, np.int32))  # type: ignore[arg-type]
    top: Float32 = field(default_factory=partial(np.empty, 0, np.float32))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(OfRequest):
    """No scores, and why."""

    reason: str


TO_TEACHER = registry(Score)
FROM_TEACHER = registry(Scores, Refusal)
