"""Logprob and entropy of tokens in float32, without a row's whole logits.

The logits are the largest tensor of a step: tokens × vocabulary. Forward and backward walk over chunks of tokens, so
the memory of the output head does not depend on tokens times vocabulary. A product of 16-bit matrices is accumulated
and kept in float32: rounding logits of 30 to bfloat16 moves them by up to 0.06.

Where tensor ranks hold a part of the vocabulary each, three numbers a token are exchanged once for all chunks, and the
gradient of the hidden states is summed.

Distillation may ask for more of the same logits, so that they are made once: logprobs of any k tokens beside each
target, or the KL divergence from a teacher, whose logits are made a chunk at a time beside the policy's.

On CUDA a Triton kernel (learner/policy/vocabulary.py) reads each chunk once for maximum, sum and entropy together;
elsewhere plain torch does the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.teacher_view import TeacherView

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
        ids: Tensor,
        teacher: TeacherView | None,
    ) -> tuple[Tensor, ...]:
        logprobs = torch.empty(targets.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        beside = torch.zeros(ids.shape, dtype=logprobs.dtype, device=hidden.device)
        divergence = _Divergence(teacher, logprobs, temperature) if teacher is not None else None
        owner, mine = _located(targets, len(weight), group)
        _, here = _located(ids, len(weight), group)
        for part in _chunks(targets, weight, models=1 if teacher is None else 2):
            logits = _capped(_logits(hidden[part], weight), softcap)
            found = _statistics(logits, mine[part].clamp(min=0), temperature)
            logprobs[part], entropy[part], normalizer[part] = found
            beside[part] = torch.where(here[part] >= 0, logits.gather(1, here[part].clamp(min=0)) / temperature, 0.0)
            if divergence is not None:
                divergence.compare(part, logits, entropy[part], normalizer[part])
            del logits  # before the next chunk's are made
        if group is not None and len(targets):
            logprobs, entropy, normalizer = _joined(logprobs, entropy, normalizer, owner, group)
            if ids.numel():
                dist.all_reduce(beside, group=group)
        ctx.save_for_backward(hidden, weight, mine, entropy, normalizer, here)
        ctx.temperature, ctx.group, ctx.softcap, ctx.divergence = temperature, group, softcap, divergence
        ctx.set_materialize_grads(False)
        if divergence is None:
            return logprobs, entropy, beside - normalizer[:, None]
        ctx.mark_non_differentiable(divergence.confidence, divergence.best)
        return logprobs, entropy, divergence.kl.clone(), divergence.confidence, divergence.best

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, normalizer, here = ctx.saved_tensors
        divergence: _Divergence | None = ctx.divergence
        hidden_grad = torch.empty_like(hidden)
        # sums over chunks in float32: in 16 bit each addition would round; none where the head is frozen
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros(weight.shape, dtype=_wide(weight.dtype), device=weight.device)
        for part in _chunks(targets, weight, models=1 if divergence is None else 2):
            logits = _capped(_logits(hidden[part], weight), ctx.softcap)
            known = (targets[part], normalizer[part], entropy[part])
            of_logprobs, of_entropy, of_third = (None if g is None else g[part] for g in grads[:3])
            beside = None if of_third is None or divergence is not None else (here[part], of_third)
            grad = _gradient(logits, *known, of_logprobs, of_entropy, ctx.temperature, hidden.dtype, beside)
            # d tanh x / dx = 1 - tanh² x
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square()
            if divergence is not None and of_third is not None:
                divergence.add_gradient(grad, part, logits, normalizer[part], of_third)
            if slope is not None:
                grad = (grad * slope).to(grad.dtype)
            torch.mm(grad, weight, out=hidden_grad[part])
            if weight_grad is not None:
                _add_product(weight_grad, grad.T, hidden[part])
            del logits, grad, slope
        if ctx.group is not None and len(targets):
            dist.all_reduce(hidden_grad, group=ctx.group)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), *[None] * 6


class _Divergence:
    """From a teacher at n positions, filled a chunk at a time. With p of the policy and q of the teacher."""

    def __init__(self, teacher: TeacherView, like: Tensor, temperature: float) -> None:
        self.teacher, self.temperature, self.is_reverse = teacher, temperature, teacher.direction == "reverse"
        self.kl, self.normalizer, self.confidence = (torch.empty_like(like) for _ in range(3))
        self.best = torch.empty_like(like, dtype=torch.int64)

    def compare(self, part: slice, logits: Tensor, entropy: Tensor, normalizer: Tensor) -> None:
        """Fill in these positions; `logits` of the policy, with their statistics, are used up.

        KL(p || q) = -H(p) - Σ p log q: one sum over the vocabulary, of a probability times the other's scaled logit.
        """
        others, theirs = self._logits(part), self.teacher.temperature
        highest, self.best[part] = others.max(1)
        _, their_entropy, self.normalizer[part] = _statistics(others, self.best[part], theirs)
        self.confidence[part] = (highest / theirs - self.normalizer[part]).exp()
        sides = (logits, normalizer, self.temperature), (others, self.normalizer[part], theirs)
        (p, z, t), (scores, shift, divisor) = sides if self.is_reverse else reversed(sides)
        p.div_(t).sub_(z[:, None]).exp_()
        cross = torch.bmm(p[:, None], scores[:, :, None])[:, 0, 0] / divisor - shift
        self.kl[part] = -(entropy if self.is_reverse else their_entropy) - cross

    def add_gradient(self, grad: Tensor, part: slice, logits: Tensor, normalizer: Tensor, upstream: Tensor) -> None:
        """grad += upstream · d KL / d logits, in place; `logits` are used up, and no third tensor of their size made.

        Up to the factor 1 / temperature: d KL(p || q) / d logit_v = p_v (log p_v - log q_v - KL);
        d KL(q || p) / d logit_v = p_v - q_v.
        """
        log_p = logits.div_(self.temperature).sub_(normalizer[:, None])
        log_q = self._logits(part).div_(self.teacher.temperature).sub_(self.normalizer[part, None])
        if self.is_reverse:
            found = log_q.neg_().add_(log_p).sub_(self.kl[part, None]).mul_(log_p.exp_())
        else:
            found = log_q.exp_().neg_().add_(log_p.exp_())
        grad.add_(found.mul_(upstream[:, None] / self.temperature))

    def _logits(self, part: slice) -> Tensor:
        return _capped(_logits(self.teacher.hidden[part], self.teacher.weight), self.teacher.softcap)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of logits and of sums: float32, or more."""
    return torch.promote_types(dtype, torch.float32)


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


def _chunks(targets: Tensor, weight: Tensor, models: int = 1) -> list[slice]:
    tokens = max(1, CHUNK_BYTES // (4 * len(weight) * models))
    tokens -= tokens % TILE if tokens > TILE else 0
    return [slice(start, start + tokens) for start in range(0, len(targets), tokens)]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return hidden.to(_wide(hidden.dtype)) @ weight.to(_wide(weight.dtype)).T
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits between -softcap and softcap, in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32."""
    if left.dtype == torch.float32 or not left.is_cuda:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
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
    beside: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient of the logits in `dtype`.

    A target of -1 is of another rank; `beside` are further tokens [c, k] with the gradient of their logprobs. With p of
    logits / temperature, and up to the factor 1 / temperature:
    d logprob / d logit_v = [v is the target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    total = of_logprobs
    if beside is not None:
        total = beside[1].sum(1) if of_logprobs is None else of_logprobs + beside[1].sum(1)
    if logits.is_cuda:
        from learner.policy import vocabulary

        known = (targets, normalizer, entropy)
        grad = vocabulary.gradient(logits, *known, of_logprobs, total, of_entropy, temperature, dtype)
        return grad if beside is None else _add_at(grad, beside[0], beside[1] / temperature)
    log_p = logits / temperature - normalizer[:, None]
    p = log_p.exp()
    grad = torch.zeros_like(log_p)
    if of_entropy is not None:
        grad -= (of_entropy[:, None] * p).mul_(log_p.add_(entropy[:, None]))
    if total is not None:
        grad -= total[:, None] * p
    if of_logprobs is not None:
        _add_at(grad, targets[:, None], of_logprobs[:, None])
    if beside is not None:
        _add_at(grad, *beside)
    return (grad / temperature).to(dtype)


def _add_at(grad: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Add values [c, k] at columns `ids`, but for those of other ranks, which are -1."""
    return grad.scatter_add_(1, ids.clamp(min=0), torch.where(ids >= 0, values, 0.0).to(grad.dtype))


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    *,
    softcap: float | None = None,
    ids: Tensor | None = None,
    teacher: TeacherView | None = None,
) -> tuple[Tensor, ...]:
    """Logprob of each target at the sampling temperature, and the entropy of its distribution.

    Args:
        hidden: [n, H], what the output head is given.
        weight: [V, H] of the output head, in the dtype of `hidden`; the head has no bias.
        targets: [n] int64.
        temperature: the one the tokens were sampled at.
        group: ranks that hold V rows each of the vocabulary, in order; with it this is a collective.
        softcap: of a family whose logits are softcap · tanh(logits / softcap).
        ids: [n, k] int64, further tokens whose logprobs are asked for.
        teacher: whose divergence is asked for; neither with `ids` nor with `group`.

    Returns:
        Two [n] float32 tensors, with gradients to `hidden` and `weight`. With `ids` [n, k] logprobs besides, with a
        gradient; with a teacher three [n]: the divergence, with a gradient, the teacher's probability of its likeliest
        token, and that token.
    """
    given = ids if ids is not None else targets.new_empty(len(targets), 0)
    found = _Logprobs.apply(hidden, weight, targets, temperature, group, softcap, given, teacher)  # type: ignore[no-untyped-call]
    return tuple(found[:2]) if ids is None and teacher is None else tuple(found)
