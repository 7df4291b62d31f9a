"""Parts of a checkpoint: weights of a model and moments of its optimizer.

What a run trains or refreshes beside the policy has a folder of its own:

    checkpoints/step_N/critic/dcp/         float32 weights and AdamW moments (torch.distributed.checkpoint)
    checkpoints/step_N/critic/part.json    their digests, which loading compares, and the number of updates
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from configs.schema import Config
from learner.checkpoints.folders import CheckpointError
from learner.layout import Layout, digests
from learner.optimizer import MOMENTS, Optimizer
from learner.policy.model import Policy
from learner.policy.pinned import host_tensors
from weight_bus.digest import combined


@dataclass(frozen=True, slots=True)
class Part:
    """A sharded model and its optimizer; without one it is not trained."""

    policy: Policy
    optimizer: Optimizer | None = None
    held: dict[str, torch.Tensor] | None = None
    """What lies as the policy's parameters do, in place of its own."""

    def weights(self) -> dict[str, torch.Tensor]:
        """What this rank holds, by parameter, sharing memory."""
        return self.policy.local_parameters() if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class Tensors:
    """What this rank holds of a part, where it lives or in host memory, by parameter: float32, unless frozen."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    """By kind (one of MOMENTS)."""
    num_steps: int
    """Updates that the optimizer has applied."""


def tensors_of(part: Part) -> Tensors:
    """The tensors of a part, sharing memory."""
    optimizer, weights = part.optimizer, part.weights()
    if optimizer is None:
        return Tensors(weights, {}, 0)
    return Tensors(weights, {kind: optimizer.moments(kind) for kind in MOMENTS}, optimizer.num_steps)


class HostMemory:
    """Copies of tensors in host memory, pinned beside a GPU. The memory is kept for the next copy: 12 bytes for each
    parameter in training that the rank holds, and 4 for one that is not trained."""

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []

    def copy(self, part: Tensors) -> Tensors:
        """Copy a part; the copy is complete on return, and overwritten by the next call."""
        by_kind = [part.weights, *part.moments.values()]
        sources = [source for by_name in by_kind for source in by_name.values()]
        pinned = any(source.is_cuda for source in sources)
        if [copy.shape for copy in self._copies] != [source.shape for source in sources]:
            self._copies = []  # the old blocks go first
            self._copies = host_tensors(sources, pinned=pinned)
        for copy, source in zip(self._copies, sources, strict=True):
            copy.copy_(source, non_blocking=True)
        if pinned:
            torch.cuda.synchronize()
        copies = iter(self._copies)
        weights, *moments = [dict(zip(by_name, copies, strict=False)) for by_name in by_kind]
        return Tensors(weights, dict(zip(part.moments, moments, strict=True)), part.num_steps)


def describe(
    part: Tensors,
    layout: Layout,
    group: torch.distributed.ProcessGroup,
    frozen: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """What state.json says of a part (a collective); `frozen` are digests of what stays as it is."""
    moments = [shard for by_name in part.moments.values() for shard in layout.shards(by_name)]
    numbered = [replace(shard, name=f"{i}.{shard.name}") for i, shard in enumerate(moments)]
    weights = layout.shards(part.weights)
    return {
        "parameter_digest": combined(digests(weights, weights[0].local.dtype, group) | dict(frozen)),
        "optimizer_digest": combined(digests(numbered, torch.float32, group)) if numbered else "",
        "optimizer_steps": part.num_steps,
        "layout": [[shard.name, list(shard.shape)] for shard in weights],
    }


def save_part(folder: Path, part: Part) -> None:
    """Write a model beside the policy and its optimizer, if any. A collective of its ranks.

    Raises:
        OSError: a file could not be written.
        CheckpointException: a shard could not be written on some rank.
    """
    policy, tensors = part.policy, tensors_of(part)
    dtype = {"dtype": dtype_of(tensors)}
    described = describe(tensors, policy.layout, policy.group, policy.frozen_digests) | dtype
    dcp_save(for_dcp(policy, tensors), checkpoint_id=folder / "dcp", process_group=policy.group)
    if policy.rank == 0:
        (folder / "part.json").write_text(json.dumps(described) + "\n", encoding="utf-8")


def load_part(checkpoint: Path, name: str, part: Part) -> None:
    """Read what `save_part` wrote to the folder `name`, on any number of ranks. A collective of the model's ranks.

    Raises:
        ValueError: there is none, or it is not what was saved.
        CheckpointError: it is of another architecture.
        CheckpointException: a file could not be read.
    """
    folder = checkpoint / name
    if not (folder / "part.json").is_file():
        raise ValueError(f"it has no {name}/; the run that wrote it had no {name} of its own")
    saved: dict[str, Any] = json.loads((folder / "part.json").read_text(encoding="utf-8"))
    policy, tensors = part.policy, tensors_of(part)
    check_layout(folder, saved["layout"], policy)
    if (dtype := dtype_of(tensors)) != saved["dtype"]:
        key = "set learner.compute_dtype as it was"
        raise ValueError(f"{name}/ has weights in {saved['dtype']}, this run has them in {dtype}; {key}")
    dcp_load(for_dcp(policy, tensors), checkpoint_id=folder / "dcp", process_group=policy.group)
    if part.optimizer is not None:
        part.optimizer.set_steps(saved["optimizer_steps"])
    for key, found in describe(tensors_of(part), policy.layout, policy.group, policy.frozen_digests).items():
        if found != saved[key]:
            raise ValueError(f"{name}/: {key} is {found} after loading, {saved[key]} was saved")


def for_dcp(policy: Policy, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors as torch.distributed.checkpoint knows them; they share memory with those given."""
    kinds = {"model": tensors.weights} | {f"optimizer.{kind}": moments for kind, moments in tensors.moments.items()}
    named = [(kind, name, local) for kind, by_name in kinds.items() for name, local in by_name.items()]
    return {f"{kind}.{name}": policy.as_global(name, local) for kind, name, local in named}


def dtype_of(tensors: Tensors) -> str:
    """Of the weights of a part."""
    return str(next(iter(tensors.weights.values())).dtype)


def check_layout(folder: Path, saved: list[list[Any]], policy: Policy) -> None:
    """Raises CheckpointError when names or shapes of the policy's tensors are not those that were saved."""
    mine = {shard.name: list(shard.shape) for shard in policy.shards()}
    theirs = {name: shape for name, shape in saved}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of another architecture: {name} is {theirs.get(name)} there"
                f" and {mine.get(name)} in {policy.source}"
            )


def problem_with_parts(checkpoint: Path, config: Config) -> str:
    """Why a run would go on from a checkpoint with another reference model than it had; empty where it does not."""
    algorithm = config.algorithm
    if algorithm.kl == "none" or algorithm.reference_refresh_steps or not (checkpoint / "reference").exists():
        return ""
    return (
        "has reference/, a copy of the policy of an earlier step, and algorithm.reference_refresh_steps 0 would go back"
        " to the model that the run began with; set it as it was, or, to keep that copy, to more than"
        f" learner.total_steps {config.learner.total_steps}"
    )
