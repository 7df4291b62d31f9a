"""Whether rewards and environments can be loaded: as rollout servers load them, in processes with the same limits."""

import asyncio

from configs.schema import Config
from rollout_server.tasks.rewards.pool import key_variables, rewards_of

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
