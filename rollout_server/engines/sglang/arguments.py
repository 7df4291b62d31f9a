"""ServerArgs of SGLang from the configuration: what Slipstream decides, defaults, and the user's pass-through."""

import difflib
import json
import math
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update.orders import folder_tensors
from slipstream.families.experts import Experts, experts_of
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes
from slipstream.families.table import family_of
from slipstream.runtime.fingerprint import read_json
from weight_bus.manifest import ITEM_SIZES

LOADER = "rollout_server.engines.sglang.update.loader.apply"
STREAM_INTERVAL = 16
"""Tokens between two signs of life of a request; where SGLang records no versions it is also what is in doubt."""
SPARE_CONTEXT = 8
"""SGLang wants a little more context than prompt and answer."""
WIDTH_ON_CPU = 32
"""Its models on a CPU have MLPs of whole blocks of so many (0.5.15)."""
RESERVED_BYTES = 4 * 1024**3
"""Device memory left alone: CUDA contexts, NCCL, activations."""
SAFE_SHARE = 0.92
"""Share of the device memory that is planned with."""

ROUTED = "enable_return_routed_experts"
DECIDED = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "tp_size": "placement.tensor_parallel",
    "dp_size": "placement (one engine per rollout server)",
    "pp_size": "placement.tensor_parallel",
    "base_gpu_id": "placement",
    "nnodes": "placement (an engine is on one node)",
    "device": "placement.device",
    "dtype": "rollout.dtype",
    "max_running_requests": "rollout.max_running",
    "context_length": "data.max_prompt_tokens and rollout.max_new_tokens",
    "quantization": "nothing: the learner's weights are not quantized",
    "host": "nothing: the engine never leaves the loopback interface",
    "api_key": "nothing: it is generated",
    "admin_api_key": "nothing: it is generated",
    "custom_weight_loader": "nothing: the weight bus needs it",
    "skip_tokenizer_init": "nothing: prompts and answers are token ids",
    "weight_version": "nothing: the weight bus sets it",
    "incremental_streaming_output": "nothing: outputs are read as all tokens so far",
    "preferred_sampling_params": "rollout.temperature; truncated sampling is not carried to the learner",
    "enable_custom_logit_processor": "nothing: the learner would not know the distribution",
    "custom_sigquit_handler": "nothing: the rollout server watches its children",
    "trust_remote_code": "nothing: code in a model folder is never run",
    "speculative_algorithm": "nothing yet: behaviour logprobs with it are not proven",
    "enable_lora": "learner.lora",
    ROUTED: "algorithm.routing_replay",
}
"""ServerArgs that Slipstream decides, and what to set instead."""


def server_arguments(config: Config, *, known: Collection[str], cuda: bool) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`, as far as its ServerArgs has them (`known`); rollout.sglang over defaults.

    Raises EngineError where a key of rollout.sglang is unknown or not the user's to set, or the context is too long.
    """
    for key in config.rollout.sglang:
        if key in DECIDED:
            raise EngineError(f"rollout.sglang.{key}: Slipstream decides it; set {DECIDED[key]} instead")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean 'rollout.sglang.{near[0]}'?" if near else ""
            raise EngineError(f"rollout.sglang.{key}: the installed SGLang has no such argument{hint}")
    defaults = {
        "log_level": "error",
        "random_seed": (config.run.seed + int.from_bytes(os.urandom(3), "little")) % 2**31,
        "stream_interval": STREAM_INTERVAL,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "enable_memory_saver": False,
    }
    defaults |= _on_cuda(config) if cuda else _on_cpu(config)
    decided = {
        "model_path": config.model.path,
        "tp_size": config.placement.tensor_parallel,
        "device": "cuda" if cuda else "cpu",
        "dtype": config.rollout.dtype,
        "max_running_requests": config.rollout.max_running,
        "host": "127.0.0.1",
        "api_key": secrets.token_hex(16),
        "admin_api_key": secrets.token_hex(16),
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,
        "weight_version": "0",
        "trust_remote_code": False,
        "context_length": _context_length(config, cuda=cuda),
    }
    if replayed(config) is not None:
        kind = family_of(decoder_of(read_json(Path(config.model.path) / "config.json")))
        if ROUTED not in known or not kind.routed_in_sglang:
            what = f"the routed experts of {kind.model_type}"
            raise EngineError(f"algorithm.routing_replay: the installed SGLang does not return {what}; set it to false")
        decided[ROUTED] = True
    return {name: value for name, value in {**defaults, **config.rollout.sglang, **decided}.items() if name in known}


def replayed(config: Config) -> Experts | None:
    """Experts of the model whose choices the learner replays; None without."""
    described = decoder_of(read_json(Path(config.model.path) / "config.json"))
    return experts_of(described) if config.replays_routing else None


def _context_length(config: Config, *, cuda: bool) -> int:
    longest = config.scored_context
    try:
        described = decoder_of(json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8")))
        limit, sizes = int(described["max_position_embeddings"]), Sizes.of(described)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"model.path: {config.model.path}/config.json is not readable: {error!r}") from error
    if longest > limit:
        raise EngineError(
            f"data.max_prompt_tokens + max_new_tokens (rollout, evaluation) = {longest}, and the model has"
            f" max_position_embeddings {limit}; lower one of them"
        )
    if problem := sizes.problem_with_ends(longest):
        raise EngineError(problem)
    if sizes.tied and sizes.family.moe:  # 0.5.20: its models of mixtures know of no ties, and no file fills the head
        kind = sizes.family.model_type
        raise EngineError(f"model.path: SGLang gives a {kind!r} model an output head apart, and it is tied")
    if sizes.family.model_type == "olmoe" and sizes.dims["key"] != sizes.dims["query"]:  # 0.5.20
        raise EngineError("model.path: SGLang's olmoe has as many key/value heads as others; take such a model")
    if not cuda and sizes.keys.get(cap := sizes.family.caps[0]) is not None:
        raise EngineError(f"model.path: SGLang does not compute {cap} on a CPU; take placement.device: cuda")
    inner, ranks = sizes.dims["expert_inner" if sizes.family.moe else "inner"], config.placement.tensor_parallel
    if not cuda and inner % (WIDTH_ON_CPU * ranks):
        raise EngineError(
            f"model.path: on a CPU SGLang widens MLPs of {inner} to a multiple of {WIDTH_ON_CPU} for each of"
            f" {ranks} ranks, and updates no longer fit; take a model with such a size, or rollout.engine: torch"
        )
    return min(limit, longest + SPARE_CONTEXT)


def _on_cpu(config: Config) -> dict[str, Any]:
    """Defaults without a GPU: plain PyTorch paths, no polling while idle."""
    tokens = min(config.rollout.max_running, 256) * config.max_context
    return {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": max(16384, min(tokens, 131072)),
        "sleep_on_idle": True,
    }


def _on_cuda(config: Config) -> dict[str, Any]:
    """Defaults on GPUs: memory is left for the buckets of the weight bus."""
    defaults: dict[str, Any] = {"cuda_graph_max_bs_decode": config.rollout.max_running}
    if "mem_fraction_static" in config.rollout.sglang:
        return defaults
    staged = config.weight_bus.on_gpus and config.learner.lora.rank == 0
    total = torch.cuda.get_device_properties(0).total_memory
    count = sum(math.prod(shape) for _, shape in folder_tensors(Path(config.model.path), whole=True))
    model_bytes = count * ITEM_SIZES[config.rollout.dtype]
    ranks = config.placement.tensor_parallel
    staged_bytes = model_bytes // (ranks if config.staged_by_rank else 1) if staged else 0
    share = memory_share(total, model_bytes, tensor_parallel=ranks, staged_bytes=staged_bytes)
    return {"mem_fraction_static": share, **defaults}


def memory_share(total: int, model_bytes: int, *, tensor_parallel: int, staged_bytes: int) -> float:
    """Share of a GPU that SGLang may take for its weights and KV cache.

    Args:
        total: bytes of the GPU.
        model_bytes: of one version, whole.
        tensor_parallel: GPUs that the engine is divided over.
        staged_bytes: what is received into GPU memory before it is loaded.

    Raises EngineError where the engine's part of the weights does not fit beside the rest.
    """
    share = SAFE_SHARE - (RESERVED_BYTES + staged_bytes) / total
    own = model_bytes / tensor_parallel
    if share * total > own:
        return round(share, 3)
    parts = f"{own / 1e9:.1f} GB of weights (placement.tensor_parallel {tensor_parallel})"
    gpu = f"do not fit in a GPU of {total / 1e9:.0f} GB"
    if not staged_bytes:
        raise EngineError(f"{parts} {gpu}; take more placement.tensor_parallel")
    parts = f"{parts} and {staged_bytes / 1e9:.1f} GB of a staged update"
    if staged_bytes < model_bytes or tensor_parallel == 1:
        raise EngineError(f"{parts} {gpu}; take more placement.tensor_parallel with weight_bus.stage_in: engine")
    raise EngineError(
        f"{parts} {gpu}. Each GPU reserves room for the whole model; take weight_bus.stage_in: engine without"
        " weight_bus.delta, which stages on each GPU what it needs, or weight_bus.backend: gloo, which stages in host"
        " memory"
    )
