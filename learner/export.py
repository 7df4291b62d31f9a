"""The policy as a Hugging Face folder: safetensors of bounded size, config.json, tokenizer."""

import json
import math
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from learner.model import Policy
from learner.sharding import DTYPES

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
    written once, as model.embed_tokens.weight.

    Raises:
        OSError: rank 0 could not write. It goes on gathering before it raises, so no other rank is left alone.
    """
    files = plan_files(policy.layout(dtype))
    writer = _Writer(source_folder, target, dtype, files) if policy.rank == 0 else None
    for name, tensor in policy.named_full_tensors(dtype):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()


def plan_files(layout: list[tuple[str, str, tuple[int, ...]]], limit: int | None = None) -> dict[str, list[str]]:
    """Which tensors go into which file, in order.

    Example: {"model.safetensors": [...]} or {"model-00001-of-00002.safetensors": [...], ...}.
    """
    limit = FILE_BYTES if limit is None else limit
    groups: list[list[str]] = []
    size = 0
    for name, dtype, shape in layout:
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if not groups or size + num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


class _Writer:
    """Buffers the tensors of a planned file and writes it; errors surface in `finish`."""

    def __init__(self, source: Path, target: Path, dtype: str, files: dict[str, list[str]]) -> None:
        self._source, self._target, self._dtype, self._files = source, target, dtype, files
        self._file_of = {name: file for file, names in files.items() for name in names}
        self._pending: dict[str, torch.Tensor] = {}
        self._total = 0
        self._error: OSError | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._error is not None:
            return
        self._pending[name] = tensor.cpu().contiguous()
        self._total += tensor.numel() * tensor.element_size()
        file = self._file_of[name]
        if len(self._pending) == len(self._files[file]):
            try:
                self._target.mkdir(parents=True, exist_ok=True)
                save_file(self._pending, self._target / file, metadata={"format": "pt"})
                sync_file(self._target / file)
            except OSError as error:
                self._error = error
            except SafetensorError as error:
                self._error = OSError(f"{self._target / file}: {error}")
            self._pending = {}

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
            write_json(self._target / "model.safetensors.index.json", index)
        config = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        write_json(self._target / "config.json", {**config, "dtype": self._dtype})
        for name in COPIED:
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, self._target / name)
                sync_file(self._target / name)
        sync_file(self._target)


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
