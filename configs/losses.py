"""What each loss declares of itself: its ratio, and which clip bounds it reads. Imports no torch.

A loss from a file declares the same by `learner.losses.declare`; without that it counts as one without any ratio.
"""

from dataclasses import dataclass
from typing import Literal

Clip = tuple[float, float]
Ratio = Literal["none", "token", "answer"]
PPO_CLIP: Clip = (0.2, 0.28)
BOUNDS = ("clip_low", "clip_high", "clip_dual")
LEAST_ANSWER_CLIP = 0.01
"""Narrowest bounds of an answer's ratio against a 16-bit engine, whose rounding moves it by up to half as much."""
WIDE_ANSWER_CLIP = 0.02


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What the guards of lag, correction and bounds go by."""

    ratio: Ratio = "none"
    """Of policy to proximal policy that the loss takes: none, each token's own, or one of the whole answer."""
    bounds: tuple[str, ...] | None = ()
    """Which of BOUNDS it reads; None: nobody knows."""
    clip: Clip = PPO_CLIP
    """(clip_low, clip_high) where the configuration gives none."""

    @property
    def has_ratio(self) -> bool:
        return self.ratio in ("token", "answer")


LOSSES: dict[str, LossTraits] = {
    "ppo_clip": LossTraits("token", BOUNDS),  # bounds of DAPO
    "gspo": LossTraits("answer", ("clip_low", "clip_high"), (3e-4, 4e-4)),  # of the paper
    "cispo": LossTraits("token", ("clip_high",), (1.0, 4.0)),  # of TRL and ScaleRL
    "sapo": LossTraits("token"),
    "dppo_tv": LossTraits("token"),
    "policy_gradient": LossTraits(),
}
UNDECLARED = LossTraits(bounds=None)
"""Of a loss from a file that says nothing: uncorrected, unless algorithm.correction is set."""
