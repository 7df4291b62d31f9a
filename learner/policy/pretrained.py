"""A Hugging Face folder read so that a rank touches only its own rows of each tensor.

The model is built on the meta device and sharded there; then every rank gets memory for its shards alone and copies
its rows out of the memory-mapped safetensors. So no rank ever holds the whole model, in host or in device memory.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from configs.errors import SlipstreamError
from learner.layout import Shard
from slipstream.families.pictures import decoder_of, vision_of
from slipstream.families.record import HEAD, TOWER
from slipstream.families.table import FAMILIES, family_of
from slipstream.runtime.progress import Progress

COPY_BYTES = 64 * 1024 * 1024
"""Rows are copied in pieces of at most this size (float32), so that no copy on its way needs more host memory."""


class PolicyError(SlipstreamError, ValueError, code="SLIP-MODEL-02"):
    """The model folder cannot be trained; names the folder and the fault."""


def read_config(folder: Path) -> PretrainedConfig:
    """The model's config.json, checked against what the learner can train: of its decoder, where it has more.

    Raises:
        PolicyError: no such folder, no readable config.json, or a model that is not supported.
    """
    if not folder.is_dir():
        raise PolicyError(f"model.path: no folder {str(folder)!r}; give a folder with config.json and safetensors")
    if not (folder / "config.json").is_file():
        raise PolicyError(f"model.path: {folder} has no config.json")
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family_of(raw)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if vision_of(raw) is not None:
            config = Qwen2Config.from_dict(decoder_of(raw))
    except LookupError as error:
        raise PolicyError(f"model.path: {folder} {error.args[0]}") from error
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"model.path: {folder}/config.json is not readable: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise PolicyError(f"model.path: {folder} holds quantized weights; give the unquantized checkpoint")
    return config


def build_empty(config: PretrainedConfig, attention: str) -> Any:
    """The transformers model on the meta device: shapes and names without memory.

    Dropout, where a config has any, stays off (evaluation mode): behaviour and trainer logprobs of the same weights
    must be equal. `attention` names an implementation of learner/policy/attention.py.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        if "mrope_section" in (getattr(config, "rope_parameters", None) or {}):
            model.model.rotary_emb = MultimodalRotary(config)
    model.config.use_cache = False
    return model.eval()


class MultimodalRotary(Qwen2RotaryEmbedding):  # type: ignore[misc]
    """Cosines and sines for positions [1, T] of text, or [3, 1, T] of time, row and column (M-RoPE, 2409.12191).

    All else of the decoders of Qwen2-VL and Qwen2.5-VL is a Qwen2, under the same names.
    """

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__(config, device)
        sections = list(config.rope_parameters["mrope_section"])
        # pair i of a head turns by one axis; its halves lie half a head apart
        self.axes = [axis for axis, size in enumerate(sections) for _ in range(size)] * 2

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, D] each."""
        if position_ids.dim() == 2:
            return super().forward(x, position_ids)  # type: ignore[no-any-return]
        columns = torch.arange(len(self.axes), device=position_ids.device)
        axes = torch.tensor(self.axes, device=position_ids.device)
        cos, sin = super().forward(x, position_ids[:, 0])
        return cos[axes, :, columns].T[None], sin[axes, :, columns].T[None]


def allocate(root: Any, model: Any, config: PretrainedConfig, device: torch.device) -> None:
    """Allocate, without values, what this rank holds of a model from `build_empty` that has been sharded.

    Args:
        root: of all FSDP units; it must see its parameters move, or those whose rows do not divide would move once more
            in the first forward, away from their optimizer.
        model: of transformers, inside of it.
        config: of the model.
        device: where the parameters live.

    Raises:
        RuntimeError: the model has state that neither the files nor its configuration define.
    """
    if config.tie_word_embeddings:
        del model.lm_head.weight  # or the largest tensor would be allocated once for each of its names
    root.to_empty(device=device)
    model.tie_weights()
    # The only state that no file holds. Computed on the host, so that it is the same bits on every kind of device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    embedding = model.model.embed_tokens
    if "embed_scale" in dict(embedding.named_buffers()):
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    defined = FAMILIES[config.model_type].buffers
    unknown = [name for name, _ in model.named_buffers() if not name.startswith(defined)]
    if unknown:
        raise RuntimeError(f"buffer {unknown[0]} of a {config.model_type} model has memory, but nothing defines it")


def is_tower(name: str, folder: Path) -> bool:
    """Whether a tensor of the folder is the vision tower's (slipstream/vision.py)."""
    return name.startswith(TOWER) and has_tower(folder)


def has_tower(folder: Path) -> bool:
    """Whether the folder's model takes pictures."""
    return vision_of(json.loads((folder / "config.json").read_text(encoding="utf-8"))) is not None


def fill(shards: Iterable[Shard], files: Mapping[str, Path], folder: Path) -> None:
    """Copy the box of each shard out of the files, casting to float32.

    Raises:
        PolicyError: a tensor is missing, has another shape or is too many, or a file is not readable.
    """
    by_file: dict[Path, list[Shard]] = {}
    names = set()
    for shard in shards:
        names.add(shard.name)
        if shard.name not in files:
            raise PolicyError(f"model.path: {folder} has no tensor {shard.name!r}, which its config.json asks for")
        by_file.setdefault(files[shard.name], []).append(shard)
    known = {*names, HEAD, *(name for name in files if is_tower(name, folder))}
    extra = sorted(name for name in files if name not in known and not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise PolicyError(f"model.path: {folder} has tensor {extra[0]!r}, which its config.json does not ask for")
    total = sum(shard.local.numel() for held in by_file.values() for shard in held)
    with Progress(f"loading weights of {folder}", total=total / 1e9, unit="10^9 parameters") as progress:
        for path, held in sorted(by_file.items()):
            try:
                with safe_open(path, framework="pt") as opened:
                    for shard in held:
                        _copy_rows(shard, opened.get_slice(shard.name), path)
                        progress.add(shard.local.numel() / 1e9)
            except SafetensorError as error:
                raise PolicyError(f"model.path: {path} is not readable: {error}") from error


def _copy_rows(shard: Shard, source: Any, path: Path) -> None:
    if tuple(source.get_shape()) != shard.shape:
        raise PolicyError(
            f"model.path: {path}: {shard.name} has shape {tuple(source.get_shape())}, config.json says {shard.shape}"
        )
    rows = shard.local.shape[0]
    if not rows:
        return
    piece = max(1, COPY_BYTES * rows // (shard.local.numel() * shard.local.element_size()))
    begin, (_, *others) = shard.start[0], shard.box.slices
    for first in range(0, rows, piece):
        last = min(first + piece, rows)
        shard.local[first:last].copy_(source[(slice(begin + first, begin + last), *others)])
