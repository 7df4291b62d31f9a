"""Choosing tokens: one uniform number per (seed, answer, position), inverse CDF, logprob at the temperature.

The uniform of a token is a hash of its counters, so an answer's random stream does not depend on what else is in the
batch, on the slot, or on pauses.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: Any) -> Any:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014), of a number or an array of uint64."""
    value = value & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_key(engine_seed: int, seed: int, answer: int) -> int:
    """Key below 2^64 of the random stream of one answer of one request."""
    key: int = _mix(engine_seed + _GOLDEN)
    for part in (seed, answer):
        key = _mix(key + _GOLDEN + _mix(part + _GOLDEN))
    return key


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Number `counters[i]` of each stream `keys[i]`, in [0, 1), of 53 bits."""
    mixed: NDArray[np.uint64] = _mix((counters.astype(np.uint64) + 1) * _GOLDEN + keys)
    return (mixed >> 11).astype(np.float64) * 2.0**-53


def choose(
    logits: torch.Tensor,
    *,
    temperature: NDArray[np.float32],
    greedy: NDArray[np.bool_],
    uniform: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Choose one token per row.

    Args:
        logits: [n, V] float32.
        temperature: [n], above 0.
        greedy: [n]; these rows take the argmax.
        uniform: [n] in [0, 1); the other rows take the first token whose cumulated probability exceeds it.

    Returns:
        tokens [n] and their logprobs [n], log_softmax(logits / temperature) in float32, greedy rows included.
    """
    if not (temperature == 1.0).all():
        logits = logits / torch.from_numpy(temperature).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logprobs.argmax(dim=-1)
    else:
        # float64: in float32 a vocabulary of 150k entries would lose its tail in the running sum.
        cumulated = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        points = torch.from_numpy(uniform).unsqueeze(1) * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, points, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy), logprobs.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.numpy(), chosen.numpy()
