"""What is learned from answers in the data (learner.objective): one function each. Importing it imports no torch.

Such a loss is of a whole row, and gives back the row's share of the batch's loss with what it measured. Every name of a
measurement is a metric, and its values of all rows and ranks are added up, so each row adds its share of a mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.variants import Choice
from slipstream.runtime.variants import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from learner.rows import Row

    Taught = Callable[["TaughtInputs"], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtInputs:
    """One row as such a loss sees it."""

    row: "Row"
    """With `weights` [n], a token's share in the loss of the batch; `lengths`, `groups` and `trajectories` [m]; where a
    loss compares answers, those of a group follow each other in the order of the row of data."""
    logprobs: "Tensor"
    """[n] of the policy in training, at temperature 1, with a gradient."""


def sft(inputs: TaughtInputs) -> "tuple[Tensor, dict[str, Tensor]]":
    """Cross-entropy of the answer's tokens, averaged as algorithm.aggregation says."""
    loss = -(inputs.row.weights * inputs.logprobs).sum()
    return loss, {"sft/loss": loss.detach()}


TAUGHT: Kind[None] = Kind("learner.objective", "inputs", {"sft": sft}, undeclared=None)


def build_taught(choice: Choice) -> "Taught":
    """The loss that learner.objective chooses. Raises BadValue."""
    return TAUGHT.build(choice).call
