"""What others read: the policy as a Hugging Face folder, adapters in peft's format, and what those belong to."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from configs.learner import Lora
from learner.checkpoints.folders import sync_file, write_json
from learner.layout import DTYPES, Layout, Shard, gather, gather_pieces, spans
from learner.policy.model import Policy
from learner.policy.pretrained import has_tower
from slipstream.runtime.progress import Progress
from slipstream.vision import read_tower
from weight_bus.digest import combined

Listed = Sequence[tuple[str, str, tuple[int, ...]]]
"""(name, dtype, shape) of each tensor."""

FILE_BYTES = 1_000_000_000
"""A safetensors file holds at most this much, or a single larger tensor; also the memory that a rank needs for it."""

TOWER_FILE = "model-vision.safetensors"
"""A vision tower, which is not trained."""

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What is taken over from the source folder unchanged, where it is there."""


def write_hf_folder(
    layout: Layout, shards: Sequence[Shard], source_folder: Path, target: Path, dtype: str, group: dist.ProcessGroup
) -> None:
    """Write the weights in `dtype` with everything that AutoModelForCausalLM.from_pretrained needs. A collective.

    Files go to the ranks in turn: each gathers the tensors of its own file and no others, and all write at once. Every
    file is flushed to disk. Tied embeddings are written once, as model.embed_tokens.weight.

    Args:
        layout: of the model.
        shards: of each tensor, float32, on any device.
        source_folder: what config.json and tokenizer are taken from.
        target: the folder to write, on a disk that all ranks see.
        dtype: a name in DTYPES.
        group: of these ranks, with a backend for host memory.

    Raises:
        OSError: this rank could not write. It goes on gathering before it raises, so no other rank is left alone.
    """
    listed = [(shard.name, dtype, shard.shape) for shard in shards]
    files = plan_files(listed, with_tower=has_tower(source_folder))
    by_name = {shard.name: shard for shard in shards}
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    names = list(files)
    errors: list[OSError] = []
    with Progress(f"exporting {target}", total=len(names), unit="files") as progress:
        for first in range(0, len(names), world_size):
            held: dict[str, torch.Tensor] = {}
            for owner, name in enumerate(names[first : first + world_size]):
                wanted = [by_name[tensor] for tensor in files[name]]
                pieces = gather_pieces(layout, wanted, DTYPES[dtype], group, only=owner)
                held |= {tensor: each.whole().cpu() for tensor, each in pieces if owner == rank}
            if held and not errors:
                errors += _write_tensors(held, target / names[first + rank])
            progress.add(min(world_size, len(names) - first))
    if errors:
        raise errors[0]
    if rank == 0:
        _write_the_rest(listed, files, source_folder, target, dtype)


def _write_the_rest(
    listed: Listed, files: Mapping[str, list[str]], source_folder: Path, target: Path, dtype: str
) -> None:
    """All but the trained weights: a frozen vision tower, the index of several files, config.json, tokenizer."""
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(math.prod(shape) for _, _, shape in listed) * DTYPES[dtype].itemsize
    if has_tower(source_folder):
        tower = dict(read_tower(source_folder))  # as it was stored: both ends hash these bytes
        if errors := _write_tensors(tower, target / TOWER_FILE):
            raise errors[0]
        weight_map |= dict.fromkeys(tower, TOWER_FILE)
        total += sum(tensor.nbytes for tensor in tower.values())
    if len(set(weight_map.values())) > 1:
        write_json(
            target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    config = json.loads((source_folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    write_json(target / "config.json", {**config, "dtype": dtype})
    for name in COPIED:
        if (source_folder / name).is_file():
            shutil.copyfile(source_folder / name, target / name)
            sync_file(target / name)
    sync_file(target)


def _write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> list[OSError]:
    """Write and flush one file; what went wrong, if anything."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, metadata={"format": "pt"})
        sync_file(file)
    except OSError as error:
        return [error]
    except SafetensorError as error:
        return [OSError(f"{file}: {error}")]
    return []


def plan_files(listed: Listed, *, with_tower: bool = False) -> dict[str, list[str]]:
    """Which tensors go into which file, in order; beside TOWER_FILE none has the name of a file that is alone.

    Example: {"model.safetensors": [...]} or {"model-00001-of-00002.safetensors": [...], ...}.
    """
    found = spans(listed, lambda of: math.prod(of[2]) * DTYPES[of[1]].itemsize, FILE_BYTES)
    groups = [[name for name, _, _ in group] for group in found]
    if len(groups) == 1 and not with_tower:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_adapter_folder(
    layout: Layout, adapters: Sequence[Shard], lora: Lora, source: Path, folder: Path, group: dist.ProcessGroup
) -> None:
    """Write adapter_config.json and, in float32, adapter_model.safetensors. A collective; the first rank writes.

    Args:
        layout: of the model.
        adapters: this rank's rows of each.
        lora: what they were made by.
        source: the folder of the model that they adapt.
        folder: to write.
        group: of these ranks, with a backend for the memory that the adapters lie in.

    Raises:
        OSError: the first rank could not write.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in gather(layout, adapters, torch.float32, group)}
    if dist.get_rank(group) != 0:
        return
    if errors := _write_tensors(tensors, folder / "adapter_model.safetensors"):
        raise errors[0]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name for name in lora.projections if any(f".{name}.lora_A" in one for one in tensors)],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def describe_base(policy: Policy) -> dict[str, Any]:
    """What state.json says of the frozen weights; empty without LoRA."""
    if policy.lora is None:
        return {}
    described = {"path": str(policy.source), "digest": combined(policy.frozen_digests)}
    dtype = str(policy.frozen()[0].local.dtype).removeprefix("torch.")
    return {"base": {**described, "dtype": dtype, "lora": policy.lora.model_dump()}}


def problem_with_base(saved: Mapping[str, Any], policy: Policy) -> str:
    """Why adapters of this state.json do not go with these frozen weights; empty where they do."""
    own, base = describe_base(policy).get("base"), saved.get("base")
    if own is None and base is None:
        return ""
    if own is None or base is None:
        there, here = ("with", "without") if base else ("without", "with")
        return f"was trained {there} learner.lora and this run is {here}; set learner.lora.rank as it was"
    if own["lora"] != base["lora"]:
        return f"has adapters of learner.lora {base['lora']}, this run has {own['lora']}; set it as it was"
    if base["dtype"] != own["dtype"]:
        return (
            f"has adapters of weights in {base['dtype']}, this run has them in {own['dtype']}; set"
            " learner.compute_dtype and rollout.dtype as they were"
        )
    if own["digest"] != base["digest"]:
        return (
            f"has adapters of other frozen weights: digest {base['digest']} of {base['path']} there, {own['digest']} of"
            f" {own['path']} here; set model.path to the folder that they were trained on"
        )
    return ""
