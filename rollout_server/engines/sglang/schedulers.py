"""What the schedulers of an engine do with their weights, order by order; see `update.orders` and `update.armed`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.sglang.update.orders import StagingFolder

PROOF_LOOK_S = 0.001
"""A forward takes some ten."""


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
        self.tokens: Mapping[str, int] = {}
        """How many each request had at the last load."""
        self.tainted = False
        """Whether they have decoded since with weights that were not proven in the end."""

    async def order(self, write: Callable[[StagingFolder], None]) -> Mapping[str, int]:
        """Write an order and have it carried out; digests of what they hold, if any."""
        await asyncio.to_thread(write, self._staging)
        return self._staging.digests(self._checked(await self._carried_out(None)))

    async def load(self, version: int) -> Mapping[str, int]:
        """Load the update that is written; digests of what they hold."""
        self.stopped, self.stood, self.tokens, self.tainted = True, None, {}, False
        replies = await self._carried_out(version)
        self.tokens, self.tainted = replies[0]["tokens"], replies[0]["proven"] is None
        self._checked(replies)
        if self.tainted:
            replies = await self._proven(replies)
        self.stopped = not all(reply["proven"] for reply in replies)
        self.tainted = self.tainted and self.stopped
        if not self.stopped:
            ends = (reply["stood"][1] + reply.get("settled_s", 0.0) for reply in replies)
            self.stood = min(reply["stood"][0] for reply in replies), max(ends)
        return self._staging.digests(replies)

    async def _proven(self, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The replies, with what their schedulers have found beside a forward."""
        proofs: list[dict[str, Any]] = []

        def are_there() -> bool:
            proofs[:] = self._staging.proofs(self._sglang.num_ranks)
            return bool(proofs)

        limit_s, key = self._sglang.deadline_s, "rollout.engine_deadline_s"
        await self._sglang.until(are_there, limit_s, "the digests of live weights", key, look_s=PROOF_LOOK_S)
        self.seconds["apply_digest_s"] = max(proof["settled_s"] for proof in proofs)
        return self._checked([reply | proof for reply, proof in zip(replies, proofs, strict=True)])

    async def resume(self) -> None:
        """Decode on, if they do not."""
        if self.stopped:
            await self._sglang.resume()
        self.stopped = False

    async def _carried_out(self, version: int | None) -> list[dict[str, Any]]:
        """What each answers to the order."""
        await self._sglang.run_loader(version)
        replies = await asyncio.to_thread(self._staging.replies, self._sglang.num_ranks)
        names = replies[0]["seconds"]
        self.seconds = {f"apply_{name}_s": max(reply["seconds"].get(name, 0.0) for reply in replies) for name in names}
        return replies

    def _checked(self, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for rank, reply in enumerate(replies):
            if reply["error"]:
                raise EngineError(f"scheduler {rank} could not load: {reply['error']}")
        self._staging.mapped_by_all()
        return replies
