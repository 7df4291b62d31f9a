"""Parts of a checkpoint: weights of a model and moments of its optimizer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from learner.checkpoints.folders import CheckpointError
from learner.optimizer import MOMENTS, Optimizer
from learner.policy.model import Policy
from learner.policy.sharding import Shard, digests
from weight_bus.digest import combined


@dataclass(frozen=True, slots=True)
class Part:
    """A sharded model and its optimizer."""

    policy: Policy
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Tensors:
    """This rank's rows of a part, float32, where they live or in host memory."""

    weights: list[Shard]
    moments: dict[str, list[Shard]]
    """By kind (one of MOMENTS)."""
    num_steps: int
    """Updates that the optimizer has applied."""

    def keyed(self) -> Iterator[tuple[str, Shard]]:
        """By the names that dcp/ has for them."""
        for shard in self.weights:
            yield f"model.{shard.name}", shard
        for kind, shards in self.moments.items():
            for shard in shards:
                yield f"optimizer.{kind}.{shard.name}", shard


def tensors_of(part: Part) -> Tensors:
    """The tensors in training, sharing memory."""
    moments = {kind: part.optimizer.moments(kind) for kind in MOMENTS}
    return Tensors(part.policy.shards(), moments, part.optimizer.num_steps)


class HostMemory:
    """Copies of tensors in host memory, pinned beside a GPU. The memory is kept for the next copy: 12 bytes for each
    parameter in training that the rank holds, and 4 for one that is not trained."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, part: Tensors) -> Tensors:
        """Copy a part; the copy is complete on return, and overwritten by the next call."""
        copied = Tensors(
            [self._copy("model", shard) for shard in part.weights],
            {kind: [self._copy(kind, shard) for shard in shards] for kind, shards in part.moments.items()},
            part.num_steps,
        )
        if any(shard.local.is_cuda for shard in part.weights):  # asked of the sources: of no rows, no copy is pinned
            torch.cuda.synchronize()
        return copied

    def _copy(self, kind: str, shard: Shard) -> Shard:
        key, source = f"{kind}.{shard.name}", shard.local
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        return replace(shard, local=buffer.copy_(source, non_blocking=True))


def describe(part: Tensors, group: torch.distributed.ProcessGroup, frozen: Mapping[str, int]) -> dict[str, Any]:
    """What state.json says of a part (a collective); `frozen` are digests of what stays as it is."""
    moments = [shard for kind in MOMENTS for shard in part.moments[kind]]
    numbered = [replace(shard, name=f"{i}.{shard.name}") for i, shard in enumerate(moments)]
    return {
        "parameter_digest": combined(digests(part.weights, torch.float32, group) | dict(frozen)),
        "optimizer_digest": combined(digests(numbered, torch.float32, group)),
        "optimizer_steps": part.num_steps,
        "layout": [[shard.name, list(shard.shape)] for shard in part.weights],
    }


def check_layout(folder: Path, saved: list[list[Any]], policy: Policy) -> None:
    """Raises CheckpointError when names or shapes of the policy's tensors are not those that were saved."""
    mine = {name: list(shape) for name, _, shape in policy.layout("float32")}
    theirs = {name: shape for name, shape in saved}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of another architecture: {name} is {theirs.get(name)} there"
                f" and {mine.get(name)} in {policy.source}"
            )
