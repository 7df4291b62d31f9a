"""The policy as a Hugging Face folder: safetensors of bounded size, config.json, tokenizer."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from learner.checkpoints.folders import sync_file, write_json
from learner.policy.pretrained import has_tower
from learner.policy.sharding import DTYPES, Shard, gather_pieces
from slipstream.runtime.progress import Progress
from slipstream.vision import read_tower

Layout = Sequence[tuple[str, str, tuple[int, ...]]]
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
    shards: Sequence[Shard], source_folder: Path, target: Path, dtype: str, group: dist.ProcessGroup
) -> None:
    """Write the weights in `dtype` with everything that AutoModelForCausalLM.from_pretrained needs. A collective.

    Files go to the ranks in turn: each gathers the tensors of its own file and no others, and all write at once. Every
    file is flushed to disk. Tied embeddings are written once, as model.embed_tokens.weight.

    Args:
        shards: of each parameter, float32, on any device.
        source_folder: what config.json and tokenizer are taken from.
        target: the folder to write, on a disk that all ranks see.
        dtype: a name in DTYPES.
        group: of these ranks, with a backend for host memory.

    Raises:
        OSError: this rank could not write. It goes on gathering before it raises, so no other rank is left alone.
    """
    layout = [(shard.name, dtype, shard.shape) for shard in shards]
    files = plan_files(layout, with_tower=has_tower(source_folder))
    by_name = {shard.name: shard for shard in shards}
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    names = list(files)
    errors: list[OSError] = []
    with Progress(f"exporting {target}", total=len(names), unit="files") as progress:
        for first in range(0, len(names), world_size):
            held: dict[str, torch.Tensor] = {}
            for owner, name in enumerate(names[first : first + world_size]):
                pieces = gather_pieces([by_name[tensor] for tensor in files[name]], DTYPES[dtype], group, only=owner)
                held |= {tensor: each.whole().cpu() for tensor, each in pieces if owner == rank}
            if held and not errors:
                errors += _write_tensors(held, target / names[first + rank])
            progress.add(min(world_size, len(names) - first))
    if errors:
        raise errors[0]
    if rank == 0:
        _write_the_rest(layout, files, source_folder, target, dtype)


def _write_the_rest(
    layout: Layout, files: Mapping[str, list[str]], source_folder: Path, target: Path, dtype: str
) -> None:
    """All but the trained weights: a frozen vision tower, the index of several files, config.json, tokenizer."""
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(math.prod(shape) for _, _, shape in layout) * DTYPES[dtype].itemsize
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


def plan_files(layout: Layout, *, with_tower: bool = False) -> dict[str, list[str]]:
    """Which tensors go into which file, in order; beside TOWER_FILE none has the name of a file that is alone.

    Example: {"model.safetensors": [...]} or {"model-00001-of-00002.safetensors": [...], ...}.
    """
    groups: list[list[str]] = []
    size = 0
    for name, dtype, shape in layout:
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if not groups or size + num_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1 and not with_tower:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}
