"""What a model allows: learner.mesh, the compiler, attention without padding. Pure, no torch, for the dry run."""

from collections.abc import Mapping
from typing import Any

from configs.learner import LearnerSettings, Mesh
from slipstream.families.sizes import Sizes, heads_of, keys_of
from slipstream.families.table import family_of

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head sizes that flash attention takes: multiples of 8 up to 256."""


def problem_with(learner: LearnerSettings, model: Mapping[str, Any], aux_coef: float = 0.0) -> str:
    """What the mesh does not divide, and a value that works, what is not compiled, or no target; else empty.

    Args:
        learner: its mesh, adapters and compiler.
        model: the keys of config.json.
        aux_coef: algorithm.router_aux_loss_coef.
    """
    kind = model["model_type"]
    if aux_coef and not family_of(model).moe:
        return f"algorithm.router_aux_loss_coef: {aux_coef} with a {kind} model, which has no experts; take 0"
    if learner.compile is True and learner.compute_dtype == "float32" and family_of(model).moe:
        return (
            f"learner.compile: true with learner.compute_dtype float32 and a {kind} model: torch compiles products of"
            " experts in bfloat16 alone; take learner.compile=false"
        )
    mesh, lora = learner.mesh, learner.lora
    if lora.rank and lora.targets != "all-linear":
        there = Sizes.of(model).projections
        if strange := [name for name in lora.targets if name not in there]:
            return f"learner.lora.targets: no {strange[0]} in a {model['model_type']} model; it has {', '.join(there)}"
    if mesh.expert > 1 and (problem := _problem_with_experts(mesh, model)):
        return problem
    if mesh.tensor == 1:
        return ""
    if reason := family_of(model).against_tensor:
        return f"learner.mesh.tensor: {mesh.tensor} with a {model['model_type']} model: {reason}; take 1"
    heads = heads_of(model)
    parts = {
        "num_attention_heads": heads.query,
        "num_key_value_heads": heads.key_value,
        "intermediate_size": int(keys_of(model)["intermediate_size"]),
        "vocab_size": int(model["vocab_size"]),
    }
    uneven = {name: size for name, size in parts.items() if size % mesh.tensor}
    if uneven:
        works = next(n for n in range(mesh.tensor, 0, -1) if all(size % n == 0 for size in parts.values()))
        found = " and ".join(f"{name} {size}" for name, size in uneven.items())
        return f"learner.mesh.tensor: {mesh.tensor} does not divide {found} of the model; take {works}"
    return ""


def _problem_with_experts(mesh: Mesh, model: Mapping[str, Any]) -> str:
    experts = Sizes.of(model).dims.get("experts", 0) if family_of(model).moe else 0
    if not experts:
        return f"learner.mesh.expert: {mesh.expert} with a {model['model_type']} model, which has no experts; take 1"
    if experts % mesh.expert:
        works = next(n for n in range(mesh.expert, 0, -1) if experts % n == 0)
        return f"learner.mesh.expert: {mesh.expert} does not divide the {experts} experts of the model; take {works}"
    return ""


def problem_with_kernel(learner: LearnerSettings, head_dim: int) -> str:
    """Why attention pads on any GPU; empty where the kernel of rows without padding may run. Of a dry run, too."""
    if learner.attention == "sdpa":
        return "learner.attention is 'sdpa'"
    if learner.compute_dtype != "bfloat16":
        return f"the kernel needs learner.compute_dtype 'bfloat16', it is {learner.compute_dtype!r}"
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        return f"the kernel takes head sizes in steps of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, the model has {head_dim}"
    return ""
