"""What becomes of each decoder layer before it is sharded: first recomputing, then compiling (the order of torchtitan).

Compiling comes after recomputing so that the compiler sees what the backward runs again, and before sharding so that
gathers stay outside of compiled code.
"""

import functools
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from learner.policy.memory import Recompute
from learner.policy.moe.mixture import Mixture, products

RECOMPUTED = "_checkpoint_wrapped_module."
"""What recomputing and offloading each add to the names of parameters."""

KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
"""Operators whose results selective recomputing keeps: products and attention, which cost most of the time. What lies
between them, norms, rotations and gates, costs memory instead and is run again."""


def prepare(layers: torch.nn.ModuleList, recompute: Recompute, *, compiled: bool, offloaded: bool = False) -> None:
    """Wrap and compile the layers in place. There is no dropout, so no random state needs to be kept.

    Of a layer with a mixture of experts, selective recomputing makes the mixture again, most of its activations.

    Compiled code takes rows of any length: nothing is filled up, and nothing compiles again. Its backward makes norms
    and gates again where a product reads them, which costs a pass over memory; the compiler would keep them, a quarter
    of all activations. `offloaded` layers, which are recomputed, wait for that with their inputs in pinned host memory.
    """
    if compiled:
        torch._functorch.config.ban_recompute_materialized_backward = False
    options: dict[str, Any] = {"preserve_rng_state": False}
    for number, layer in enumerate(layers):
        mixture = layer.mlp if isinstance(layer.mlp, Mixture) else None
        # divided experts make several graphs of a layer, and what is recomputed has to be one: they are inside of it
        inside = compiled and mixture is not None and mixture.exchange is not None
        if inside and mixture is not None:
            mixture.experts.products = torch.compile(products, dynamic=True)
        if recompute == "selective" and mixture is not None:
            if inside:
                mixture.compile(dynamic=True)
            layer.mlp = checkpoint_wrapper(mixture, **options)
        elif recompute == "selective":
            context = functools.partial(create_selective_checkpoint_contexts, _policy)
            layer = layers[number] = checkpoint_wrapper(layer, context_fn=context, **options)
        elif recompute == "full":
            if inside:
                layer.compile(dynamic=True)
            layer = layers[number] = checkpoint_wrapper(layer, **options)
        if compiled and not (inside and recompute == "full"):
            layer.compile(dynamic=True)
        if offloaded:
            layers[number] = offload_wrapper(layer)


def _policy(_: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in KEPT if hasattr(operator, "name") else False
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
