"""Errors of guards: one class for each way in which training has no effect, or the wrong one."""

from configs.errors import SlipstreamError


class SilentlyWrong(
    SlipstreamError,
    RuntimeError,
    code="SLIP-GUARD-01",
    cause="A rule of the limits section was broken for long enough: `stop`, or `roll_back` with none left.",
    mend="The message has number, bound and remedy; docs/howto/reward-collapse.md, docs/howto/guards.md.",
):
    """Training has no effect, or the wrong one; names the symptom and the remedy."""


class FlatRewards(
    SilentlyWrong,
    code="SLIP-GUARD-02",
    cause="The reward is constant: the function returns one number, or the task is far too easy or too hard.",
    mend="Call the function with `python -m rollout_server.try_reward`, read answers in the run folder, and mix in"
    " prompts that succeed now and then.",
):
    """The rewards of every group are equal, for limits.flat_reward_steps steps in a row."""


class NoGradient(
    SilentlyWrong,
    code="SLIP-GUARD-03",
    cause="Every token is clipped or masked: the policy is too far from the one that sampled, or a mask is wrong.",
    mend="Look at actor/pg_clipfrac and training/ess; lower learner.lr or replay.async_lag, widen algorithm.clip_high."
    " Where training/loss_tokens is 0, raise rollout.max_new_tokens (algorithm.overlong_filter) or take"
    " replay.on_stale=wait.",
):
    """The gradient is exactly zero although advantages are not, for limits.zero_gradient_steps steps in a row."""


class NothingLearned(
    SilentlyWrong,
    code="SLIP-GUARD-04",
    cause="Updates are applied and no weight changes: a learning rate of 0 or far too small, or all weights frozen.",
    mend="Raise learner.lr; look at learner.schedule, learner.warmup_steps and, with learner.lora, at its targets.",
):
    """Applied updates leave every weight as it was, for limits.zero_gradient_steps steps in a row."""


class NotFinite(
    SilentlyWrong,
    code="SLIP-GUARD-05",
    cause="Loss or gradient is NaN or infinite: the policy diverges, or rewards are huge.",
    mend="Lower learner.lr, look at the rewards, and go on from an earlier checkpoint.",
):
    """Loss or gradient is not finite, for limits.nonfinite_steps steps in a row."""


class EngineDiffers(
    SilentlyWrong,
    code="SLIP-GUARD-06",
    cause="Logprobs of engine and learner differ for the same weights: kernels, dtypes, or corrupt weights.",
    mend="Start the rollout servers anew, compare with the engine's last release, and look at"
    " weight_sync/digests_equal.",
):
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
