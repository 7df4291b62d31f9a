"""The rewards of a run: functions in their pool, models behind OpenAI-compatible endpoints, or both side by side.

questions  what a judge or a reward model is asked of an answer, and the score in its reply
asking     requests with a limit of time, retries and concurrency, on a thread with an event loop of its own
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from configs.data import Reward
from configs.rewards import Endpoint
from rollout_server.tasks.rewards import Rewards
from rollout_server.tasks.rewards.pool import RewardPool


@asynccontextmanager
async def rewards_of(reward: Reward) -> AsyncIterator[Rewards]:
    """What judges by the parts of `reward.function`, until the end of the block.

    Raises RewardError: a function cannot be loaded, or the key of an endpoint is missing.
    """
    remote = [part for part in reward.parts if isinstance(part.settings, Endpoint)]
    if not remote:
        async with RewardPool(reward) as functions:
            yield functions
        return
    from rollout_server.tasks.rewards.remote.asking import RemoteRewards  # loads httpx

    pool = RewardPool(reward) if len(remote) < len(reward.parts) else None
    async with RemoteRewards(remote, pool, is_alone=len(reward.parts) == 1) as rewards:
        yield rewards
