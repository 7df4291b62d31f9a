"""Answers in progress: their parts between updates, and token versions. Pure."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollout_server.engines.base import Completion, EngineError, FinishReason, Partial, Pictures, Routing, Sampling
from slipstream.families.experts import Experts

SCORED_AT = "SLIPSTREAM_SCORED_AT"
"""Environment variable of a teacher's process: the temperature of all its logprobs."""


@dataclass(slots=True, kw_only=True, eq=False)
class AnswerPart:
    """One request to SGLang: an answer, or its rest after an interruption."""

    rid: str
    version: int
    """Live when the part started; the prefix cache is keyed by it."""
    seen: int = 0
    """Tokens that have arrived here so far."""
    boundaries: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of each update that came while the part ran; an upper bound of where it began."""
    interrupted: bool = False
    """Ended for an update; goes on as another part."""
    kept: int | None = None
    """So many tokens count; those after them were sampled with weights that were not proven."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """The last that came, with all tokens of the part so far."""


class ResumableAnswer:
    """One answer in progress: prefix and finished parts (`taken`), and the part that runs."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        *,
        pinned: int | None,
        prefix: Partial | None = None,
        pictures: Pictures | None = None,
        experts: Experts | None = None,
    ) -> None:
        """`experts` are those of which the routing is wanted."""
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.pictures = pictures
        self.pinned = pinned
        self.experts, self.routing = experts, cast(Routing | None, None)
        self.part: AnswerPart | None = None
        self.aborted = False
        prefix = prefix or Partial()
        self.ended: FinishReason | None = prefix.finish_reason
        self.taken = replace(prefix, finish_reason=None)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, as far as they are known here."""
        return self.taken.token_ids.size + (self.part.seen if self.part is not None else 0)

    def met(self, version: int, tokens: Mapping[str, int], late_tokens: int, *, tainted: bool) -> None:
        """A load came when SGLang had booked so many tokens of each request; what is `tainted` is sampled again.

        Of late ones none is kept then: whether this request had one on its way is not known.
        """
        part = self.part
        if part is None or (booked := tokens.get(part.rid)) is None:  # it has ended before
            return
        part.boundaries.append((booked + late_tokens, version))
        if tainted:
            part.kept = booked if part.kept is None else min(booked, part.kept)
            part.interrupted = part.interrupted or not self.aborted

    def take(self, part: AnswerPart, output: Mapping[str, Any], late_tokens: int) -> tuple[int, FinishReason]:
        """Add the tokens of a finished part; their number and its finish reason.

        Raises EngineError where SGLang has refused the part, or what it returned is not consistent.
        """
        finished = output["meta_info"]["finish_reason"] or {}
        if finished.get("type") == "abort" and finished.get("status_code") and not part.interrupted:
            text = finished.get("message")
            raise EngineError(f"SGLang ended a request of {len(self.prompt)} prompt tokens: {text}")
        ids, logprobs = tokens_of(output)
        spans = output["meta_info"].get("weight_versions")
        versions = (
            versions_from_spans(spans, len(ids), late_tokens)
            if spans and ids
            else versions_from_boundaries(part, len(ids))
        )
        before, kept = self.taken.token_ids.size, part.kept if part.kept is not None else len(ids)
        ended_unread = part.interrupted and output["meta_info"].get("routed_experts") is None  # the next part reads it
        if self.experts is not None and ids and not ended_unread:
            self.route(output, before + len(ids), self.experts)
            self.routing = self.routing[: len(self.prompt) + before + kept - 1] if self.routing is not None else None
        self.taken = self.taken.then(_tokens(ids[:kept], logprobs[:kept], versions[:kept]))
        return min(kept, len(ids)), "abort" if part.kept is not None else finish_reason(finished)

    def route(self, output: Mapping[str, Any], num_tokens: int, experts: Experts) -> None:
        """Add the routing of positions that had none yet: up to the last but one of so many tokens.

        Raises EngineError: there is none, or it is not of all positions.
        """
        given = output["meta_info"].get("routed_experts")
        if given is None:
            raise EngineError("SGLang returned no routed experts (algorithm.routing_replay)")
        ids = np.frombuffer(base64.b64decode(given), np.int32) if isinstance(given, str) else np.asarray(given)
        wanted = len(self.prompt) + num_tokens - 1
        if ids.size != wanted * experts.layers * experts.chosen:
            raise EngineError(
                f"SGLang returned {ids.size} routed experts, and {wanted} positions have {experts.layers} layers of"
                f" {experts.chosen}: spans are missing or shifted [corrupt]"
            )
        rows = ids.reshape(-1, *experts.shape).astype(experts.dtype)
        self.routing = rows if self.routing is None else np.concatenate((self.routing, rows[len(self.routing) :]))

    def at_its_end(self) -> FinishReason | None:
        """Finish reason by its tokens: SGLang checks aborts before stop tokens."""
        tokens = self.taken.token_ids
        if tokens.size and tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if tokens.size >= self.sampling.max_new_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        """What came out."""
        positions = len(self.prompt) + self.taken.token_ids.size - 1
        routing = None if self.routing is None else self.routing[:positions]
        return replace(self.taken.as_completion(reason), routing=routing)

    def progress(self, since: int) -> Partial:
        """Tokens from number `since` on, and the finish reason if it has ended."""
        taken, part = self.taken.since(since), self.part
        if part is None:
            return replace(taken, finish_reason=None if self.ended == "abort" else self.ended)
        # of a list that SGLang makes longer in place
        pairs = ((part.output.get("meta_info") or {}).get("output_token_logprobs") or [])[: part.seen]
        first = max(0, since - self.taken.token_ids.size)
        ids, logprobs = [pair[1] for pair in pairs[first:]], [pair[0] for pair in pairs[first:]]
        return taken.then(_tokens(ids, logprobs, versions_from_boundaries(part, len(pairs))[first:]))


def scored_of(
    meta: Mapping[str, Any], ids: Sequence[int], first: int, top: int, vocab_size: int
) -> tuple[list[float], list[Any]]:
    """Logprobs of the tokens from number `first` on, and [logprob, id] of the `top` likeliest in place of each.

    Raises EngineError: SGLang says something of other tokens.
    """
    told = (meta.get("input_token_logprobs") or [])[1:]  # of what stands before the first one, it has none
    beside = (meta.get("input_top_logprobs") or [])[1:] if top else [[]] * len(told)
    shown = [token if token < vocab_size - 1 else 0 for token in ids[first:]]  # the last id goes by another's name
    if [int(one[1]) for one in told] != shown or any(len(row) < top for row in beside):
        raise EngineError(
            f"SGLang gave {len(told)} logprobs for the tokens {first} to {len(ids)} of a prompt [corrupt]"
        )
    return [float(one[0]) for one in told], [pair for row in beside for pair in row[:top]]


def _tokens(ids: list[int], logprobs: list[float], versions: NDArray[np.int32]) -> Partial:
    return Partial(token_ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32), versions=versions)


def versions_from_boundaries(part: AnswerPart, count: int) -> NDArray[np.int32]:
    """[count] version of each token, where the engine records none (SGLang before 0.5.20).

    Example: a part that started at version 3 with boundaries [(2, 4)] and 4 tokens gives [3, 3, 4, 4].
    """
    versions = np.full(count, part.version, np.int32)
    for first, version in part.boundaries:
        versions[first:] = version
    return versions


def versions_from_spans(spans: Sequence[Mapping[str, Any]], count: int, late_tokens: int) -> NDArray[np.int32]:
    """[count] version of each token from meta_info["weight_versions"]: {version, start, end}, ascending.

    `late_tokens` may have been sampled before an update and booked after it (1 with overlapped scheduling): they get
    the older version. Raises EngineError: spans do not cover the tokens, or name a version that is none of ours.
    """
    versions = np.full(count, -1, np.int32)
    for position, span in enumerate(spans):
        if not str(span["version"]).lstrip("-").isdigit():
            raise EngineError(f"SGLang reports tokens of weight version {span['version']!r}, which is not ours")
        first = int(span["start"]) + (late_tokens if position else 0)
        versions[first : int(span["end"])] = int(span["version"])
        if position:  # what a late token took from the next span goes to the one before
            versions[int(span["start"]) : first] = int(spans[position - 1]["version"])
    if (versions < 0).any():
        raise EngineError(f"SGLang's spans {list(spans)!r} do not cover {count} tokens")
    return versions


def tokens_of(output: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and logprobs of a part's output, if it ran. Raises EngineError if they disagree."""
    meta = output["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    ids = [int(pair[1]) for pair in pairs]
    shown = [int(token) for token in output.get("output_ids") or []]
    if ids != shown and not (len(shown) == 1 and shown == ids[-1:]):  # older ones, aborted in the queue: the last only
        raise EngineError(f"SGLang returned {len(shown)} tokens and {len(ids)} logprobs")
    return ids, [float(pair[0]) for pair in pairs]


def finish_reason(reason: Mapping[str, Any] | None) -> FinishReason:
    """Ours for SGLang's {"type": "stop" | "length" | "abort", ...}."""
    kind = (reason or {}).get("type")
    return "length" if kind == "length" else "stop" if kind == "stop" else "abort"
