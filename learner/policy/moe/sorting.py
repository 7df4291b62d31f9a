"""Choices sorted by expert, and hidden states that go along and come back.

Nothing adds up by atomics: the way back of each gather is a gather and a sum over k, so a batch gives the same bits
again.
"""

from typing import Any

import torch
from torch import Tensor


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """How choices [S] are sorted by expert.

    Returns:
        [S] which choice stands at each place, [S] the place of each choice, and [E] int32 where each expert's end.
    """
    ids, order = experts.to(torch.int16).sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, device=order.device, dtype=torch.int16)
    return order, places, torch.searchsorted(ids, numbers, right=True, out_int32=True)


class Gathered(torch.autograd.Function):
    """[S, H], the token of each choice where the choice stands; k choices a token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return tokens[order // k]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _added_up(grads[0], places, ctx.k), None, None, None


class Summed(torch.autograd.Function):
    """[T, H], the sum of what a token's k choices have made: the way back of Gathered."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _added_up(made, places, k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0][order // ctx.k], None, None, None


def _added_up(rows: Tensor, places: Tensor, k: int) -> Tensor:
    """[T, H], the sum of the k rows of each token, in float32.

    Written out, for the compiler makes one pass of this; a sum over a dimension of k is a reduction to it, which reads
    rows at a sixth of the memory's bandwidth.
    """
    first, *others = places.view(-1, k).unbind(1)
    if not others:
        return rows[first]
    total = rows[first].to(torch.promote_types(rows.dtype, torch.float32))
    for place in others:
        total = total + rows[place]
    return total.to(rows.dtype)
