"""Versions of a small policy under a real AdamW, with the odd one that is no ordinary step."""

import random
from collections.abc import Mapping

import torch

from scripts.chaos.bus_cluster import Weights

LR = 1e-6
LEAP_LR = 3e-3  # moves more than half of all elements in one step
STEPS_BEFORE = 40  # after so many, Adam's moments are those of a run that is under way
KINDS = {"step": 78, "leap": 4, "same": 4, "back": 14}
"""How often, in a hundred: an ordinary step, a leap, the last version again, the one before it again."""


class Policy:
    """Trains on noise: how many elements a step changes depends on the learning rate and on Adam's moments.

    Master weights are float32. Vectors and `gate` are published as they are, the others in bfloat16.
    """

    def __init__(self, seed: int, *, hidden: int = 256, layers: int = 4, kinds: Mapping[str, int] = KINDS) -> None:
        self._numbers, self._rng, self._kinds = torch.Generator().manual_seed(seed), random.Random(seed), kinds
        shapes = {"embed": (8 * hidden, hidden), "gate": (17, 19)}
        shapes |= {f"layers.{layer}.{matrix}": (hidden, hidden) for layer in range(layers) for matrix in "qkvo"}
        named = {name: torch.randn(shape, generator=self._numbers) * 0.02 for name, shape in shapes.items()}
        named |= {f"layers.{layer}.norm": torch.ones(hidden) for layer in range(layers)} | {"scale": torch.ones(1)}
        self._masters = {name: torch.nn.Parameter(tensor) for name, tensor in named.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for _ in range(STEPS_BEFORE):
            self._step(LR)
        self.last = self._before = self._rounded()

    def next(self) -> tuple[str, Weights]:
        """(kind, tensors as they are published), which stay as they are."""
        kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        last, before = self.last, self._before
        if kind in ("step", "leap"):
            self._step(LEAP_LR if kind == "leap" else LR)
            self.last = self._rounded()
        else:
            self.last = last if kind == "same" else before
        self._before = last
        return kind, self.last

    def _step(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = lr
        for weight in self._masters.values():
            weight.grad = torch.randn(weight.shape, generator=self._numbers)
        self._adam.step()

    def _rounded(self) -> Weights:
        keep = {name for name, weight in self._masters.items() if weight.ndim < 2 or name == "gate"}
        return {
            n: w.detach().to(torch.float32 if n in keep else torch.bfloat16, copy=True)
            for n, w in self._masters.items()
        }
