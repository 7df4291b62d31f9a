"""LoRA (Hu et al. 2021, 2106.09685): frozen weights, float32 adapters in training.

A projection becomes y = W x + b + alpha / rank · B A x. A begins uniform in ± 1/sqrt(inputs) and B at zero, as in peft,
so version 0 is the model itself. What has no gradient needs neither a float32 master nor moments nor a place on the
weight bus: the 16 bytes of a parameter become 2 in bfloat16, and an update is the adapters.

Names are peft's, with `base_model.model.` before the module, so peft, SGLang and vLLM read an adapter folder.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.learner import Lora
from learner.layout import Layout, Shard, gather
from weight_bus.adapters import is_adapted, names_of

A, B = "lora_A", "lora_B"


class AdaptedLinear(torch.nn.Module):
    """A projection whose weight and bias are frozen, with an adapter."""

    def __init__(self, linear: torch.nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, lora.scale
        outputs, inputs = linear.weight.shape
        self.lora_A = torch.nn.Linear(inputs, lora.rank, bias=False, device="meta", dtype=torch.float32)
        self.lora_B = torch.nn.Linear(lora.rank, outputs, bias=False, device="meta", dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[..., outputs]."""
        added: Tensor = self.lora_B(self.lora_A(x))
        return torch.nn.functional.linear(x, self.weight, self.bias) + self.scale * added


def adapt(transformer: Any, lora: Lora, compute_dtype: torch.dtype) -> None:
    """Freeze a transformers model on the meta device, and add adapters to its projections."""
    transformer.to(compute_dtype).requires_grad_(False)
    for layer in transformer.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in lora.projections:
                if hasattr(part, name):
                    setattr(part, name, AdaptedLinear(getattr(part, name), lora))


def initialize(adapters: Iterable[Shard], seed: int) -> None:
    """Give A its random rows, the same at every number of ranks, and B zeros; what else is in training stays."""
    for shard in adapters:
        if f".{A}." not in shard.name:
            if f".{B}." in shard.name:
                shard.local.zero_()
            continue
        own = int.from_bytes(hashlib.blake2b(f"{seed}/{shard.name}".encode(), digest_size=7).digest(), "big")
        bound = shard.shape[1] ** -0.5
        whole = torch.empty(shard.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(own))
        shard.local.copy_(whole[shard.box.slices])


def merged(
    layout: Layout, frozen: Iterable[Shard], adapters: Iterable[Shard], lora: Lora, group: dist.ProcessGroup
) -> Iterator[Shard]:
    """This rank's float32 rows of the model's tensors, adapters added. A collective: exhaust it.

    They lie where the adapters do. `group` is of those that hold one copy of the model, with a backend for that memory.
    """
    own = {shard.name: shard for shard in adapters}
    all_a = dict(gather(layout, [shard for name, shard in own.items() if f".{A}." in name], torch.float32, group))
    place = next(iter(own.values())).local.device
    for shard in frozen:
        weight = shard.local.to(place, torch.float32)
        if is_adapted(shard.name, lora.projections):
            a, b = names_of(shard.name)
            weight = torch.addmm(weight, own[b].local, all_a[a], alpha=lora.scale)
        yield replace(shard, local=weight)
