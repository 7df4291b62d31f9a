"""The objective of a row whose answers come from the data (learner/losses/taught.py)."""

import torch

from configs.variants import Choice
from learner.losses.taught import TaughtInputs, build_taught
from learner.rows import Row


class TaughtObjective:
    """Stands where an Objective stands; nothing here is of rewards, behaviour logprobs or lag."""

    def __init__(self, choice: Choice) -> None:
        self.loss = build_taught(choice)

    def __call__(
        self, row: Row, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The row's share of the loss, 0-dim with a gradient, and what was measured."""
        loss, measured = self.loss(TaughtInputs(row=row, logprobs=logprobs))
        tokens = torch.tensor(len(logprobs), device=logprobs.device)
        return loss, measured | {"loss": loss.detach(), "entropy": entropy.detach().sum(), "tokens": tokens}
