"""Reference model and critic in a checkpoint, with digests that loading compares.

checkpoints/step_N/critic/dcp/         float32 weights and AdamW moments (torch.distributed.checkpoint)
checkpoints/step_N/critic/part.json    their digests, and the number of updates
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from learner.optimizer import MOMENTS, Optimizer
from learner.policy.model import Policy
from learner.policy.sharding import Shard, digests
from weight_bus.digest import combined


class Part(Protocol):
    """A model that a checkpoint holds beside the policy.

    Both methods are collectives of the policy's ranks.
    """

    def save(self, folder: Path) -> None:
        """Write it below the checkpoint's folder. Raises OSError, ValueError and CheckpointException."""
        ...

    def load(self, folder: Path) -> None:
        """Read it again. Raises as `save` does."""
        ...


def save_part(folder: Path, model: Policy, optimizer: Optimizer | None) -> None:
    """Write a model and its optimizer, if any. A collective of its ranks.

    Raises:
        OSError: a file could not be written.
        CheckpointException: a shard could not be written on some rank.
    """
    described = _describe(model, optimizer)
    dcp_save(_tensors(model, optimizer), checkpoint_id=folder / "dcp", process_group=model.group)
    if model.rank == 0:
        (folder / "part.json").write_text(json.dumps(described) + "\n", encoding="utf-8")


def load_part(folder: Path, model: Policy, optimizer: Optimizer | None) -> None:
    """Read what `save_part` wrote, on any number of ranks. A collective of the model's ranks.

    Raises:
        ValueError: there is none, it is of another architecture, or it is not what was saved.
        CheckpointException: a file could not be read.
    """
    if not (folder / "part.json").is_file():
        raise ValueError(f"it has no {folder.name}/; the run that wrote it had no {folder.name} of its own")
    saved: dict[str, Any] = json.loads((folder / "part.json").read_text(encoding="utf-8"))
    here = _describe(model, optimizer)
    if here["layout"] != saved["layout"]:
        there, own = next(pair for pair in zip(saved["layout"], here["layout"], strict=False) if pair[0] != pair[1])
        if there[:2] == own[:2]:
            key = "set learner.compute_dtype as it was"
            raise ValueError(f"{folder.name}/ has weights in {there[2]}, this run has them in {own[2]}; {key}")
        raise ValueError(f"{folder.name}/ is of another architecture: {there} there, {own} here")
    dcp_load(_tensors(model, optimizer), checkpoint_id=folder / "dcp", process_group=model.group)
    if optimizer is not None:
        optimizer.set_steps(saved["updates"])
    here = _describe(model, optimizer)
    if here != saved:
        key = next(key for key in saved if here.get(key) != saved[key])
        raise ValueError(f"{folder.name}/: {key} is {here.get(key)} after loading, {saved[key]} was saved")


def _tensors(model: Policy, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """They share memory with the parameters and moments."""
    tensors = {f"model.{shard.name}": model.as_global(shard) for shard in model.shards()}
    for kind in MOMENTS if optimizer is not None else ():
        assert optimizer is not None
        tensors |= {f"optimizer.{kind}.{shard.name}": model.as_global(shard) for shard in optimizer.moments(kind)}
    return tensors


def _describe(model: Policy, optimizer: Optimizer | None) -> dict[str, Any]:
    """What part.json says (a collective)."""
    shards = model.shards()
    described: dict[str, Any] = {
        "layout": [[shard.name, list(shard.shape), str(shard.local.dtype)] for shard in shards],
        "weights": _digest(shards, model),
    }
    if optimizer is not None:
        moments = [replace(shard, name=f"{kind}.{shard.name}") for kind in MOMENTS for shard in optimizer.moments(kind)]
        described |= {"moments": _digest(moments, model), "updates": optimizer.num_steps}
    return described


def _digest(shards: Sequence[Shard], model: Policy) -> str:
    return combined(digests(shards, shards[0].local.dtype, model.group))
