"""Whether functions of the user's own can be used.

Rewards and environments are loaded as rollout servers load them, in processes with the same limits; losses, advantages
and corrections are called once.
"""

import asyncio

import numpy as np

from configs.schema import Config
from learner.advantages import AdvantageInputs, advantages_of, build_advantage
from learner.rules import Chosen
from rollout_server.tasks.rewards.pool import key_variables, rewards_of
from slipstream.runtime.variants import VariantFails

ON_GPUS = (RuntimeError, ValueError, AssertionError)
"""What torch and Triton raise where code for GPUs, or for several ranks, is called on a CPU."""
SURE = {"exact", "environment", "numeric", "format", "length", "regex"}
"""Built-in rewards that need nothing but their options, which the schema has checked."""


def load(config: Config) -> None:
    """Load every part of the reward and the environment once. Raises RewardError, EnvironmentFailed: one cannot be."""
    if {part.spec for part in config.reward.parts} <= SURE and config.environment.function is None:
        return
    asyncio.run(_load(config))


async def _load(config: Config) -> None:
    async with rewards_of(config.reward.model_copy(update={"workers": 1})):
        pass
    if config.environment.function is None:
        return
    from rollout_server.tasks.environments.pool import environments_of  # loads torch

    environment = config.environment.model_copy(update={"workers": 1})
    async with environments_of(environment, key_variables(config.reward)):
        pass


def try_advantage(config: Config, parts: Chosen) -> None:
    """Call an advantage that is not built in on two made-up groups. Raises VariantFails."""
    if parts.advantage.is_built_in:
        return
    size = config.rollout.group_size
    rewards = np.linspace(0, 1, 2 * size, dtype=np.float32)
    groups, tokens = np.repeat(np.arange(2, dtype=np.int32), size), np.full(2 * size, 3, np.int32)
    made_up = AdvantageInputs(rewards=rewards, groups=groups, loss_tokens=tokens)
    advantages_of(build_advantage(config.algorithm), made_up)


def try_loss(config: Config, parts: Chosen) -> None:
    """Call a loss and a correction that are not built in on made-up answers, on a CPU. Raises VariantFails."""
    algorithm = config.algorithm
    if parts.loss.is_built_in and (parts.correction is None or parts.correction.is_built_in):
        return
    import torch  # here, because a run with built-in ones needs none in this process

    from learner.corrections import Rho, build_correction
    from learner.losses import LossInputs, build_loss

    lengths, logprobs = torch.tensor([1, 2, 3]), torch.linspace(-2.0, -0.5, 6)
    moved = torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, 0.0])
    loss, _ = build_loss(algorithm.loss)
    given = loss(
        LossInputs(
            logprobs=logprobs.clone().requires_grad_() + 0,  # no leaf, as in a step: it may be changed in place
            proximal_logprobs=logprobs - moved,
            advantages=torch.tensor([1.0, -1.0, -1.0, 0.5, 0.5, 0.5]),
            lengths=lengths,
            groups=torch.tensor([0, 0, 1]),
        )
    )
    if not given.loss.isfinite().all():
        raise VariantFails(f"algorithm.loss: {parts.loss.name!r} gave a loss that is not finite; correct it")
    build_correction(algorithm, parts.loss.facts)(Rho(moved, lengths))
