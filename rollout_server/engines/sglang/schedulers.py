"""What the schedulers of an engine do with their weights, order by order; see `update.orders` and `update.armed`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.sglang.update.orders import StagingFolder


class Schedulers:
    """Orders stand in the staging folder, and are carried out by all between the same two forwards.

    All raise EngineError where SGLang refuses, has died, or a scheduler could not do it.
    """

    def __init__(self, sglang: SGLangProcess, staging: StagingFolder) -> None:
        self._sglang, self._staging = sglang, staging
        self.seconds: dict[str, float] = {}
        """Of the last order."""
        self.stopped = False
        """Whether they stand still since the last load."""
        self.stood: tuple[float, float] | None = None
        """From when to when they stood still in the last load, if they have gone on by themselves."""

    async def order(self, write: Callable[[StagingFolder], None]) -> Mapping[str, int]:
        """Write an order and have it carried out; digests of what they hold, if any."""
        await asyncio.to_thread(write, self._staging)
        return self._staging.digests(await self._carried_out(None))

    async def load(self, version: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Load the update that is written; digests of what they hold, and how many tokens each request had then."""
        self.stopped, self.stood = True, None
        replies = await self._carried_out(version)
        self.stopped = not all(reply["proven"] for reply in replies)
        if not self.stopped:
            self.stood = min(reply["stood"][0] for reply in replies), max(reply["stood"][1] for reply in replies)
        return self._staging.digests(replies), replies[0]["tokens"]

    async def resume(self) -> None:
        """Decode on, if they do not."""
        if self.stopped:
            await self._sglang.resume()
        self.stopped = False

    async def _carried_out(self, version: int | None) -> list[dict[str, Any]]:
        """What each answers to the order."""
        await self._sglang.run_loader(version)
        replies = await asyncio.to_thread(self._staging.replies, self._sglang.num_ranks)
        for rank, reply in enumerate(replies):
            if reply["error"]:
                raise EngineError(f"scheduler {rank} could not load: {reply['error']}")
        self._staging.mapped_by_all()
        names = replies[0]["seconds"]
        self.seconds = {f"apply_{name}_s": max(reply["seconds"][name] for reply in replies) for name in names}
        return replies
