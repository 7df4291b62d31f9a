"""What is learned from answers in the data (learner.objective): one function each. Importing it imports no torch.

Such a loss is of a whole row, and gives back the row's share of the batch's loss with what it measured. Every name of a
measurement is a metric, and its values of all rows and ranks are added up, so each row adds its share of a mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from configs.variants import Choice
from learner.losses.base import sequence_sums
from slipstream.runtime.variants import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from learner.rows import Row

    Taught = Callable[["TaughtInputs"], tuple[Tensor, dict[str, Tensor]]]


Factor = Annotated[float, Field(gt=0)]
Doubt = Annotated[float, Field(ge=0, lt=0.5)]


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


def dpo(
    inputs: TaughtInputs, *, beta: Factor = 0.1, label_smoothing: Doubt = 0.0
) -> "tuple[Tensor, dict[str, Tensor]]":
    """Direct preference optimization (Rafailov et al. 2023, 2305.18290), averaged over pairs.

    Loss -(1 - e) log s(m) - e log s(-m) of each pair, s being the logistic function: m is what the chosen answer's
    reward is above the rejected one's, and a reward beta (log policy - log reference). `label_smoothing` e is the share
    of pairs that are taken for labelled the wrong way round (conservative DPO, Mitchell 2023).
    """
    from torch.nn.functional import logsigmoid  # here, so that a launcher may look at losses without torch

    row = inputs.row
    assert row.reference_sums is not None, "learner/beside fills it in before the loss"
    ratios = sequence_sums(inputs.logprobs, row.lengths) - row.reference_sums
    chosen, rejected = (beta * ratios).view(-1, 2).unbind(1)
    margin = chosen - rejected
    shares = sequence_sums(row.weights, row.lengths).view(-1, 2).sum(1)
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    loss = (shares * losses).sum() + 0.0 * inputs.logprobs.sum()  # a row without pairs has a gradient, too
    measured = {
        "dpo/loss": losses,
        "dpo/accuracy": margin > 0,
        "dpo/margin": margin,
        "dpo/chosen": chosen,
        "dpo/rejected": rejected,
    }
    return loss, {name: (shares * value.detach()).sum() for name, value in measured.items()}


TAUGHT: Kind[None] = Kind("learner.objective", "inputs", {"sft": sft, "dpo": dpo}, undeclared=None)


def build_taught(choice: Choice) -> "Taught":
    """The loss that learner.objective chooses. Raises BadValue."""
    return TAUGHT.build(choice).call
