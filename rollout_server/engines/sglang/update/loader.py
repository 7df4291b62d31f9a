"""Runs inside each scheduler of SGLang (ServerArgs.custom_weight_loader): loads an update and digests what is live.

SGLang calls `apply(model, named_tensors)` between two forwards; what to do stands in the staging folder (orders.py).
The digest is computed in place on the tensors that the next forward reads, so equal digests prove staging, mapping,
fusion and slicing at once.
"""

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch

from rollout_server.engines.sglang.update import armed, receiver
from rollout_server.engines.sglang.update.adapted import AdaptedWeights
from rollout_server.engines.sglang.update.live import RankWeights, check_addresses, synchronize
from rollout_server.engines.sglang.update.orders import CUDA_HANDLE, FOLDER, PROOF, REPLY, REQUEST, in_bytes, replace
from slipstream.families.table import adopt
from weight_bus.staging import DTYPES

_mapped: dict[int, tuple[dict[str, Any], torch.Tensor]] = {}
"""Memory of other processes that this one has mapped, by its number, with what describes it."""
_weights: RankWeights | AdaptedWeights | None = None
_staged: tuple[list[Any], list[torch.Tensor], list[tuple[str, torch.Tensor]]] = ([], [], [])
"""The last update: what names its tensors and their memory, the memory itself, and the tensors."""


def apply(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out the request in the staging folder and leave a reply; `named_tensors` is empty.

    After a load decoding goes on until it is found not to be proven (armed.py). An exception here would end the
    scheduler: what goes wrong stands in the reply, and quarantines this engine.
    """
    armed.settle()
    began = time.monotonic()
    folder = Path(os.environ[FOLDER])
    rank = torch.distributed.get_rank()
    request = msgpack.unpackb((folder / REQUEST).read_bytes())
    reply: dict[str, Any] = {"sequence": request["sequence"], "error": "", "slices": [], "seconds": {}}
    loads = request["load"]
    if loads:
        reply["tokens"] = armed.tokens()
    try:
        reply |= _carried_out(model, request, rank)
    except Exception as error:  # noqa: BLE001  # the edge of our code inside a process that is not ours
        reply["error"] = f"{type(error).__name__}: {error}"
    if loads and request["expected"] and reply["tokens"]:  # the same on all ranks, whatever has gone wrong on one
        reply["proven"] = None
        path = folder / PROOF.format(rank=rank, **request)
        armed.prove_beside(armed.Proof(request, path, partial(_live, reply["error"])))
    elif "receive" not in request:
        _digested(reply)
        if loads:
            reply["proven"] = armed.goes_on(request, reply["slices"])
    if loads:
        reply["stood"] = [began, time.monotonic()]
    replace(folder / f"{REPLY}.{rank}.msgpack", reply)


def _carried_out(model: Any, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of a load."""
    if "receive" in request:
        order = request["receive"]
        receiver.start({**order, "socket": order["sockets"][rank]}, next(model.parameters()).device)
        return {}
    started, load_s = time.monotonic(), 0.0
    sliced = request.get("slices")
    tensors = _tensors({**request, **(sliced[rank] if sliced else {})}, rank) if request["load"] else []
    weights = _weights_of(model, request)
    synchronize()  # a forward that was launched before still reads the old weights
    waited = time.monotonic()
    if request["load"] and sliced:
        assert isinstance(weights, RankWeights), "adapters come whole"
        load_s = weights.load_slices(tensors, sliced[rank]["starts"])
    elif request["load"]:
        load_s = weights.load(tensors)
    return {"seconds": {"wait": waited - started, "load": load_s}}


def _digested(reply: dict[str, Any]) -> None:
    """Add to a reply what is live, if all went well so far."""
    began = time.monotonic()
    try:
        reply["slices"] = _live(reply["error"])
    except Exception as error:  # noqa: BLE001  # as above
        reply["error"] = reply["error"] or f"{type(error).__name__}: {error}"
    reply["seconds"]["digest"] = time.monotonic() - began


def _live(error: str) -> list[Any]:
    """[name, start, elements, digest] of what this rank holds. Raises RuntimeError: the load before has failed."""
    if error or _weights is None:
        raise RuntimeError(error)
    return [[name, list(start), count, digest] for name, start, count, digest in _weights.digests()]


def _weights_of(model: Any, request: dict[str, Any]) -> RankWeights | AdaptedWeights:
    """What is loaded into: updates are whole tensors, or adapters. The same as the last time while it holds."""
    global _weights
    lora = request["lora"]
    shapes = [(name, tuple(shape)) for name, shape in request["base"]]
    if not lora:
        shapes = [(name, tuple(shape)) for name, _, shape, _, _ in request["tensors"]]
    if _weights is None and request["family"]:
        adopt(request["family"])
    if _weights is None or not _weights.are_of(model, shapes, lora):
        check_addresses(model)
        _weights = AdaptedWeights(model, shapes, lora) if lora else RankWeights(model, shapes)
    return _weights


def _tensors(request: dict[str, Any], rank: int) -> list[tuple[str, torch.Tensor]]:
    """Names and whole tensors of an update; the same list while memory is unchanged."""
    global _staged
    memory = [_map(number, described, rank) for number, described in enumerate(request["memory"])]
    key = [request["tensors"], *map(id, memory)]
    if _staged[0] != key:
        tensors = []
        for name, dtype, shape, number, offset in request["tensors"]:
            kind = DTYPES[dtype]
            size = math.prod(shape) * kind.itemsize
            tensors.append((name, memory[number][offset : offset + size].view(kind).view(shape)))
        _staged = (key, memory, tensors)
    return _staged[2]


def _map(number: int, described: dict[str, Any], rank: int) -> torch.Tensor:
    """Flat uint8 over memory of the server or rank 0, kept while requests name it."""
    if described["kind"] == "staged":
        if rank == 0 or described["cuda"] is None:  # a process cannot open its own handles, and has no other's to
            return receiver.bucket(number, described["take"])
        described = {"kind": "cuda", **in_bytes(described["cuda"])}
    known = _mapped.get(number)
    if known is not None and known[0] == described:
        return known[1]
    if described["kind"] == "cuda":
        storage = torch.UntypedStorage._new_shared_cuda(*(described[field] for field in CUDA_HANDLE))
        flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", described["device"])).set_(storage)
    else:
        flat = torch.from_file(described["path"], shared=True, size=described["size"], dtype=torch.uint8)
    _mapped[number] = (described, flat)
    return flat
