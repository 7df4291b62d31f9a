"""Logprobs of given tokens from logits, in float32, without ever holding float32 logits whole.

The logits of a microbatch are its largest tensor: tokens × vocabulary. A float32 copy, its log-softmax and the
softmax of the backward would each be as large again. Here forward and backward walk over chunks of tokens; what is
kept between them is the logits themselves, and the only new tensor of their size is their gradient.
"""

from typing import Any

import torch

CHUNK_TOKENS = 1024
"""Tokens per chunk: 1024 × 152k vocabulary × 4 bytes = 0.6 GB of working memory."""


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(logits[part], temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_p.exp() * log_p).sum(1)
        ctx.save_for_backward(logits, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None]:
        logits, targets = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            # torch's own backward, not the formula written out: at probabilities near 1 the gradient is a difference
            # of nearly equal numbers, and AdamW makes such rounding visible in elements of almost no gradient.
            with torch.enable_grad():
                piece = logits[part].detach().requires_grad_()
                logprobs = _log_softmax(piece, ctx.temperature).gather(1, targets[part, None]).squeeze(1)
            (grad[part],) = torch.autograd.grad(logprobs, piece, grads[0][part])
        return grad, None, None, None


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
    logprobs, entropy = _TokenLogprobs.apply(flat, targets.reshape(-1), temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape), entropy.view(targets.shape)
