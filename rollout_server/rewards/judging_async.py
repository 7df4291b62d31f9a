"""Runs an asynchronous reward function over samples, all at once. Runs in the worker process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from rollout_server.rewards.base import Sample
from rollout_server.rewards.judging import Verdict, explained, together, verdict
from rollout_server.rewards.loading import RewardFunction


class AsyncJudge:
    """Keeps one event loop over all requests, so that the function may keep its connections.

    A call that takes longer than the timeout is cancelled here and the process lives on; the pool kills it only
    when the function blocks the loop.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def judge(self, samples: Sequence[Sample], send: Callable[[list[Verdict]], None]) -> None:
        """Call the function on all samples and send every verdict once, as soon as it is there."""
        self._runner.run(self._judge(samples, send))

    async def _judge(self, samples: Sequence[Sample], send: Callable[[list[Verdict]], None]) -> None:
        if self._function.convention == "trl":
            start = time.perf_counter()
            result = await self._attempt(samples)
            send(together(result, len(samples), time.perf_counter() - start))
            return

        async def one(index: int, sample: Sample) -> None:
            start = time.perf_counter()
            value, error = await self._attempt(sample)
            send([verdict(index, value, error, time.perf_counter() - start)])

        await asyncio.gather(*(one(index, sample) for index, sample in enumerate(samples)))

    async def _attempt(self, argument: Any) -> tuple[Any, str | None]:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._function.call(argument), None
        except TimeoutError as error:
            if limit.expired():
                return None, f"timed out after {self._timeout_s:g} s"
            return None, explained(error)
        except asyncio.CancelledError:
            raise  # of the loop, which closes
        except BaseException as error:  # noqa: BLE001 - code of the user: whatever it raises is the verdict
            return None, explained(error)
