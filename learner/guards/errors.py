"""Errors of guards: one class for each way in which training has no effect, or the wrong one."""

from configs.errors import SlipstreamError


class SilentlyWrong(SlipstreamError, RuntimeError, code="SLIP-GUARD-01"):
    """Training has no effect, or the wrong one; names the symptom and the remedy."""


class FlatRewards(SilentlyWrong, code="SLIP-GUARD-02"):
    """The rewards of every group are equal, for limits.flat_reward_steps steps in a row."""


class NoGradient(SilentlyWrong, code="SLIP-GUARD-03"):
    """The gradient is exactly zero although advantages are not, for limits.zero_gradient_steps steps in a row."""


class NothingLearned(SilentlyWrong, code="SLIP-GUARD-04"):
    """Applied updates leave every weight as it was, for limits.zero_gradient_steps steps in a row."""


class NotFinite(SilentlyWrong, code="SLIP-GUARD-05"):
    """Loss or gradient is not finite, for limits.nonfinite_steps steps in a row."""


class EngineDiffers(SilentlyWrong, code="SLIP-GUARD-06"):
    """The engine does not run the policy that is trained."""


BY_GUARD = {
    "flat_reward_steps": FlatRewards,
    "zero_gradient_steps": NoGradient,
    "unchanged": NothingLearned,
    "nonfinite_steps": NotFinite,
    "nonfinite": NotFinite,
    "max_logprob_diff": EngineDiffers,
    "mismatch": EngineDiffers,
}
"""The error of an alarm that stops the run; SilentlyWrong for all others."""
