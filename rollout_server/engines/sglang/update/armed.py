"""What an armed update decides in a scheduler, between two of its forwards: whether decoding goes on.

The order has the digests of the version. All ranks of an engine get it in the same iteration, for rank 0 broadcasts
what it receives. They exchange what they hold, so that all find the same, and decode on together or not at all.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch

from rollout_server.engines.sglang.update.orders import added_up

scheduler: Any = None
"""SGLang's, of this process; its loop looks at `_engine_paused` before each forward (0.5.15 to 0.5.21)."""


def tokens() -> dict[str, int]:
    """How many each request has that may sample more."""
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    return {its.rid: len(its.output_ids) for its in itertools.chain(*batches, scheduler.waiting_queue, chunked)}


def goes_on(request: Mapping[str, Any], slices: Sequence[Any]) -> bool:
    """Decode on if all ranks hold the digests of the request, of which `slices` are here; whether they do.

    Without digests in the request they are compared elsewhere.
    """
    expected = request["expected"]
    proven = bool(expected)
    if expected:
        proven = added_up(_of_all(slices), request["tensors"], request["base"], request["lora"]) == expected
    scheduler._engine_paused = not proven
    return proven


def _of_all(own: Sequence[Any]) -> list[Sequence[Any]]:
    """What each rank of the engine holds."""
    group = scheduler.tp_cpu_group
    count = group.size()
    if count == 1:
        return [own]
    packed = msgpack.packb(own)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    group.allgather([sizes], [torch.tensor([len(packed)])]).wait()
    longest = max(int(size) for size in sizes)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    padded = torch.frombuffer(bytearray(packed.ljust(longest, b"\0")), dtype=torch.uint8)
    group.allgather([found], [padded]).wait()
    return [msgpack.unpackb(one.numpy().data[: int(size)]) for one, size in zip(found, sizes, strict=True)]
