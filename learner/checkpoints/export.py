"""The policy as a Hugging Face folder: safetensors of bounded size, config.json, tokenizer."""

import json
import math
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from learner.policy.model import Policy
from learner.policy.sharding import DTYPES, gather

FILE_BYTES = 4_000_000_000
"""A safetensors file holds at most this much, or a single larger tensor; also the memory that rank 0 needs."""

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
)
"""What is taken over from the source folder unchanged, where it is there."""


def write_hf_folder(policy: Policy, source_folder: Path, target: Path, dtype: str) -> None:
    """Write the weights in `dtype` with everything that AutoModelForCausalLM.from_pretrained needs. A collective.

    Rank 0 writes while all ranks gather; every file is flushed to disk before it returns there. Tied embeddings are
    written once, as model.embed_tokens.weight. Adapters are merged into what they adapt.

    Raises:
        OSError: rank 0 could not write. It goes on gathering before it raises, so no other rank is left alone.
    """
    files = plan_files(policy.model_layout(dtype))
    file_of = {name: target / file for file, names in files.items() for name in names}
    pending: dict[str, torch.Tensor] = {}
    total, error = 0, None
    for name, tensor in gather(policy.model_shards(), DTYPES[dtype], policy.meshes.replica):
        if policy.rank != 0 or error is not None:
            continue
        pending[name] = tensor.cpu().contiguous()
        total += tensor.numel() * tensor.element_size()
        if len(pending) == len(files[file_of[name].name]):
            error = _write_tensors(pending, file_of[name])
            pending = {}
    if error is not None:
        raise error
    if policy.rank != 0:
        return
    if len(files) > 1:
        weight_map = {name: file.name for name, file in file_of.items()}
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


def _write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> OSError | None:
    """Write and flush one file; what went wrong, if anything."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, metadata={"format": "pt"})
        sync_file(file)
    except OSError as error:
        return error
    except SafetensorError as error:
        return OSError(f"{file}: {error}")
    return None


def plan_files(layout: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, list[str]]:
    """Which tensors go into which file, in order.

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
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_json(path: Path, value: object) -> None:
    """Write and flush to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
