"""Environments: episodes of several turns, of which every token is the engine's own or marked as the environment's.

A function of the user, `async def rollout(row, client)`, runs in a process of its own (environments/worker.py) and asks
for turns; the rollout server encodes, samples and records them (environments/session.py), so that ids, logprobs,
versions and masks never pass through code of the user. `session` knows nothing of that process: whatever speaks for an
agent may be another front of it.

Worker processes import this package: nothing heavy may be imported here.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from configs.errors import SlipstreamError


class EnvironmentFailed(SlipstreamError, ValueError, code="SLIP-ENV-01"):
    """The environment's function cannot be loaded, or its processes do not start."""


class EpisodeOver(SlipstreamError, RuntimeError, code="SLIP-ENV-02"):
    """No further turn is possible. A function that lets it pass ends its episode with reward 0."""


class ContextFull(EpisodeOver):
    """There is no room for another token: rollout.max_new_tokens after the prompt, or the longest context."""


class NoMoreTurns(EpisodeOver):
    """The episode has had environment.max_turns turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the engine has answered, as the environment's function sees it."""

    number: int
    """From 0, over all samples of the episode."""
    text: str
    """The decoded answer without special tokens."""
    message: dict[str, Any]
    """The same as a message of OpenAI's chat form, with `tool_calls` where the text has some."""
    token_ids: list[int]
    """The answer, its stop token included."""
    context_ids: bytes
    """What the engine was given, as int32; `context` reads them."""
    finish_reason: str
    """`stop`, or `length` for an answer that was cut."""
    room: int
    """Tokens that still fit behind this answer, those of the environment included."""
    logprobs: list[float] = field(default_factory=list)
    """Behaviour logprob of each token of `token_ids`, at the sampling temperature."""
    versions: list[int] = field(default_factory=list)
    """Policy version of each token of `token_ids`."""

    @property
    def context(self) -> list[int]:
        """What the engine was given."""
        return array("i", self.context_ids).tolist()

    @property
    def ids(self) -> list[int]:
        """Context and answer: to go on from, with what the environment adds."""
        return [*self.context, *self.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a function may return in place of a number."""

    reward: float | None = None
    """None: reward.function judges the last answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other numbers, for metrics.jsonl."""
    leave_out: list[int] = field(default_factory=list)
    """Numbers of turns that stay as context and leave the loss."""
