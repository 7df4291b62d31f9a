"""Logprob and entropy of tokens in float32, without a row's whole logits.

The logits are the largest tensor of a step: tokens × vocabulary. Forward and backward walk over chunks of tokens, so
the memory of the output head does not depend on tokens times vocabulary. A product of 16-bit matrices is accumulated
and kept in float32: rounding logits of 30 to bfloat16 moves them by up to 0.06.

Where tensor ranks hold a part of the vocabulary each, three numbers a token are exchanged once for all chunks, and the
gradient of the hidden states is summed.

On CUDA a Triton kernel (learner/policy/vocabulary.py) reads each chunk once for maximum, sum and entropy together;
elsewhere plain torch does the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 1024**3
"""Float32 logits that are held at once; their gradient, in the dtype of the weights, comes on top."""
TILE = 256
"""Chunks of more tokens than this have a multiple of it, which products like."""


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        softcap: float | None,
    ) -> tuple[Tensor, ...]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        owner, mine = _located(targets, len(weight), group)
        for part in _chunks(targets, weight):
            logits = _capped(_logits(hidden[part], weight), softcap)
            found = _statistics(logits, mine[part].clamp(min=0), temperature)
            logprobs[part], entropy[part], normalizer[part] = found
        if group is not None and len(targets):
            logprobs, entropy, normalizer = _joined(logprobs, entropy, normalizer, owner, group)
        ctx.save_for_backward(hidden, weight, mine, entropy, normalizer)
        ctx.temperature, ctx.group, ctx.softcap = temperature, group, softcap
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, targets, entropy, normalizer = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        # sums over chunks in float32: in 16 bit each addition would round; none where the head is frozen
        weight_grad = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for part in _chunks(targets, weight):
            logits = _capped(_logits(hidden[part], weight), ctx.softcap)
            known = (targets[part], normalizer[part], entropy[part])
            of_logprobs, of_entropy = (None if g is None else g[part] for g in grads)
            grad = _gradient(logits, *known, of_logprobs, of_entropy, ctx.temperature, hidden.dtype)
            if ctx.softcap is not None:  # d tanh x / dx = 1 - tanh² x
                grad = (grad * (1 - (logits / ctx.softcap).square())).to(grad.dtype)
            torch.mm(grad, weight, out=hidden_grad[part])
            if weight_grad is not None:
                _add_product(weight_grad, grad.T, hidden[part])
        if ctx.group is not None and len(targets):
            dist.all_reduce(hidden_grad, group=ctx.group)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None


def _located(targets: Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """[n] the rank that holds the row of each target, and the row if it is of this rank, else -1."""
    if group is None:
        return targets, targets
    owner = targets // rows
    return owner, torch.where(owner == dist.get_rank(group), targets - owner * rows, -1)


def _joined(
    logprobs: Tensor, entropy: Tensor, normalizer: Tensor, owner: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and log-sum-exps over the whole vocabulary, from those over the part of each rank.

    With z_r and H_r over part r, z = logsumexp(z_r) and the part's share of the probability s_r = exp(z_r - z):
    logprob = logprob_r + log s_r of the part that holds the target; entropy = sum s_r (H_r - log s_r).
    """
    own = torch.stack([logprobs, entropy, normalizer])
    ranks = dist.get_world_size(group)
    found = own.new_empty(ranks * 3, own.shape[1])
    dist.all_gather_into_tensor(found, own, group=group)
    by_rank, entropies, normalizers = found.view(ranks, 3, -1).unbind(1)
    whole = normalizers.logsumexp(0)
    shares = normalizers - whole
    joined = (by_rank + shares).gather(0, owner[None]).sum(0)  # of one term: FSDP wants no view from its units
    return joined, (shares.exp() * (entropies - shares)).sum(0), whole


def _chunks(targets: Tensor, weight: Tensor) -> list[slice]:
    tokens = max(1, CHUNK_BYTES // (4 * len(weight)))
    tokens -= tokens % TILE if tokens > TILE else 0
    return [slice(start, start + tokens) for start in range(0, len(targets), tokens)]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.float() @ weight.float().T
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits between -softcap and softcap, in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32."""
    if left.dtype == torch.float32 or not left.is_cuda:
        total.addmm_(left.float(), right.float())
    else:
        torch.addmm(total, left, right, torch.float32, out=total)


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, entropy and log-sum-exp of each row of logits / temperature, [n] float32."""
    if logits.is_cuda:
        from learner.policy import vocabulary

        return vocabulary.statistics(logits, targets, temperature)
    chosen, logits = targets[:, None], logits / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    normalizer = logits.gather(1, chosen) - log_p.gather(1, chosen)
    return log_p.gather(1, chosen)[:, 0], -(log_p.exp() * log_p).sum(1), normalizer[:, 0]


def _gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits in `dtype`.

    A target of -1 is of another rank. With p of logits / temperature, and up to the factor 1 / temperature:
    d logprob / d logit_v = [v is the target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    if logits.is_cuda:
        from learner.policy import vocabulary

        known = (targets, normalizer, entropy)
        return vocabulary.gradient(logits, *known, of_logprobs, of_entropy, temperature, dtype)
    log_p = logits / temperature - normalizer[:, None]
    p = log_p.exp()
    grad = torch.zeros_like(log_p)
    if of_entropy is not None:
        grad -= (of_entropy[:, None] * p).mul_(log_p.add_(entropy[:, None]))
    if of_logprobs is not None:
        grad -= of_logprobs[:, None] * p
        grad.scatter_add_(1, targets.clamp(min=0)[:, None], torch.where(targets >= 0, of_logprobs, 0.0)[:, None])
    return (grad / temperature).to(dtype)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target at the sampling temperature, and the entropy of its distribution.

    Args:
        hidden: [n, H], what the output head is given.
        weight: [V, H] of the output head, in the dtype of `hidden`; the head has no bias.
        targets: [n] int64.
        temperature: the one the tokens were sampled at.
        group: ranks that hold V rows each of the vocabulary, in order; with it this is a collective.
        softcap: of a family whose logits are softcap · tanh(logits / softcap).

    Returns:
        Two [n] float32 tensors, with gradients to `hidden` and `weight`.
    """
    logprobs, entropy = _Logprobs.apply(hidden, weight, targets, temperature, group, softcap)  # type: ignore[no-untyped-call]
    return logprobs, entropy
