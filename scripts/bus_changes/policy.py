"""Versions of a small policy under a real AdamW, with the odd one that is no ordinary step."""

import random

import torch

LR = 1e-6
LEAP_LR = 3e-3
"""Moves more than half of all elements in one step."""
STEPS_BEFORE = 40
"""After so many, Adam's moments are those of a run that is under way (scripts/bench/model.py)."""
KINDS = {"step": 78, "leap": 4, "same": 4, "back": 14}
"""How often, in a hundred: an ordinary step, a leap, the last version again, the one before it again."""

Weights = dict[str, torch.Tensor]


def initial(numbers: torch.Generator, *, hidden: int, layers: int) -> Weights:
    """Master weights in float32. What is published of vectors and of `gate` stays so, of the others it is bfloat16."""
    named = {"embed": torch.randn(8 * hidden, hidden, generator=numbers) * 0.02}
    for layer in range(layers):
        for matrix in ("q", "k", "v", "o"):
            named[f"layers.{layer}.{matrix}"] = torch.randn(hidden, hidden, generator=numbers) * 0.02
        named[f"layers.{layer}.norm"] = torch.ones(hidden)
    named["gate"] = torch.randn(17, 19, generator=numbers) * 0.02
    named["scale"] = torch.ones(1)
    return named


class Policy:
    """Trains on noise: how many elements a step changes depends on the learning rate and on Adam's moments."""

    def __init__(self, seed: int, *, hidden: int = 256, layers: int = 4) -> None:
        self._numbers, self._rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self._masters = {
            n: torch.nn.Parameter(t) for n, t in initial(self._numbers, hidden=hidden, layers=layers).items()
        }
        self._adam = torch.optim.AdamW(self._masters.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for _ in range(STEPS_BEFORE):
            self._step(LR)
        self._made = [self._rounded(), self._rounded()]
        """The last version, and the one before it."""

    def next(self) -> tuple[str, Weights]:
        """(kind, tensors as they are published); nobody changes them afterwards."""
        kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
        last, before = self._made
        if kind in ("step", "leap"):
            self._step(LEAP_LR if kind == "leap" else LR)
            self._made = [self._rounded(), last]
        else:
            self._made = [last if kind == "same" else before, last]
        return kind, self._made[0]

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
