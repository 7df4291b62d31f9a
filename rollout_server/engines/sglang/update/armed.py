"""What an armed update decides in a scheduler: whether decoding goes on.

The order has the digests of the version. Where requests run, one forward is launched with the new weights and digests
are taken beside it; before the next one they are compared. Otherwise they are compared at once. All ranks of an engine
get the order in the same iteration, for rank 0 broadcasts what it receives. They exchange what they hold, so that all
find the same, and decode on together or not at all.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from rollout_server.engines.sglang.update.orders import added_up, replace

scheduler: Any = None
"""SGLang's, of this process."""
PAUSED = "_engine_paused"
"""What its loop looks at before each forward, once the iteration's orders are carried out (0.5.15 to 0.5.21)."""


@dataclass(slots=True)
class Proof:
    """What is live is to be proven beside a forward."""

    request: Mapping[str, Any]
    path: Path
    """Of the file that the server waits for."""
    digests: Callable[[], list[Any]]
    beside: bool = False
    """That forward has been let through."""


_due: Proof | None = None


def watch(kind: type) -> None:
    """Have what is due settled where the loop of this class of schedulers looks whether it may go on."""

    def paused(self: Any) -> bool:
        if _due is not None and self is scheduler:
            if _due.beside:
                settle()
            else:
                _due.beside = True
        stands: bool = vars(self)[PAUSED]
        return stands

    setattr(kind, PAUSED, property(paused, lambda self, stands: vars(self).update({PAUSED: stands})))


def prove_beside(proof: Proof) -> None:
    """Let one forward through, and settle this before the next one."""
    global _due
    _due = proof


def settle() -> None:
    """Compare what is due, if anything is, and leave the result; what went wrong stands there as well."""
    global _due
    due, _due = _due, None
    if due is None:
        return
    began, found, error = time.monotonic(), list[Any](), ""
    try:
        found = due.digests()
    except Exception as failed:  # noqa: BLE001  # the edge of our code inside a process that is not ours
        error = f"{type(failed).__name__}: {failed}"
    proof = {"slices": found, "error": error, "proven": goes_on(due.request, found)}
    proof |= {"sequence": due.request["sequence"], "settled_s": time.monotonic() - began}
    replace(due.path, proof)


def tokens() -> dict[str, int]:
    """How many each request has that may sample more."""
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    known = itertools.chain(*batches, scheduler.waiting_queue, chunked)
    return {its.rid: len(its.output_ids) for its in known if its.finished_reason is None}


def goes_on(request: Mapping[str, Any], slices: Sequence[Any]) -> bool:
    """Decode on if all ranks hold the digests of the request, of which `slices` are here; whether they do.

    Without digests in the request they are compared elsewhere.
    """
    expected = request["expected"]
    proven = bool(expected)
    if expected:
        proven = added_up(_of_all(slices), request["tensors"], request["base"], request["lora"]) == expected
    setattr(scheduler, PAUSED, not proven)
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
