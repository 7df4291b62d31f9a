"""Triton kernels over float32 logits: one for logprob and entropy, one for gradients.

The reference in plain torch stands in learner/policy/logprobs.py. Each program owns a row, so results do not depend on
how rows are cut into chunks, and nothing is added up across programs. Logits are scaled by 1/temperature as they are
read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, targets, logprobs, entropies, normalizers, stride, vocabulary, scale_by, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    lane = tl.arange(0, BLOCK)
    # running maximum, sum of exp(x - maximum) and of exp(x - maximum) (x - maximum), lane by lane
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        inside = begin + lane < vocabulary
        x = tl.load(source + begin + lane, mask=inside, other=float("-inf")) * scale_by
        above = tl.maximum(highest, x)
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - base))
        moved = tl.where(highest == float("-inf"), 0.0, highest - base)
        e = tl.where(inside, tl.exp(x - base), 0.0)
        weighted = shrink * (weighted + total * moved) + tl.where(e > 0, e * (x - base), 0.0)
        total = shrink * total + e
        highest = above
    top = tl.max(highest, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest - top)
    scale = tl.where(highest == float("-inf"), 0.0, tl.exp(shift))
    mass = tl.sum(scale * total, axis=0)
    mean = tl.sum(scale * (weighted + total * shift), axis=0) / mass
    spread = tl.log(mass)
    target = tl.load(source + tl.load(targets + row)) * scale_by
    tl.store(logprobs + row, (target - top) - spread)
    tl.store(entropies + row, spread - mean)
    tl.store(normalizers + row, top + spread)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, grads, targets, normalizers, entropies, of_logprobs, totals, of_entropies, stride, vocabulary, scale_by,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < vocabulary
    log_p = tl.load(source + lane, mask=inside, other=float("-inf")) * scale_by - tl.load(normalizers + row)
    p = tl.exp(log_p)
    grad = tl.where(lane == tl.load(targets + row), tl.load(of_logprobs + row), 0.0) - tl.load(totals + row) * p
    if WITH_ENTROPY:
        inner = tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
        grad -= tl.load(of_entropies + row) * inner
    tl.store(grads + row * vocabulary + lane, (grad * scale_by).to(grads.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, entropy and log-sum-exp of each row.

    Args:
        logits: [n, V] float32 on a CUDA device, rows contiguous, not yet divided by the temperature.
        targets: [n] int64.

    Returns:
        Three [n] float32 tensors.
    """
    found = torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device)
    if len(logits):
        _statistics[(len(logits),)](
            logits, targets, *found, logits.stride(0), logits.shape[1], 1 / temperature, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip
    return found[0], found[1], found[2]


def gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor | None,
    total: Tensor | None,
    of_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """[n, V] gradient of the logits in `dtype`; see learner.policy.logprobs for the formula.

    `total` is of the logprobs of all tokens that have one, the target among them.
    """
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    upstream = torch.zeros_like(normalizer) if of_logprobs is None else of_logprobs.contiguous()
    totals = upstream if total is of_logprobs else total.contiguous()  # type: ignore[union-attr]
    of_entropies = of_entropy.contiguous() if of_entropy is not None else upstream
    grads = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if len(logits):
        _gradient[grid](
            logits, grads, targets, normalizer.contiguous(), entropy.contiguous(), upstream, totals, of_entropies,
            logits.stride(0), logits.shape[1], 1 / temperature,
            WITH_ENTROPY=of_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return grads
