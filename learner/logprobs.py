"""Logprobs of given tokens in float32, without ever holding float32 logits whole.

The logits of a microbatch are its largest tensor: tokens × vocabulary. A float32 copy, its log-softmax and the
softmax of the backward would each be as large again. Here forward and backward walk over chunks of tokens, from the
hidden states in front of the output head: the gradient of the logits is never whole, and above KEEP_LOGITS_BYTES the
logits are not either; the backward computes them a second time.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 1024
"""Tokens per chunk: 1024 × 152k vocabulary × 4 bytes = 0.6 GB, a few times over while it is worked on."""

KEEP_LOGITS_BYTES = 4 * 1024**3
"""Logits up to this size wait for the backward: 14k tokens of 152k vocabulary in bfloat16. At 16k tokens keeping them
whole with their gradient would be 10 GB; computing them twice is 2 products of tokens × hidden × vocabulary instead
of keeping any."""


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        keep = len(targets) * len(weight) * hidden.element_size() <= KEEP_LOGITS_BYTES
        kept = []
        for part in _chunks(targets):
            logits = hidden[part] @ weight.T
            log_p = _log_softmax(logits, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_p.exp() * log_p).sum(1)
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, *kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, *kept = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        # Sums over chunks in float32: in 16 bit each addition would round.
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for number, part in enumerate(_chunks(targets)):
            logits = kept[number] if kept else hidden[part] @ weight.T
            grad = _logits_gradient(logits, targets[part], ctx.temperature, grads[0][part])
            hidden_grad[part] = grad @ weight
            weight_grad += grad.T @ hidden[part]
        return hidden_grad, weight_grad.to(weight.dtype), None, None


def _chunks(targets: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, len(targets), CHUNK_TOKENS)]


def _logits_gradient(logits: Tensor, targets: Tensor, temperature: float, upstream: Tensor) -> Tensor:
    # torch's own backward, not the formula written out: at probabilities near 1 the gradient is a difference
    # of nearly equal numbers, and AdamW makes such rounding visible in elements of almost no gradient.
    with torch.enable_grad():
        piece = logits.detach().requires_grad_()
        logprobs = _log_softmax(piece, temperature).gather(1, targets[:, None]).squeeze(1)
    (grad,) = torch.autograd.grad(logprobs, piece, upstream)
    return grad


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return torch.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target at the sampling temperature, and the entropy of its distribution.

    Args:
        hidden: [n, H], what the output head is given.
        weight: [V, H] of the output head, in the dtype of `hidden`; the head has no bias.
        targets: [n] int64.
        temperature: the one the tokens were sampled at.

    Returns:
        Logprobs [n] float32, with a gradient to `hidden` and `weight`; entropy [n] float32, without.
    """
    logprobs, entropy = _Logprobs.apply(hidden, weight, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy
