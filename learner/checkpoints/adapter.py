"""LoRA in a checkpoint: adapters in peft's format, and which weights they belong to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from configs.learner import Lora
from learner.policy.model import Policy
from learner.policy.sharding import Shard, gather
from weight_bus.digest import combined


def write_adapter_folder(
    adapters: Sequence[Shard], lora: Lora, source: Path, folder: Path, group: dist.ProcessGroup
) -> None:
    """Write adapter_config.json and, in float32, adapter_model.safetensors. A collective; the first rank writes.

    Args:
        adapters: this rank's rows of each.
        lora: what they were made by.
        source: the folder of the model that they adapt.
        folder: to write.
        group: of these ranks, with a backend for the memory that the adapters lie in.

    Raises:
        OSError: the first rank could not write.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in gather(adapters, torch.float32, group)}
    if dist.get_rank(group) != 0:
        return
    folder.mkdir(parents=True)
    file = folder / "adapter_model.safetensors"
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.projections),
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
