"""A toy model whose parameters lie on meshes of every kind, over four gloo ranks, and what each rank sees of it.

torch itself divides whole values (fully_shard, distribute_tensor), so boxes that are read wrongly show. Without
transformers: four processes start in two seconds. tests/learner/test_layout.py looks at what they write.
"""

import itertools
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor import distribute_tensor

from configs.learner import Mesh
from learner.layout import (
    Box,
    CopiesDiffer,
    Inner,
    Layout,
    Shard,
    Spreader,
    as_it_is,
    digester,
    digests,
    gather,
    gather_pieces,
    gathering,
    local_of,
    slice_digests,
    slice_shards,
    spreading,
)
from learner.policy.meshes import make_meshes
from weight_bus import lanes as bus_lanes
from weight_bus.digest import combined, slice_digest
from weight_bus.lanes import Slice, plan_lanes
from weight_bus.manifest import NOTHING
from weight_bus.staging import NAMES

RANKS, EXPERTS, LR = 4, 4, 0.5
CASES = ("shard_2", "tensor", "expert", "shard_3", "replicate", "expert_again", "shard_1", "both", "shard_4")
"""Each takes up the checkpoint of the one before."""
SHAPES = {
    "embed": (9, 5),
    "up": (10, 5),
    "down": (5, 10),
    "norm": (5,),
    "turned": (2, 5, 6),
    "experts.gate_up": (EXPERTS, 6, 5),
    "experts.down": (EXPERTS, 5, 3),
}
"""Rows that ranks share unevenly, experts in one parameter, and tensors that lie transposed in theirs."""


def inside(name: str, shape: tuple[int, ...]) -> list[Inner]:
    """Logical tensors: of each expert its gate, up and down."""
    if name == "experts.gate_up":
        half = shape[1] // 2
        parts = [(f"experts.{e}.{part}", (e, first, 0)) for e in range(EXPERTS) for part, first in HALVES.items()]
        return [Inner(part, Box(at, (1, half, shape[2])), 2) for part, at in parts]
    if name in ("experts.down", "turned"):
        boxes = [Box((number, 0, 0), (1, *shape[1:])) for number in range(shape[0])]
        return [Inner(f"{name}.{n}", box, 2, transposed=name == "turned") for n, box in enumerate(boxes)]
    return as_it_is(name, shape)


HALVES = {"gate": 0, "up": 3}


def values(seed: int) -> dict[str, Tensor]:
    """Whole parameters."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def logical(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole logical tensors."""
    named = [(one, tensor) for name, tensor in whole.items() for one in inside(name, tuple(tensor.shape))]
    return {one.name: one.view(tensor, Box.whole(tensor.shape)) for one, tensor in named}


class Place(NamedTuple):
    """Meshes of a case."""

    data: DeviceMesh
    group: dist.ProcessGroup
    tensor: DeviceMesh | None = None
    replica: dist.ProcessGroup | None = None
    expert: DeviceMesh | None = None
    expert_shard: DeviceMesh | None = None


def places() -> dict[str, Place]:
    """Of all cases; None of one that this rank takes no part in. A collective of all ranks."""
    made, everyone = {}, dist.group.WORLD
    assert everyone is not None
    for ranks in range(1, RANKS + 1):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if dist.get_rank() < ranks:
            made[f"shard_{ranks}"] = Place(mesh, mesh.get_group())
    for name, sizes in {
        "tensor": {"tensor": 2},
        "replicate": {"replicate": 2},
        "both": {"replicate": 2, "tensor": 2},
    }.items():
        meshes = make_meshes(Mesh(**sizes), torch.device("cpu"), timedelta(seconds=60))
        made[name] = Place(meshes.data, meshes.group, meshes.tensor, meshes.replica)
    of_experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_shard", "expert"))
    for name in ("expert", "expert_again"):
        made[name] = Place(made["shard_4"].data, everyone, None, None, of_experts["expert"], of_experts["expert_shard"])
    return made


def placed(whole: Mapping[str, Tensor], place: Place) -> dict[str, Tensor]:
    """Parameters as FSDP2 leaves them, with tensor and expert ranks before it."""
    toy = nn.ParameterDict(
        {name: nn.Parameter(t.clone()) for name, t in whole.items() if not name.startswith("experts.")}
    )
    own = {name.partition(".")[2]: nn.Parameter(t.clone()) for name, t in whole.items() if name.startswith("experts.")}
    experts = nn.ParameterDict(own)
    if place.tensor is not None:
        for name, dim in (("up", 0), ("down", 1)):
            toy[name] = nn.Parameter(distribute_tensor(toy[name], place.tensor, [Sharded(dim)], src_data_rank=None))
    if place.expert is not None:
        for name, parameter in list(experts.items()):
            experts[name] = nn.Parameter(distribute_tensor(parameter, place.expert, [Sharded(0)], src_data_rank=None))
    fully_shard(experts, mesh=place.data if place.expert_shard is None else place.expert_shard)
    fully_shard(toy, mesh=place.data)
    named = {**dict(toy.named_parameters()), **{f"experts.{name}": p for name, p in experts.named_parameters()}}
    return {name: named[name].detach() for name in whole}


def local(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_of(parameter) for name, parameter in parameters.items()}


def observe(place: Place, folder: Path) -> dict[str, Any]:
    """Digests, gathers, norm and a step of AdamW, each against the whole; a checkpoint of it."""
    whole, gradients, group = values(0), values(1), place.group
    parameters, gradient = placed(whole, place), local(placed(gradients, place))
    layout = Layout.gathered(parameters.items(), group, inside)
    shards = layout.shards(local(parameters))
    expected = logical(whole)
    assert layout.names == [shard.name for shard in shards] == list(expected)
    for dtype in (torch.float32, torch.bfloat16):
        found = digests(shards, dtype, group)
        assert found == {name: slice_digest(tensor.to(dtype)) for name, tensor in expected.items()}
        for ranks in filter(None, (group, place.replica)):
            assert_same(dict(gather(layout, shards, dtype, ranks)), expected, dtype)
            last = dist.get_world_size(ranks) - 1
            given = {n: pieces.whole() for n, pieces in gather_pieces(layout, shards, dtype, ranks, only=last)}
            assert_same(given, expected if dist.get_rank(ranks) == last else {}, dtype)
            for positions in (1, 2, 3):
                check_lanes(layout, shards, expected, dtype, ranks, group, positions)
    total = layout.squared_norm(gradient)
    dist.all_reduce(total, group=group)
    norm = float(total.sqrt())
    masters = local(parameters)
    adamw = torch.optim.AdamW(list(masters.values()), lr=LR)
    for name, master in masters.items():
        master.grad = gradient[name] / norm
    adamw.step()
    moments = {name: adamw.state[master]["exp_avg_sq"] for name, master in masters.items()}
    stepped = {"parameters": layout.shards(masters), "moments": layout.shards(moments)}
    made = {kind: dict(gather(layout, its, torch.float32, group)) for kind, its in stepped.items()}
    dcp_save(parameters, checkpoint_id=folder, process_group=group)
    digest = combined(digests(layout.shards(masters), torch.float32, group))
    if place.replica is not None and dist.get_rank(group) == RANKS - 1:
        masters["norm"] += 1
    drifted = ""
    try:
        digests(layout.shards(masters), torch.float32, group)
    except CopiesDiffer as error:
        drifted = str(error)
    return {
        "norm": norm,
        "stepped": {kind: {name: tensor.tolist() for name, tensor in of.items()} for kind, of in made.items()},
        "digest": digest,
        "drifted": drifted,
        "sends": sum(shard.local.numel() for shard in shards if shard.counts),
    }


def check_lanes(
    layout: Layout,
    shards: list[Shard],
    expected: Mapping[str, Tensor],
    dtype: torch.dtype,
    ranks: dist.ProcessGroup,
    group: dist.ProcessGroup,
    positions: int,
) -> None:
    """Each sender packs the slices of its lanes and no more; their digests are those of the wholes' slices."""
    wanted: list[list[Slice]] = [[] for _ in range(positions)]
    for number, (name, tensor) in enumerate(expected.items()):
        size = -(-tensor.shape[-1] // positions)  # of the last dimension; every third is a copy on each
        for position, slices in enumerate(wanted):
            whole = bus_lanes.whole(name, NAMES[dtype], tensor.shape)
            start, end = min(position * size, tensor.shape[-1]), min((position + 1) * size, tensor.shape[-1])
            cut = whole._replace(start=(*whole.start[:-1], start), shape=(*whole.shape[:-1], end - start))
            slices.append(whole if number % 3 == 0 or positions == 1 else cut)
    lanes = plan_lanes([[one for one in each if one.num_bytes] for each in wanted], dist.get_world_size(ranks), 300)
    mine = bus_lanes.joined([one.layout for one in lanes if one.sender == dist.get_rank(ranks)] or [NOTHING.layout])
    packed = list(Spreader(layout, lanes, ranks, on_gpu=False).pieces(shards, dtype))
    for entry, (name, pieces) in zip(mine.layout.entries, packed, strict=True):
        part = expected[name][Box(entry.start, entry.shape).slices]
        assert (entry.name, entry.shape) == (name, pieces.shape) and torch.equal(pieces.whole(), part.to(dtype))
    keys, slices = slice_shards(shards, lanes)
    found, wholes = slice_digests(keys, slices, dtype, group, digester(slices, dtype))
    assert wholes == {name: slice_digest(tensor.to(dtype)) for name, tensor in expected.items()}
    for entry in (entry for lane in lanes for entry in lane.layout.entries):
        part = expected[entry.name][Box(entry.start, entry.shape).slices].to(dtype)
        assert found[entry.name, entry.start] == slice_digest(part, entry.whole, entry.start)


def resumed(place: Place, folder: Path) -> str:
    """The digest of another case's checkpoint."""
    parameters = placed(values(2), place)
    dcp_load(parameters, checkpoint_id=folder, process_group=place.group)
    layout = Layout.gathered(parameters.items(), place.group, inside)
    return combined(digests(layout.shards(local(parameters)), torch.float32, place.group))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in expected.items())


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    gathering.GATHER_BYTES = spreading.GATHER_BYTES = 1000  # several spans
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    made = places()
    seen: dict[str, Any] = {name: observe(place, folder / name) for name, place in made.items()}
    for other, name in itertools.pairwise([*CASES, CASES[0]]):
        if (place := made.get(name)) is not None:
            dist.barrier(place.group)  # another group has written it
            seen[name]["resumed"] = resumed(place, folder / other)
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # as two_ranks.py does


if __name__ == "__main__":
    main()
