"""The ROUTER of a reward server as a target; its model is not asked."""

import time
from typing import Any

from replay.channel import AsyncRouter, WireError
from rollout_server.reward_model.messages import TO_REWARD
from rollout_server.reward_model.server import RewardServer
from tests.security.fuzz.targets import HOST, PATIENCE_S, RUN, RUN_DRAINS, RouterTarget, Vanished, discard


class RewardTarget(RouterTarget):
    """What it does with each message, and the rounds that follow; every answer gets the score 1."""

    kinds = TO_REWARD

    async def open(self) -> None:
        self._router = AsyncRouter(HOST, 0, RUN, TO_REWARD)
        self._begin()

    def _begin(self) -> None:
        """New peers: who has once sent a large number is refused all lower ones."""
        not_loaded: Any = None
        self._server = RewardServer(self._router, not_loaded, "models/reward")
        self.leave()
        for name in ("r0", "r1", "x"):
            self.connect(self._router.address, f"{name}.{self._drained}")

    async def drain(self, count: int) -> None:
        goal, deadline = self.read + count, time.monotonic() + PATIENCE_S
        while self.read < goal:
            if time.monotonic() > deadline:
                raise Vanished(f"{goal - self.read} of {count} messages")
            await self._router.wait(0.2)
            while (arrived := await self._router.receive()) is not None:
                self.count([arrived[1]])
                if not isinstance(arrived[1], WireError):
                    await self._server._handle(arrived[0], arrived[1].message)
            for peer in self._peers:
                discard(peer)
        for key in self._server._next_round(time.monotonic()):
            request = self._server._waiting[key].request
            await self._server._answer(key, [(1.0, "")] * len(request.completions))
        self._drained += 1
        if self._drained % RUN_DRAINS == 0:
            self._begin()

    def close(self) -> None:
        self.leave()
        self._context.term()
        self._router.close()
