"""Follows the weight bus: pauses the engine, loads, proves and resumes, in the subscriber's own thread.

The engine lives on the event loop, the subscriber blocks in collectives; each callback here hands a coroutine
to the loop and waits for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from configs.schema import Config
from replay.channel import load_keys
from rollout_server.engines.base import Engine, PauseMode
from weight_bus.errors import BusClosed
from weight_bus.subscriber import Subscriber

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
T = TypeVar("T")


class WeightFollower:
    """Keeps one engine at the newest proven version."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        name: str,
        *,
        on_live: Callable[[int], Awaitable[None]],
        on_quarantine: Callable[[str], Awaitable[None]],
    ) -> None:
        self.config = config
        self.engine = engine
        self.name = name
        self.address: str | None = None
        self.failure: BaseException | None = None
        self.gauges: dict[str, float] = {"weight_updates": 0.0, "pause_s": 0.0, "quarantines": 0.0}
        self._on_live = on_live
        self._on_quarantine = on_quarantine
        self._loop = asyncio.get_running_loop()
        self._subscriber: Subscriber | None = None
        self._thread: threading.Thread | None = None
        self._paused_at = 0.0

    def follow(self, address: str, run_id: str) -> None:
        """Subscribe to the publisher at `address`; a new address replaces the old subscription."""
        if address == self.address:
            return
        if self._subscriber is not None:
            self._subscriber.stop()  # its thread ends by itself; joining it here would block this loop
        self.address = address
        subscriber = Subscriber(
            address,
            name=self.name,
            config=self.config.weight_bus,
            host=self.config.network.host,
            run_id=run_id,
            keys=load_keys(self.config.network.keys),
        )
        self._subscriber = subscriber
        self._thread = threading.Thread(target=self._run, args=(subscriber,), name="weight-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the bus."""
        if self._subscriber is not None and self._thread is not None:
            self._subscriber.stop()
            self._thread.join(timeout=self.config.weight_bus.collective_timeout_s + 1)
            self._subscriber = self._thread = None

    def _run(self, subscriber: Subscriber) -> None:
        try:
            while True:
                subscriber.receive(self._load, activate=self._activate, quarantine=self._quarantine)
        except BusClosed as closed:
            log.info("weight bus: %s", closed)
        except BaseException as error:  # the heartbeat raises it: a follower must not die silently
            self.failure = error
            raise
        finally:
            subscriber.close()

    # ---- called by the subscriber, in its thread -------------------------------------------------------

    def _load(self, version: int, named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> Mapping[str, int]:
        self._announce_wait()
        return self._await(self._apply(version, named_tensors))

    def _announce_wait(self) -> None:
        """Tell the publisher when the engine will apply this version late, so that it is not taken for slow."""
        held = self.engine.holds()
        if held is not None:
            self._hold(self.config.evaluation.deadline_s, f"evaluates v{held}")
        elif self.config.on_new_weights == "drain" and self.engine.running_tokens():
            self._hold(self.config.replay.lease_s, "drains running requests")

    def _hold(self, limit_s: float, reason: str) -> None:
        if self._subscriber is not None:
            self._subscriber.hold(limit_s, reason)

    def _activate(self, version: int, evaluate: bool) -> None:
        self._await(self._go_live(version, evaluate))

    def _quarantine(self, version: int, reason: str) -> None:
        self.gauges["quarantines"] += 1
        log.error("weights of version %d are not live: %s [corrupt]; this engine is quarantined", version, reason)
        self._await(cast(Coroutine[Any, Any, None], self._on_quarantine(reason)))

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- on the event loop -----------------------------------------------------------------------------

    async def _apply(self, version: int, named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> Mapping[str, int]:
        self._paused_at = time.monotonic()
        await self.engine.pause(cast(PauseMode, self.config.on_new_weights))
        await self.engine.load(named_tensors, version)
        return await self.engine.digest()

    async def _go_live(self, version: int, evaluate: bool) -> None:
        if evaluate:
            await self.engine.pin(version)
        await self.engine.resume()
        if self._paused_at:
            self.gauges["pause_s"] = time.monotonic() - self._paused_at
        self.gauges["weight_updates"] += 1
        await self._on_live(version)
