"""What a row carries of a teacher inside the learner's ranks. Importing it imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal["reverse", "forward"]
"""KL(policy || teacher), which leaves out what the teacher would not say, or KL(teacher || policy), which covers all
that it would."""


@dataclass(frozen=True, slots=True)
class TeacherView:
    """What a teacher gives its output head at the n tokens of a row, and the head: what logits follow from."""

    hidden: "Tensor"
    """[n, H]"""
    weight: "Tensor"
    """[V, H], whole, in the dtype of `hidden`; V is the policy's."""
    temperature: float
    """Divisor of products of the two."""
    softcap: float | None
    direction: Direction
