"""Digests of logical tensors from the boxes that ranks hold, without a gather."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from configs.errors import SlipstreamError
from learner.layout.layout import Shard, carrier
from weight_bus.digest import Digester, TensorSlice

MASK = (1 << 64) - 1


class CopiesDiffer(SlipstreamError, RuntimeError, code="SLIP-LEARN-04"):
    """Ranks that hold the same part of a tensor hold other bits; names the tensor."""


def digester(shards: Iterable[Shard], dtype: torch.dtype) -> Digester:
    """For the local boxes of shards whose memory stays where it is."""
    return Digester(TensorSlice(s.local, s.shape, s.start, dtype) for s in shards)


def digests(
    shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup, made: Digester | None = None
) -> dict[str, int]:
    """slice_digest of each whole tensor in `dtype`, from the local blocks and one all_reduce. A collective.

    `group` is of all ranks, `made` is `digester(shards, dtype)` of an earlier call.

    The sum is modulo 2^64, and a collective promises nothing about overflow: the two halves travel as int64
    of 32 bits each, which cannot overflow below 2^31 ranks. Of what several ranks hold one counts, and the sum over
    all of them shows whether they hold the same.

    Raises:
        CopiesDiffer: they do not; on all ranks.
    """
    sums = (made or digester(shards, dtype)).launch().sums()
    counted = [own if shard.counts else 0 for shard, own in zip(shards, sums, strict=True)]
    columns = [counted, sums] if any(shard.copies > 1 for shard in shards) else [sums]
    halves = [[half for own in row for half in (own >> 32, own & 0xFFFFFFFF)] for row in zip(*columns, strict=True)]
    totals = torch.tensor(halves, dtype=torch.int64).to(carrier(shards[0].local, group))
    dist.all_reduce(totals, group=group)
    found = {}
    for shard, (high, low, *everywhere) in zip(shards, totals.tolist(), strict=True):
        found[shard.name] = ((high << 32) + low) & MASK
        if everywhere and ((everywhere[0] << 32) + everywhere[1] - shard.copies * found[shard.name]) & MASK:
            raise CopiesDiffer(
                f"{shard.name}: the {shard.copies} copies that learner ranks hold are no longer equal, so a device or a"
                " collective gave ranks different bits; go on from the newest checkpoint"
            )
    return found
