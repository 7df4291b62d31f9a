"""The rewards of a run: functions in their pool, models behind endpoints, or both side by side."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from configs.data import Reward
from configs.rewards import Endpoint
from rollout_server.tasks.rewards import RewardOutcome, Rewards, Sample, added
from rollout_server.tasks.rewards.pool import RewardPool


@asynccontextmanager
async def rewards_of(reward: Reward) -> AsyncIterator[Rewards]:
    """What judges by the parts of `reward.function`, until the end of the block.

    Raises:
        RewardError: a function cannot be loaded, or the key of an endpoint is missing.
    """
    remote = [part for part in reward.parts if isinstance(part.settings, Endpoint)]
    found: list[Rewards] = []
    async with AsyncExitStack() as stack:
        if remote:
            from rollout_server.tasks.rewards.remote.remote import RemoteRewards

            found.append(await stack.enter_async_context(RemoteRewards(remote, is_alone=len(reward.parts) == 1)))
        if len(remote) < len(reward.parts):
            found.append(await stack.enter_async_context(RewardPool(reward)))
        yield Side(found) if len(found) > 1 else found[0]


class Side:
    """Judges of the same samples, side by side, whose scores are added."""

    def __init__(self, judges: Sequence[Rewards]) -> None:
        self._judges = judges

    def gauges(self) -> dict[str, float]:
        """Those of the judge whose oldest answer waits longest."""
        return max((judge.gauges() for judge in self._judges), key=lambda found: found["reward_oldest_s"])

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order. Raises RewardError: one of the judges cannot judge any more."""
        columns = await asyncio.gather(*(judge.score(samples) for judge in self._judges))
        return [added(row) for row in zip(*columns, strict=True)]
