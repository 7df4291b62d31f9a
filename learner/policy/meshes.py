"""Meshes of learner ranks: replicate x shard x tensor, the last fastest; for experts replicate x shard x expert.

    tensor     ranks of a node that divide every layer: heads, columns of the MLP, the vocabulary
    shard      ranks with rows of their own, over which FSDP2 shards
    replicate  copies of all that, whose gradients are added up (HSDP)
    expert     ranks with rows of their own that divide the experts; what is left of `shard` shards a block of them

Ranks that differ in `tensor` only compute the same rows: they hold the same part of a batch.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.learner import Mesh

DIMS = ("replicate", "shard", "tensor")
"""Of the device mesh that parameters are placed on."""
EXPERT_DIMS = ("replicate", "shard", "expert")
"""Of that of experts, where ranks divide them."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The groups of this rank; as a whole it stands for a one-dimensional mesh."""

    group: dist.ProcessGroup
    """All ranks that train the model."""
    replica: dist.ProcessGroup
    """Those that hold one copy of it together."""
    data: DeviceMesh
    """What FSDP2 shards over: one dimension, or `replicate` and `shard`."""
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    """Ranks that divide the experts among them."""
    experts: DeviceMesh | None = None
    """What FSDP2 shards a block of experts over, as `data`."""

    @classmethod
    def flat(cls, mesh: DeviceMesh) -> "Meshes":
        """Of ranks that shard and do nothing else."""
        group = mesh.get_group()
        return cls(group, group, mesh)

    def get_group(self) -> dist.ProcessGroup:
        return self.group

    def get_local_rank(self) -> int:
        return dist.get_rank(self.group)

    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.size() // dist.get_world_size(self.replica)

    @property
    def tensor_ranks(self) -> int:
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def tensor_rank(self) -> int:
        return 0 if self.tensor is None else self.tensor.get_local_rank()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that compute the same rows."""
        return self.tensor_rank == 0

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank is of the copy that is digested, published and written."""
        return self.get_local_rank() < dist.get_world_size(self.replica)


def make_meshes(sizes: Mesh, device: torch.device, timeout: timedelta) -> Meshes | DeviceMesh:
    """The groups of all ranks; a plain mesh where ranks only shard. A collective.

    `timeout` is that of the collectives of each group, which a new group does not take over from the default one.
    """
    world_size = dist.get_world_size()
    if sizes == Mesh():
        return init_device_mesh(device.type, (world_size,))
    shards = world_size // (sizes.replicate * sizes.tensor)
    ranks = torch.arange(world_size).view(sizes.replicate, shards, sizes.tensor)
    base, sharding = _mesh(ranks, DIMS, device, timeout), ("replicate", "shard") if sizes.replicate > 1 else "shard"
    apart = None
    if sizes.expert > 1:
        apart = _mesh(ranks.view(sizes.replicate, -1, sizes.expert), EXPERT_DIMS, device, timeout)
    everyone = dist.group.WORLD
    assert everyone is not None
    return Meshes(
        group=everyone,
        replica=_along(ranks.view(sizes.replicate, -1), 1, timeout) if sizes.replicate > 1 else everyone,
        data=base[sharding],
        tensor=base["tensor"] if sizes.tensor > 1 else None,
        expert=apart and apart["expert"],
        experts=apart and apart[sharding],
    )


def _mesh(ranks: torch.Tensor, names: tuple[str, ...], device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Of ranks in these dimensions; those of size 1 are left out, but for `shard`."""
    kept = {name: dim for dim, name in enumerate(names) if name == "shard" or ranks.shape[dim] > 1}
    groups = [_along(ranks, dim, timeout) for dim in kept.values()]
    shape = [ranks.shape[dim] for dim in kept.values()]
    return DeviceMesh.from_group(groups, device.type, ranks.view(shape), mesh_dim_names=tuple(kept))


def _along(ranks: torch.Tensor, dim: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group of those that differ in one dimension only.

    Example: of 8 ranks as [2, 2, 2] along 1: [0, 2], [1, 3], [4, 6] and [5, 7] are groups.
    """
    members = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)  # type: ignore[no-untyped-call]
    return group


def meshes_of(mesh: DeviceMesh | Meshes) -> Meshes:
    """The groups of a mesh; one of a single dimension shards."""
    return mesh if isinstance(mesh, Meshes) else Meshes.flat(mesh)
