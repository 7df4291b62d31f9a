"""What the critic minimises: squared errors, clipped around the values of the step's start."""

import torch

from learner.objective import Measurements
from learner.rows import Row


class ValueLoss:
    """Squared error of values, clipped.

    1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), mean over all tokens of the batch.
    Schulman et al. 2017 in the form of OpenAI's baselines and verl: past the clip range an error that shrinks further
    pulls no more, one that grows does.
    """

    def __init__(self, clip: float, global_tokens: int) -> None:
        self._clip, self._share = clip, 1 / max(1, global_tokens)

    def __call__(self, row: Row, values: torch.Tensor) -> tuple[torch.Tensor, Measurements]:
        """The row's share of the loss, with a gradient, and sums over its tokens.

        Args:
            row: with `values` of the start of the step and `returns`.
            values: [n] float32 of the critic in training.
        """
        assert row.values is not None and row.returns is not None
        near = values.clamp(row.values - self._clip, row.values + self._clip)
        free, bounded = (values - row.returns).square(), (near - row.returns).square()
        losses = torch.maximum(free, bounded) / 2
        loss = losses.sum() * self._share
        now = values.detach()
        return loss, {
            "loss": loss.detach(),
            "clipped": (bounded > free).sum(),
            "values": now.sum(),
            "tokens": torch.tensor(len(now), device=now.device),
        }
