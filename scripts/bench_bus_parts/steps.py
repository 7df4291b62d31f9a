"""Versions of a model after real AdamW steps, without a training run: Adam works element by element.

So each tensor takes all its steps alone, with gradients of noise, and only its bf16 versions are kept. The share of
elements that change in a step depends on the learning rate and on how old Adam's moments are, not on what was trained
(docs/benchmarks/bus.md).
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

Version = dict[str, torch.Tensor]


def read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, file.get_tensor(name)


def versions(folder: Path, *, before: int, count: int, lr: float, device: torch.device, seed: int) -> list[Version]:
    """`count` consecutive versions in bf16 on the device, the first of them after `before` steps."""
    made: list[Version] = [{} for _ in range(count)]
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in read(folder):
        weight = torch.nn.Parameter(tensor.to(device=device, dtype=torch.float32))
        optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        weight.grad = torch.empty_like(weight)
        for step in range(1, before + count):
            weight.grad.normal_(generator=generator)
            optimizer.step()
            if step >= before:
                made[step - before][name] = weight.detach().to(torch.bfloat16)
    return made


def density(old: Version, new: Version) -> float:
    """Share of elements whose bits differ."""
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in new)
    return changed / sum(tensor.numel() for tensor in new.values())
