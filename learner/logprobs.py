"""Logprobs of given tokens in float32, without ever holding float32 logits whole.

The logits of a microbatch are its largest tensor: tokens × vocabulary. A float32 copy, its log-softmax and the
softmax of the backward would each be as large again. Here forward and backward walk over chunks of tokens.

    token_logprobs  from logits: they are kept, and the only new tensor of their size is their gradient
    head_logprobs   from the hidden states in front of the output head: the gradient of the logits is never whole, and
                    above KEEP_LOGITS_BYTES the logits are not either; the backward computes them a second time
"""

from typing import Any

import torch

CHUNK_TOKENS = 1024
"""Tokens per chunk: 1024 × 152k vocabulary × 4 bytes = 0.6 GB, a few times over while it is worked on."""

KEEP_LOGITS_BYTES = 4 * 1024**3
"""Logits up to this size wait for the backward: 14k tokens of 152k vocabulary in bfloat16. At 16k tokens keeping them
whole with their gradient would be 10 GB; computing them twice is 2 products of tokens × hidden × vocabulary instead
of keeping any."""


class _Logprobs(torch.autograd.Function):
    """Logits are `hidden` @ `weight`.T a chunk at a time, or `hidden` itself where there is no weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        keep_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        keep = weight is not None and len(targets) * len(weight) * hidden.element_size() <= keep_bytes
        kept = []
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight)
            log_p = _log_softmax(logits, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_p.exp() * log_p).sum(1)
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None]:
        hidden, weight, targets, *kept = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden), None
        if weight is not None:  # sums over chunks in float32: in 16 bit each addition would round
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for number, start in enumerate(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logits = kept[number] if kept else _logits(hidden[part], weight)
            grad = _logits_gradient(logits, targets[part], ctx.temperature, grads[0][part])
            hidden_grad[part] = grad if weight is None else grad @ weight
            if weight_grad is not None:
                weight_grad += grad.T @ hidden[part]
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return hidden if weight is None else hidden @ weight.T


def _logits_gradient(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, upstream: torch.Tensor
) -> torch.Tensor:
    # torch's own backward, not the formula written out: at probabilities near 1 the gradient is a difference
    # of nearly equal numbers, and AdamW makes such rounding visible in elements of almost no gradient.
    with torch.enable_grad():
        piece = logits.detach().requires_grad_()
        logprobs = _log_softmax(piece, temperature).gather(1, targets[:, None]).squeeze(1)
    (grad,) = torch.autograd.grad(logprobs, piece, upstream)
    return grad


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.float()
    return torch.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, chunk: int = CHUNK_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each target token at the sampling temperature, and the entropy of its distribution.

    Args:
        logits: [B, T, V] of any floating dtype.
        targets: [B, T] int64.
        temperature: the one the tokens were sampled at.
        chunk: tokens whose float32 logits are held at once.

    Returns:
        Two [B, T] float32 tensors; the logprobs carry a gradient (in the dtype of the logits), the entropy none.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _Logprobs.apply(flat, None, targets.reshape(-1), temperature, chunk, 0)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape), entropy.view(targets.shape)


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    chunk: int = CHUNK_TOKENS,
    keep_bytes: int = KEEP_LOGITS_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As token_logprobs of hidden @ weight.T, with less memory.

    Args:
        hidden: [n, H], what the output head is given.
        weight: [V, H] of the output head, in the dtype of `hidden`; the head has no bias.
        targets: [n] int64.
        temperature: the one the tokens were sampled at.
        chunk: tokens whose float32 logits are held at once.
        keep_bytes: up to this size the logits (in the dtype of `hidden`) are kept for the backward.

    Returns:
        Logprobs [n] float32, with a gradient to `hidden` and `weight`; entropy [n] float32, without.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states {tuple(hidden.shape)} do not fit targets {tuple(targets.shape)}")
    logprobs, entropy = _Logprobs.apply(hidden, weight, targets, temperature, chunk, keep_bytes)  # type: ignore[no-untyped-call]
    return logprobs, entropy
