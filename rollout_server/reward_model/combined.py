"""Rewards of a run: a function in its pool, a reward model, or both."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from configs.data import Reward
from configs.rewards import Endpoint
from configs.schema import Config
from rollout_server.reward_model.client import RewardClient
from rollout_server.rewards import RewardError, RewardOutcome, Rewards, Sample, added
from rollout_server.rewards.pool import RewardPool


@asynccontextmanager
async def rewards_of(config: Config, addresses: Sequence[str], name: str) -> AsyncIterator[Rewards]:
    """The rewards of a run, until the end of the block; `addresses` are those of reward servers.

    Raises:
        RewardError: the function cannot be loaded, no reward server is known, or none is ready in time.
    """
    reward = config.reward
    if reward.model.path is not None and not addresses:
        raise RewardError(
            "reward.model.path: no address of a reward server; start one on this node with"
            " python -m rollout_server.reward_model.main and give the address that it prints as --reward"
        )
    async with AsyncExitStack() as stack:
        functions = await functions_of(config.reward, stack)
        if reward.model.path is None:
            assert functions is not None  # refused by the schema
            yield functions
        else:
            client = await stack.enter_async_context(RewardClient(config, addresses, name))
            yield Combined(client, functions, reward.model.weight or 0.0)


async def functions_of(reward: Reward, stack: AsyncExitStack) -> Rewards | None:
    """What judges by the parts of `reward.function`; None where the model alone does. Raises RewardError."""
    remote = [part for part in reward.parts if isinstance(part.settings, Endpoint)]
    found: list[Rewards] = []
    if remote:
        from rollout_server.rewards.remote.remote import RemoteRewards  # loads httpx, which others do without

        found.append(await stack.enter_async_context(RemoteRewards(remote, is_alone=len(reward.parts) == 1)))
    if len(remote) < len(reward.parts):
        found.append(await stack.enter_async_context(RewardPool(reward)))
    return Side(found) if len(found) > 1 else next(iter(found), None)


class Side:
    """Judges of the same samples, side by side, whose scores are added."""

    def __init__(self, judges: Sequence[Rewards]) -> None:
        self._judges = judges

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order. Raises RewardError: one of the judges cannot judge any more."""
        columns = await asyncio.gather(*(judge.score(samples) for judge in self._judges))
        return [added(row) for row in zip(*columns, strict=True)]


class Combined:
    """The model scores first, so that a function finds that score in its sample."""

    def __init__(self, client: RewardClient, functions: Rewards | None, weight: float) -> None:
        """Without functions the reward is the model's score; `weight` is what it counts beside a function's."""
        self._client, self._functions, self._weight = client, functions, weight

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order. Raises RewardError: model or function cannot be asked any more."""
        started = time.monotonic()
        judged = await self._client.score(samples)
        seconds = (time.monotonic() - started) / max(1, len(samples))
        if self._functions is None:
            return [outcome_of(score, error, seconds) for score, error in judged]
        scored = [number for number, (_, error) in enumerate(judged) if not error]
        with_score: list[Sample] = [{**samples[number], "model_score": judged[number][0]} for number in scored]
        of_function = dict(zip(scored, await self._functions.score(with_score), strict=True))
        return [
            self._sum(of_function[number], score, seconds)
            if number in of_function
            else outcome_of(score, error, seconds)
            for number, (score, error) in enumerate(judged)
        ]

    def _sum(self, outcome: RewardOutcome, score: float, seconds: float) -> RewardOutcome:
        if outcome.error is not None:
            return outcome
        metrics = {"function_score": outcome.score, "model_score": score, "model_seconds": seconds}
        total = outcome.score + self._weight * score
        return RewardOutcome(score=total, metrics=outcome.metrics | metrics, seconds=outcome.seconds)


def outcome_of(score: float, error: str, seconds: float) -> RewardOutcome:
    """The outcome of a sample that the model alone has judged."""
    if error:
        return RewardOutcome(score=math.nan, error=error, seconds=seconds)
    return RewardOutcome(score=score, metrics={"model_score": score, "model_seconds": seconds}, seconds=seconds)
