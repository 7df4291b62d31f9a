"""From turns to samples: which tokens are one sequence, and which of them are trained. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_server.engines.base import Completion, Partial, Routing

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSample:
    """One sequence that the learner computes."""

    prompt_ids: Int32
    """[P] the context of its first turn."""
    token_ids: Int32
    """[L] what followed: answers, and between them what the environment added."""
    loss_mask: NDArray[np.uint8]
    """[L] 1 where the policy sampled the token, in a turn that is trained."""
    logprobs: NDArray[np.float32]
    """[L] behaviour logprobs; 0 of tokens of the environment."""
    versions: Int32
    """[L] of each sampled token, and of the sampled token before one of the environment."""
    routing: Routing | None = None
    """[P + L - 1, layers, k] experts of all positions but the last: of the first turn whose passes have read them."""


@dataclass(slots=True)
class _Growing:
    prompt: Int32
    ids: Int32
    """Prompt and everything after it."""
    parts: list[tuple[int | None, Partial]] = field(default_factory=list)
    """By order: (number of the turn, its answer), or (None, what the environment added)."""
    routing: Routing | None = None


class EpisodeRecorder:
    """The samples of one episode.

    Example: turns with contexts [1, 2] and [1, 2, 3, 4] that were answered by [3] and [5] are one sample with prompt
    [1, 2], tokens [3, 4, 5] and mask [1, 0, 1]. A third turn with context [1, 9] begins another one.
    """

    def __init__(self, max_new_tokens: int) -> None:
        """Of a sample behind its prompt, tokens of the environment included."""
        self._most = max_new_tokens
        self._samples: list[_Growing] = []
        self.turns: set[int] = set()
        """Numbers of those that were answered."""
        self.sampled_tokens = 0

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return len(self.turns)

    def room(self, context: Sequence[int] | Int32, *, max_context: int) -> int:
        """Tokens that an answer to this context may have; 0 or less for none."""
        ids = np.asarray(context, np.int32)
        sample = self._extended_by(ids)
        used = 0 if sample is None else ids.size - sample.prompt.size
        return min(self._most - used, max_context - ids.size)

    def add(self, context: Sequence[int] | Int32, answer: Completion, turn: int) -> None:
        """Take in a turn by its number: the exact ids that the engine was given, and what it returned."""
        ids = np.asarray(context, np.int32)
        sample = self._extended_by(ids)
        if sample is not None and ids.size + answer.token_ids.size - sample.prompt.size > self._most:
            sample = None  # it grew while this turn was sampled, which had the room of another one
        if sample is None:
            sample = _Growing(ids, ids)
            self._samples.append(sample)
        elif ids.size > sample.ids.size:
            tail, last = ids[sample.ids.size :], sample.parts[-1][1]
            stamp = int(last.versions[-1])
            given = Partial(
                token_ids=tail,
                logprobs=np.zeros(tail.size, np.float32),
                versions=np.full(tail.size, stamp, np.int32),
            )
            sample.parts.append((None, given))
        sample.parts.append((turn, answer))
        sample.ids = np.concatenate((ids, answer.token_ids))
        if answer.routing is not None:
            before = answer.routing[:0] if sample.routing is None else sample.routing
            sample.routing = np.concatenate((before, answer.routing[len(before) :]))
        self.turns.add(turn)
        self.sampled_tokens += answer.token_ids.size

    def forget(self, turn: int) -> None:
        """Take back an answer that nothing has received. Where a later turn goes on with it, it stays as context."""
        self.turns.discard(turn)
        for sample in self._samples:
            if sample.parts[-1][0] == turn:
                while sample.parts and sample.parts[-1][0] in (turn, None):
                    _, given = sample.parts.pop()
                    sample.ids = sample.ids[: sample.ids.size - given.token_ids.size]
                if sample.routing is not None:
                    sample.routing = sample.routing[: sample.ids.size - 1]
        self._samples = [sample for sample in self._samples if sample.parts]

    def samples(self, leave_out: Collection[int] = ()) -> list[EpisodeSample]:
        """All samples in order; those of which no token is trained only where there is no other.

        `leave_out` are numbers of turns whose answers stay as context.
        """
        trained = self.turns.difference(leave_out)
        made = [_made(sample, trained) for sample in self._samples]
        return [sample for sample in made if sample.loss_mask.any()] or made[:1]

    def _extended_by(self, context: Int32) -> _Growing | None:
        """The longest sample of which the context has every token."""
        found = [
            sample
            for sample in self._samples
            if sample.ids.size <= context.size and np.array_equal(sample.ids, context[: sample.ids.size])
        ]
        return max(found, key=lambda sample: sample.ids.size, default=None)


def _made(sample: _Growing, turns: Collection[int]) -> EpisodeSample:
    answers = [part for _, part in sample.parts]
    sizes = [part.token_ids.size for part in answers]
    trained = [number in turns for number, _ in sample.parts]
    return EpisodeSample(
        prompt_ids=sample.prompt,
        token_ids=np.concatenate([part.token_ids for part in answers]),
        loss_mask=np.repeat(np.array(trained, np.uint8), sizes),
        logprobs=np.concatenate([part.logprobs for part in answers]),
        versions=np.concatenate([part.versions for part in answers]),
        routing=sample.routing,
    )
