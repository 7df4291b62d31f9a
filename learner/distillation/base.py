"""What a distillation is given, what it returns, and what it declares. Importing it imports no torch.

Shapes: every tensor over tokens is [n], one element for each token in the loss, as for losses. A distillation gives a
divergence from the teacher for each token; the caller weighs it, leaves tokens out and adds it up
(learner/objective), or takes it from the tokens' advantages.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from learner.teacher_view import Direction as Direction
from slipstream.runtime import variants

if TYPE_CHECKING:
    from torch import Tensor

Factor = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Gives = Literal["logprobs", "top", "vocabulary"]


@dataclass(frozen=True, slots=True)
class DistillationFacts:
    """What the objective and refusals go by."""

    gives: Gives = "logprobs"
    """What it needs of a teacher: logprobs of the sampled tokens, its own top k, or its whole vocabulary."""
    in_advantages: bool = False
    """The divergence goes into advantages, not into the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationInputs:
    """One row as a distillation sees it."""

    logprobs: "Tensor"
    """[n] of the policy in training, with a gradient."""
    behaviour_logprobs: "Tensor"
    """[n] of the policy that sampled the token."""
    teacher_logprobs: "Tensor | None" = None
    """[n] of the teacher; None where its whole vocabulary is compared."""
    top_logprobs: "Tensor | None" = None
    """[n, k] of the policy at the teacher's own top tokens, with a gradient."""
    teacher_top: "Tensor | None" = None
    """[n, k] of the teacher at them, the likeliest first."""
    divergence: "Tensor | None" = None
    """[n] over the whole vocabulary, with a gradient, in the direction of the option of this name."""
    confidence: "Tensor | None" = None
    """[n] probability that the teacher gives to its likeliest token; None where it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOutput:
    """What a distillation gives back, where it has more to say than the divergence."""

    kl: "Tensor"
    """[n] with a gradient, but for one that goes into advantages."""
    kept: "Tensor | None" = None
    """[n] bool, tokens that it teaches; None keeps all."""


def common(
    *,
    coef: Factor = 1.0,
    coef_end: Factor | None = None,
    over_steps: Count = 0,
    task: Factor = 1.0,
    first_tokens: Count = 0,
) -> None:
    """Options that every declared distillation has.

    Args:
        coef: factor of the divergence.
        coef_end: factor from step `over_steps` on, on a straight line from `coef` at step 0; none keeps `coef`.
        over_steps: see `coef_end`.
        task: factor of advantages from rewards; 0 distils alone.
        first_tokens: only so many first tokens in the loss of each answer are taught; 0 has all.
    """


COMMON = inspect.signature(common).parameters


def declare(*, gives: Gives, in_advantages: bool = False) -> Callable[..., Any]:
    """Say what a distillation is, above its function, and give it the options that all have."""

    def declared(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(inputs: DistillationInputs, **options: Any) -> Any:
            return function(inputs, **{name: value for name, value in options.items() if name not in COMMON})

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        merged = signature.replace(parameters=[*signature.parameters.values(), *COMMON.values()])
        call.__signature__ = merged  # type: ignore[attr-defined]
        return variants.declare(DistillationFacts(gives, in_advantages))(call)

    return declared


def sure_enough(inputs: DistillationInputs, min_confidence: float) -> "Tensor | None":
    """[n] tokens where the teacher is; None for all."""
    return None if inputs.confidence is None or not min_confidence else inputs.confidence >= min_confidence
