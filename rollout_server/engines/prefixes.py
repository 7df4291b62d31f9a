"""Requests and prefixes, checked before an engine takes them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout_server.engines.base import EngineError, Partial, Sampling


def check_request(token_ids: Sequence[int], sampling: Sampling, n: int, *, max_context: int, vocab_size: int) -> None:
    """Raise EngineError for a request that an engine could not serve as asked."""
    size, new = len(token_ids), sampling.max_new_tokens
    if min(size, new, n) < 1:
        raise EngineError(f"prompt of {size} tokens, max_new_tokens {new}, n {n}: each must be at least 1")
    if size + new > max_context:
        raise EngineError(
            f"prompt of {size} tokens + max_new_tokens {new} = {size + new} exceeds the context of {max_context}"
            " (data.max_prompt_tokens + max_new_tokens of rollout or evaluation)"
        )
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise EngineError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    if not (sampling.temperature > 0 and math.isfinite(sampling.temperature)):
        raise EngineError(f"temperature {sampling.temperature} must be finite and above 0; for argmax set greedy")


def check_scored(
    sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, max_context: int, vocab_size: int
) -> None:
    """Raise EngineError for sequences that an engine could not score as asked."""
    for number, (ids, first) in enumerate(zip(sequences, firsts, strict=True)):
        if not 1 <= first <= ids.size <= max_context:
            raise EngineError(
                f"sequence {number} of {ids.size} tokens, scored from number {first} on: the first token has no"
                f" logprob, and {max_context} are the most (data.max_prompt_tokens + max_new_tokens, and with"
                " teachers.*.context once more data.max_prompt_tokens)"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise EngineError(f"sequence {number} has a token outside the vocabulary of {vocab_size}")


def settled(prefixes: Sequence[Partial] | None, n: int, sampling: Sampling, vocab_size: int) -> list[Partial]:
    """One prefix per answer, empty where there is none; those that have ended say how.

    An engine shows the last token of an answer before it says that it was the last: such a prefix has ended too. With
    stop token 2 and nothing said of how they ended, [5, 9] goes on and [5, 2] has ended with "stop".

    Raises EngineError unless there are n, each of arrays of one length, of at most `max_new_tokens`, within the
    vocabulary, without a token after a stop token, and with a token where it has ended.
    """
    if not prefixes:
        return [Partial() for _ in range(n)]
    if len(prefixes) != n:
        raise EngineError(f"{len(prefixes)} prefixes for {n} answers; give one for each, empty where there is none")
    return [_settled(index, prefix, sampling, vocab_size) for index, prefix in enumerate(prefixes)]


def _settled(index: int, prefix: Partial, sampling: Sampling, vocab_size: int) -> Partial:
    tokens, limit = prefix.token_ids, sampling.max_new_tokens
    sizes = (tokens.size, prefix.logprobs.size, prefix.versions.size)
    if len(set(sizes)) != 1:
        raise EngineError(f"prefix {index} has {sizes[0]} tokens, {sizes[1]} logprobs and {sizes[2]} versions")
    if not tokens.size:
        if prefix.finish_reason is not None:
            raise EngineError(f"prefix {index} has ended ({prefix.finish_reason}) without a token")
        return prefix
    if tokens.size > limit:
        raise EngineError(f"prefix {index} has {tokens.size} tokens, and max_new_tokens is {limit}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise EngineError(f"prefix {index} has a token outside the vocabulary of {vocab_size}")
    at_stop = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids))
    if at_stop.size and int(at_stop[0]) < tokens.size - 1:
        raise EngineError(f"prefix {index} goes on after the stop token {int(tokens[at_stop[0]])}")
    if at_stop.size:
        return replace(prefix, finish_reason="stop")
    return replace(prefix, finish_reason="length") if tokens.size == limit else prefix
