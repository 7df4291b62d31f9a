"""FSDP2's units of a model: what is gathered together."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from learner.layout import local_of
from learner.policy.memory import Budget
from learner.policy.meshes import Meshes
from learner.policy.moe.mixture import Experts


def shard(model: Any, meshes: Meshes, compute_dtype: torch.dtype, budget: Budget) -> None:
    """Make the units of a TokenModel on the meta device, so that nothing is allocated yet."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    inner = model.transformer
    apart = [] if inner.config.tie_word_embeddings else [inner.model.embed_tokens, inner.lm_head]
    blocks = [module for module in model.modules() if isinstance(module, Experts)] if meshes.experts else []
    for unit in [*blocks, *inner.model.layers, *apart, model]:
        # experts are given weights in float32, which stay so
        own = replace(precision, cast_forward_inputs=False) if isinstance(unit, Experts) else precision
        mesh = meshes.experts if meshes.experts and isinstance(unit, Experts) else meshes.data
        stays: dict[str, Any] = {} if unit is model else {"reshard_after_forward": not budget.keeps_gathered}
        fully_shard(unit, mesh=mesh, mp_policy=own, shard_placement_fn=cut_of(mesh.size(-1)), **stays)
        # Sum instead of mean; gloo has no pre-multiplied sum, so the plain one is asked for by name. Of one rank they
        # are the same, and FSDP would divide by 1 all the same.
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            unit.set_gradient_divide_factor(1.0)


def cut_of(ranks: int) -> Callable[[torch.nn.Parameter], Shard | None]:
    """In which dimension FSDP2 cuts a parameter: inside of experts, where their number does not go up in the ranks."""

    def cut(parameter: torch.nn.Parameter) -> Shard | None:
        here = local_of(parameter).shape
        return Shard(1) if len(here) == 3 and here[0] % ranks and here[1] % ranks == 0 else None

    return cut
