"""Runs inside each scheduler of SGLang (ServerArgs.custom_weight_loader): loads an update and digests what is live.

SGLang calls `apply(model, named_tensors)` between two forwards; what to do stands in the staging folder
(rollout_server/engines/sglang/staging.py). The digest is computed in place on the tensors that the next forward reads,
so equal digests prove staging, mapping, fusion and slicing at once.
"""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import torch

from rollout_server.engines.sglang.layout import live_slices
from rollout_server.engines.sglang.staging import CUDA_HANDLE, FOLDER, REQUEST
from weight_bus.digest import Part, slice_digests
from weight_bus.staging import DTYPES

_mapped: dict[str, tuple[Any, torch.Tensor]] = {}
"""Memory of the server that this process has mapped, by what names it, with its key."""


def apply(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out the request in the staging folder and leave a reply; `named_tensors` is empty.

    It raises nothing: an exception here would end the scheduler. What goes wrong stands in the reply, and the server
    then quarantines this engine.
    """
    folder = Path(os.environ[FOLDER])
    rank = torch.distributed.get_rank()
    request = msgpack.unpackb((folder / REQUEST).read_bytes())
    reply: dict[str, Any] = {"sequence": request["sequence"], "error": "", "slices": [], "seconds": {}}
    try:
        _carry_out(model, request, reply)
    except Exception as error:  # noqa: BLE001  # the edge of our code inside a process that is not ours
        reply["error"] = f"{type(error).__name__}: {error}"
    part = folder / f"reply.{rank}.part"
    part.write_bytes(msgpack.packb(reply))
    part.replace(folder / f"reply.{rank}.msgpack")


def _carry_out(model: Any, request: dict[str, Any], reply: dict[str, Any]) -> None:
    started = time.monotonic()
    _synchronize()  # a forward that was launched before the pause still reads the old weights
    waited = time.monotonic()
    if request["load"]:
        with torch.no_grad():
            model.load_weights(_tensors(request))
        _synchronize()
    loaded = time.monotonic()
    shapes = [(name, tuple(shape)) for name, _, shape, _, _ in request["tensors"]]
    slices = list(live_slices(model, shapes))
    digests = slice_digests(Part(piece.view, piece.full_shape, piece.start) for piece in slices)
    reply["slices"] = [
        [piece.name, list(piece.start), piece.view.numel(), digest]
        for piece, digest in zip(slices, digests, strict=True)
    ]
    reply["seconds"] = {"wait": waited - started, "load": loaded - waited, "digest": time.monotonic() - loaded}


def _tensors(request: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    memory = [_map(number, described) for number, described in enumerate(request["memory"])]
    for name, dtype, shape, number, offset in request["tensors"]:
        kind = DTYPES[dtype]
        yield name, memory[number][offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def _map(number: int, described: dict[str, Any]) -> torch.Tensor:
    """Flat uint8 over memory of the server; stays mapped until its place in the request names other memory."""
    key = tuple(sorted(described.items()))
    known = _mapped.get(f"{number}")
    if known is not None and known[0] == key:
        return known[1]
    if described["kind"] == "cuda":
        storage = torch.UntypedStorage._new_shared_cuda(*(described[field] for field in CUDA_HANDLE))
        flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", described["device"])).set_(storage)
    else:
        flat = torch.from_file(described["path"], shared=True, size=described["size"], dtype=torch.uint8)
    _mapped[f"{number}"] = (key, flat)
    return flat


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
