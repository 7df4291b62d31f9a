"""Experts divided over a mesh dimension: each token goes to the ranks that have its experts, and comes back.

Every rank has a block of the experts of each layer, and rows of its own. What a token's experts made returns to the
token's rank, so the gradient of a block is already the sum over the rows of all ranks of the group. Ranks exchange in
every layer of every row, also where one of them has no token to give (invariant 9).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner.policy.moe.sorting import Gathered, by_expert


class Exchange:
    """Of the layers of a model, among ranks of one group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()

    # sizes are read by the host, and experts are an FSDP unit of their own
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Tensor, weights: Tensor, ends: Tensor
    ) -> Tensor:
        """As `experts`, which has this rank's block alone, for tokens [S, H] of all experts."""
        wanted = ends.long().diff(prepend=ends.new_zeros(1))
        asked = torch.empty_like(wanted)
        dist.all_to_all_single(asked, wanted, group=self._group)
        sends, receives = torch.stack([wanted, asked]).view(2, self._ranks, -1).sum(dim=2).tolist()
        local = len(ends) // self._ranks
        # what arrives is sorted by rank, then by expert
        ids = torch.arange(local, device=tokens.device).repeat(self._ranks)
        ids = ids.repeat_interleave(asked, output_size=sum(receives))
        order, places, local_ends = by_expert(ids, local)
        arrived = Sent.apply(tokens, sends, receives, self._group)  # type: ignore[no-untyped-call]
        arrived_weights = Sent.apply(weights[:, None], sends, receives, self._group)  # type: ignore[no-untyped-call]
        made = experts(
            Gathered.apply(arrived, order, places, 1),  # type: ignore[no-untyped-call]
            Gathered.apply(arrived_weights, order, places, 1)[:, 0],  # type: ignore[no-untyped-call]
            local_ends,
        )
        made = Gathered.apply(made, places, order, 1)  # type: ignore[no-untyped-call]
        returned: Tensor = Sent.apply(made, receives, sends, self._group)  # type: ignore[no-untyped-call]
        return returned


class Sent(torch.autograd.Function):
    """Rows to the ranks of a group, `sends[r]` of them to rank r; those that arrive, by rank. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), receives, sends, group=group)
    return found
