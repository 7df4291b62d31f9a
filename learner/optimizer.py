"""AdamW over the sharded float32 parameters, and the learning rate of each step."""

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch

from configs.learner import LearnerSettings
from learner.layout import spans
from learner.policy.model import Policy
from learner.policy.pinned import host_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
FINAL_SHARE = 0.1
"""Cosine and linear schedules end at this share of the peak."""
EMBEDDING = "embed_tokens.weight"
"""End of the name of a matrix that does not decay."""
OFFLOADED_BYTES = 256 * 1024 * 1024
"""Parameters whose moments come from host memory together."""


def lr_at(step: int, config: LearnerSettings, *, idle: int = 0) -> float:
    """Learning rate of step `step`, the first being 1.

    Linear warm-up that reaches the peak at step `warmup_steps`, then constant, or cosine or linear down to
    FINAL_SHARE of the peak at step `decay_steps`, or `total_steps`. In the first `idle` steps nothing is trained: all
    begins after them.

        Example: lr 1.0, warmup_steps 4: steps 1, 2, 3, 4, 5 have 0.25, 0.5, 0.75, 1.0, 1.0 (constant).
    """
    if step - idle < config.warmup_steps:
        return config.lr * (step - idle) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = idle + config.warmup_steps
    end = config.decay_steps or config.total_steps
    progress = min(1.0, max(0.0, (step - peak) / max(1, end - peak)))
    fall = (1 - math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else progress
    return config.lr * (1 - (1 - FINAL_SHARE) * fall)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on this rank's rows of each parameter, with fresh moments.

    It is elementwise, so it runs on the local rows as plain tensors: the same numbers as on DTensors, without
    their dispatch. The moments exist from the start, so that a checkpoint of any step has the same layout.
    Weight decay, 0 by default, is of matrices: norms, biases and the token embedding, also where it is the output head
    as well, have none. With learner.offload_optimizer the moments lie in host memory and come to the device for their
    update, a span of parameters at a time: the same kernel, the same bits.
    """

    def __init__(self, config: LearnerSettings, policy: Policy) -> None:
        self._policy = policy
        self._named = policy.local_parameters()
        self.masters = list(self._named.values())
        decays = [master.dim() > 1 and not name.endswith(EMBEDDING) for name, master in self._named.items()]
        others = compress(self.masters, map(operator.not_, decays))
        groups: list[dict[str, Any]] = [{"params": list(compress(self.masters, decays))}]
        self.adamw = torch.optim.AdamW(
            [*groups, {"params": list(others), "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._spans = [self.masters]
        if config.offload_optimizer:
            self._spans = list(spans(self.masters, lambda master: master.nbytes, OFFLOADED_BYTES))
        twice = self.masters * len(MOMENTS)
        if config.offload_optimizer:
            moments = [one.zero_() for one in host_tensors(twice, pinned=policy.device.type == "cuda")]
        else:
            moments = [torch.zeros_like(master) for master in twice]
        for number, master in enumerate(self.masters):
            own = dict(zip(MOMENTS, moments[number :: len(self.masters)], strict=True))
            self.adamw.state[master] = {"step": torch.zeros((), device=master.device), **own}

    @property
    def num_steps(self) -> int:
        """Updates applied so far."""
        return int(self.adamw.state[self.masters[0]]["step"])

    def set_steps(self, num_steps: int) -> None:
        """Set the number of updates applied so far, after a checkpoint was loaded."""
        for master in self.masters:
            self.adamw.state[master]["step"].fill_(num_steps)

    def moments(self, kind: str) -> dict[str, torch.Tensor]:
        """What of a moment of each parameter is here (one of MOMENTS), by its name, sharing memory."""
        return {name: self.adamw.state[master][kind] for name, master in self._named.items()}

    def step(self, lr: float) -> None:
        """Apply the gradients that the policy holds, at this learning rate."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        gradients = dict(zip(self.masters, self._policy.local_gradients(), strict=True))
        for span in self._spans:
            for master in span:
                master.grad = gradients[master]
            with _on_device(span, self.adamw.state):
                self.adamw.step()
            self.adamw.zero_grad()


@contextmanager
def _on_device(span: list[torch.Tensor], state: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> Iterator[None]:
    """The moments where their masters are; those that live elsewhere are copied there and back."""
    places = [
        (state[master], kind) for master in span for kind in MOMENTS if state[master][kind].device != master.device
    ]
    homes = [of[kind] for of, kind in places]
    for of, kind in places:
        of[kind] = of[kind].to(of["step"].device, non_blocking=True)
    yield
    for (of, kind), home in zip(places, homes, strict=True):
        home.copy_(of[kind], non_blocking=True)
        of[kind] = home
    if homes:
        torch.cuda.current_stream().synchronize()  # the host reads them when a checkpoint is written
