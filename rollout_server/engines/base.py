"""What a rollout server asks of an engine. Two implementations: `torch` (embedded) and `sglang`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.errors import SlipstreamError

if TYPE_CHECKING:
    import torch

PauseMode = Literal["keep_kv", "recompute_kv", "drain"]
FinishReason = Literal["stop", "length", "abort"]
Routing = NDArray[Any]
"""Expert ids: uint8 where a layer has at most 256 experts, else uint16."""


class EngineError(SlipstreamError, RuntimeError, code="SLIP-ENGINE-01"):
    """The engine failed, or refuses; a failed one must be refilled or restarted."""


class EngineDead(EngineError, code="SLIP-ENGINE-03"):
    """A process of the engine has ended [closed]."""


class EngineSilent(EngineError, code="SLIP-ENGINE-04"):
    """The engine lives and does not answer, or shows no token, for rollout.engine_deadline_s [silent]."""


class EngineStartFailed(SlipstreamError, RuntimeError, code="SLIP-ENGINE-02"):
    """The engine did not start; a restart may help, for example once memory is free."""


class EngineStartRefused(EngineStartFailed):
    """Its own words are of what it was given; where the next start ends in them as well, no other one helps."""


def first_error(group: BaseException) -> BaseException:
    """The first exception in a group that is no group itself."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request samples."""

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of a prompt, as the vision tower reads them; their tokens stand in the prompt already."""

    pixels: NDArray[np.float32]
    """[patches, values of a patch], of all pictures one after the other."""
    grids: tuple[tuple[int, int, int], ...]
    """Patches of each: frames, rows, columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Tokens of an answer that may still run: a prefix, or the newest ones."""

    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[L] sampled tokens, the stop token included."""
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """[L] logprob of each token at the sampling temperature, from float32 logits."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[L] policy version that sampled each token; one that is in doubt has the older version."""
    finish_reason: FinishReason | None = None
    """How the answer has ended ("stop" or "length"); None while it goes on."""

    @classmethod
    def of(cls, answer: "Completion") -> "Partial":
        """An answer that has ended; one that was aborted has not come to its end."""
        return Partial(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=None if answer.finish_reason == "abort" else answer.finish_reason,
        )

    def as_completion(self, reason: FinishReason) -> "Completion":
        """The answer that this is the whole of."""
        return Completion(
            token_ids=self.token_ids, logprobs=self.logprobs, versions=self.versions, finish_reason=reason
        )

    def since(self, first: int) -> "Partial":
        """Without the tokens before number `first`."""
        return replace(
            self, token_ids=self.token_ids[first:], logprobs=self.logprobs[first:], versions=self.versions[first:]
        )

    def then(self, more: "Partial") -> "Partial":
        """These tokens and the next ones, which say how it ended."""
        return Partial(
            token_ids=np.concatenate((self.token_ids, more.token_ids)),
            logprobs=np.concatenate((self.logprobs, more.logprobs)),
            versions=np.concatenate((self.versions, more.versions)),
            finish_reason=more.finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Partial):
    """One sampled answer.

    Example: token_ids [5, 9, 2], logprobs [-0.1, -1.2, -0.0], versions [3, 3, 4], finish_reason "stop"
    is an answer whose last token was sampled after an update from version 3 to 4.
    """

    finish_reason: FinishReason
    routing: Routing | None = None
    """[P + L - 1, layers, k] experts (slipstream/families/experts.py) of each position of prompt and answer but the
    last, which no pass has read; None of a model without experts. See `Engine.generate` for which pass."""

    def first(self, count: int) -> "Completion":
        """Its first tokens, as an answer that has stopped."""
        cut = self.token_ids.size - count
        return Completion(
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            routing=None if self.routing is None else self.routing[: len(self.routing) - cut],
            finish_reason="stop",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one version gives to the scored tokens of some sequences, one sequence after the other."""

    version: int
    logprobs: NDArray[np.float32]
    """[tokens] of each token, at the temperature that was asked for, from float32 logits."""
    ids: NDArray[np.int32]
    top: NDArray[np.float32]
    """[tokens * k] the k likeliest tokens in the place of each, the likeliest first, and their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What an engine says of itself."""

    version: int
    running: int
    waiting: int
    generated_tokens: int
    busy_s: float
    """Seconds spent decoding since the start."""
    memory_bytes: int
    detail: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """An engine serves one policy version at a time; evaluations may pin another one.

    All coroutines raise EngineError where the engine has died or is closed.
    """

    @property
    def version(self) -> int:
        """Policy version of the live weights."""

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        n: int,
        *,
        request_id: str,
        pinned: int | None = None,
        prefixes: Sequence[Partial] | None = None,
        pictures: Pictures | None = None,
    ) -> list[Completion]:
        """Sample `n` answers to one prompt. A caller that is cancelled aborts its request.

        Args:
            token_ids: the prompt.
            sampling: how to sample; each of the n answers has a random stream of its own from (seed, i).
            n: answers.
            request_id: name under which `running_tokens` and `abort` know this request.
            pinned: sample with exactly this pinned version instead of the live one.
            prefixes: one per answer: it goes on from there, and `max_new_tokens` counts the prefix. An answer that has
                ended comes back as it is. What follows a prefix need not be what the engine it comes from would have
                sampled; it is of the same distribution.
            pictures: of the prompt; EngineError where the model takes none.

        Routing is that of the pass which sampled the token behind the position, as its logprob and version are: it
        stays where an update has keys and values computed again. A prompt's is of the pass that made its keys and
        values; in the prefix cache that may be another request's, of the same weights. A prefix comes without, and gets
        that of the pass which reads it here.

        Raises EngineError where the prompt or a prefix does not fit, `request_id` is in use, or `pinned` is not held.
        """

    async def score(
        self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, temperature: float, top: int
    ) -> Scored:
        """What the live weights, of one version, give to tokens that are there: nothing is sampled.

        Args:
            sequences: prompt and answer of each.
            firsts: number of the first token of each that is scored, up to its last; 1 or more.
            temperature: at which logprobs are taken.
            top: the likeliest tokens that are named beside each; 0 for none.

        Raises EngineError where a sequence is too long or has unknown tokens.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two decode steps. Raises EngineError when running requests did not end.

        `keep_kv` keeps the KV of running requests, `recompute_kv` computes it anew, `drain` lets them finish first.
        """

    async def load(
        self,
        named_tensors: Iterable[tuple[str, "torch.Tensor"]],
        version: int,
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """Replace the weights (HF names and shapes, all of them) while paused. The engine copies.

        An engine that can compare by itself goes on with running requests once it holds `digests`, and shows what they
        sample when it is resumed.

        Raises EngineError where it is not paused, or a tensor is unknown, missing or of the wrong shape. In that case
        it is half updated: `resume` and `pin` refuse until a load has succeeded.
        """

    async def digest(self) -> Mapping[str, int]:
        """Digest of every HF tensor, as it is live; a tied lm_head.weight has none."""

    async def resume(self) -> None:
        """Go on decoding with what is loaded. Raises EngineError while the engine is half updated."""

    def stood(self) -> tuple[float, float] | None:
        """From when to when (monotonic) requests stood still in the last update; None: from `pause` to `resume`."""

    def holds(self) -> int | None:
        """Version that an evaluation keeps live, for which `pause` waits; None without."""

    async def pin(self, version: int) -> None:
        """Keep the live weights for evaluation until `unpin`. Raises EngineError where they are not `version`."""

    def hold(self, version: int) -> None:
        """An evaluation of a pinned version has been accepted: keep what it needs until `unpin`."""

    async def unpin(self, version: int) -> None:
        """Forget pinned weights, if any; what still runs on them comes back as `abort`."""

    def abort(self, request_id: str) -> None:
        """End a request, if there is one; its answers come back as `abort`."""

    def running_tokens(self) -> Mapping[str, int]:
        """Tokens so far, prefixes included, by request id; waiting answers count as 0."""

    def waiting(self) -> set[str]:
        """Requests of which answers wait for room, and none runs."""

    def progress(self, request_id: str, since: Sequence[int] = ()) -> list[Partial]:
        """What each answer of a running request has, prefix included; nothing for unknown requests.

        `since`: tokens of each answer to leave out at its beginning, because the caller has them; none if empty.
        """

    async def health(self) -> Health:
        """Numbers about the engine. Raises EngineError when it has died or stands still."""

    async def close(self) -> None:
        """Stop, in time or with EngineError; running requests come back as `abort`."""
