"""The objective of a row whose answers come from the data (learner/losses/taught.py)."""

import torch

from configs.variants import Choice
from learner.losses.taught import TaughtInputs, build_taught, sft
from learner.objective import Measurements, Objective
from learner.rows import Row


class TaughtObjective:
    """Stands where an Objective stands; nothing here is of rewards, behaviour logprobs or lag."""

    def __init__(self, choice: Choice) -> None:
        self.loss = build_taught(choice)

    def __call__(self, row: Row, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, Measurements]:
        """The row's share of the loss, 0-dim with a gradient, and what was measured."""
        loss, measured = self.loss(TaughtInputs(row=row, logprobs=logprobs))
        tokens = torch.full((), len(logprobs), device=logprobs.device)
        return loss, measured | {"loss": loss.detach(), "entropy": entropy.detach().sum(), "tokens": tokens}


class WithTaught:
    """An objective of sampled answers, with rows of learner.sft beside them in rows of their own."""

    def __init__(self, sampled: Objective, coef: float) -> None:
        self.sampled, self.coef = sampled, coef

    def __call__(self, row: Row, logprobs: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, Measurements]:
        """As Objective, whose measurements are of sampled tokens alone."""
        if not row.is_taught:
            return self.sampled(row, logprobs, *rest)
        loss, _ = sft(TaughtInputs(row=row, logprobs=logprobs))
        tokens = torch.full((), len(logprobs), device=logprobs.device)
        return loss, {
            "loss": loss.detach(),
            "sft_share": loss.detach(),
            "sft/loss": loss.detach() / self.coef,
            "sft_tokens": tokens,
        }
