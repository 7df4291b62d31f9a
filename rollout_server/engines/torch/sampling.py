"""Choosing tokens: one uniform number per (seed, answer, position), inverse CDF, logprob at the temperature.

The uniform of a token is a hash of its counters, so an answer's random stream does not depend on what else is in the
batch, on the slot, or on pauses.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 128
"""Entries of the vocabulary whose weights are added up at once; divides the sizes of Llama's, Qwen's and SmolLM's."""
ROWS = 32
"""Rows that are computed at once: their logits stay in the processor's cache between the passes over them."""


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
    chosen = [
        _choose(logits[rows], torch.from_numpy(greedy[rows]), torch.from_numpy(uniform[rows]).unsqueeze(1))
        for rows in (slice(start, start + ROWS) for start in range(0, len(logits), ROWS))
    ]
    tokens, logprobs = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    return tokens.numpy(), logprobs.numpy()


def _choose(logits: torch.Tensor, greedy: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] and their logprobs [n] of logits [n, V]; greedy is [n] and uniform [n, 1], float64.

    Weights e^(logit - largest) are cumulated in blocks first, then those of the block that is hit: in float64, because
    in float32 a vocabulary of 150k entries would lose its tail in the running sum, and a float64 running sum over all
    of it took three times as long as the rest.
    """
    largest, tokens = logits.max(dim=-1, keepdim=True)
    weights = F.pad(logits - largest, (0, -logits.shape[1] % BLOCK), value=float("-inf")).exp_()
    blocks = weights.view(len(logits), -1, BLOCK)
    sums = blocks.sum(dim=-1).double()
    cumulated = sums.cumsum(dim=-1)
    total = cumulated[:, -1:]
    if not greedy.all():
        points = uniform * total
        block = torch.searchsorted(cumulated, points, right=True).clamp_(max=sums.shape[1] - 1)
        points = points - (cumulated - sums).gather(1, block)
        inside = blocks[torch.arange(len(logits)), block.squeeze(1)].double().cumsum(dim=-1)
        # The two sums of a block differ in the last bits; past its end lies a token that is not of it.
        points = torch.minimum(points, inside[:, -1:] * (1 - 2.0**-52))
        sampled = block * BLOCK + torch.searchsorted(inside, points, right=True)
        # Of NaN no place is found; the learner's health checks name it.
        tokens = torch.where(greedy.unsqueeze(1), tokens, sampled.clamp_(max=logits.shape[1] - 1))
    logprobs = (logits.gather(1, tokens) - largest).double() - total.log()
    return tokens.squeeze(1), logprobs.float().squeeze(1)
