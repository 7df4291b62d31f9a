"""Keeps an engine at the newest proven version: an update is one coroutine, `WeightFollower._update`.

The engine lives on the event loop, the subscriber blocks in collectives: it has a thread, whose callbacks each hand
one step to the loop and wait for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from configs.schema import Config
from replay.channel import load_keys
from rollout_server.direct import DirectEnd
from rollout_server.engines import Engine, direct_updates, staging_in
from rollout_server.engines.base import PauseMode
from weight_bus.control import wake_quickly
from weight_bus.errors import BusClosed
from weight_bus.remote import RemoteIntake
from weight_bus.staging import Staging
from weight_bus.subscriber import Subscriber

log = logging.getLogger(__name__)
T = TypeVar("T")
Digests = Mapping[str, int]
Proven = tuple[int, bool]
"""(incarnation of the publisher, whether an evaluation of this version follows)."""


class WeightFollower:
    """Follows the weight bus for one engine.

    Args:
        config: of the run.
        engine: on the running event loop.
        name: of this rollout server.
        on_live: called with (version, incarnation) when the engine serves a proven version.
        on_quarantine: called with the reason when the engine holds something else.
        subscriber: makes the ends of the bus.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        name: str,
        *,
        on_live: Callable[[int, int], Awaitable[None]],
        on_quarantine: Callable[[str], Awaitable[None]],
        subscriber: type[Subscriber] = Subscriber,
    ) -> None:
        self.config = config
        self.engine = engine
        self.name = name
        self.address: str | None = None
        self.failure: BaseException | None = None
        self.gauges: dict[str, float] = {"weight_updates": 0.0, "pause_s": 0.0, "pausing_s": 0.0, "quarantines": 0.0}
        self._on_live = on_live
        self._on_quarantine = on_quarantine
        self._make_subscriber = subscriber
        self._loop = asyncio.get_running_loop()
        self._subscriber: Subscriber | None = None
        self._thread: threading.Thread | None = None
        self._updating: AsyncGenerator[Digests, Proven] | None = None
        self._paused_at: float | None = None
        """Since when the engine stands still, for an update that may have failed since."""
        self._serves = False
        """The engine holds the version that was activated last."""
        direct = direct_updates(config, engine)
        self._direct = DirectEnd(self, direct) if direct is not None else None
        self._stages = staging_in(config, engine)
        # of all subscribers: the engine keeps it mapped, so another set would not fit beside it on a GPU
        self._staging = Staging()

    def follow(self, address: str, run_id: str) -> None:
        """Subscribe to the publisher at this address; a new address replaces the old subscription.

        At an address that stays, the next learner is another publisher: the subscriber joins it by itself, and each
        activation is announced under the incarnation of the publisher that it came from. A subscription that its
        publisher has ended is made anew.
        """
        here = address == self.address and self._thread is not None and self._thread.is_alive()
        if here or self.failure is not None:
            return
        if self._subscriber is not None:
            self._subscriber.stop()  # its thread ends by itself; joining it here would block this loop
        self.address = address
        stages, bus = self._stages, self.config.weight_bus
        subscriber = self._make_subscriber(
            address,
            name=self.name,
            config=bus,
            host=self.config.network.host,
            run_id=run_id,
            keys=load_keys(self.config.network.keys),
            direct=self._direct,
            intake=RemoteIntake(lambda: self.wait_for(stages.link()), bus, run_id, self.load) if stages else None,
            staging=self._staging,
        )
        before, self._subscriber = self._thread, subscriber
        self._thread = threading.Thread(
            target=self._run, args=(subscriber, before), name="weight-follower", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Leave the bus."""
        if self._subscriber is not None and self._thread is not None:
            self._subscriber.stop()
            if self._stages is not None:
                self._stages.close()
            self._thread.join(timeout=self.config.weight_bus.collective_timeout_s + 1)
            self._subscriber = self._thread = None

    # ---- on the event loop -----------------------------------------------------------------------------

    async def _update(self, version: int, load: Callable[[], Awaitable[None]]) -> AsyncGenerator[Digests, Proven]:
        """Pause, load, prove, resume. Yields the engine's digests; continues once they are proven."""
        await self.pause()
        self._serves = False
        await load()
        incarnation, evaluate = yield await self.engine.digest()
        if evaluate:
            await self.engine.pin(version)
        await self._go_on()
        self.gauges["weight_updates"] += 1
        await self._on_live(version, incarnation)

    async def pause(self) -> None:
        """Stop the engine as on_new_weights says."""
        if self._paused_at is None:
            began = time.monotonic()
            await self.engine.pause(cast(PauseMode, self.config.on_new_weights))
            self._paused_at = began
            self.gauges["pausing_s"] = time.monotonic() - began

    async def call_off(self) -> None:
        """Resume a serving engine after an update that ended before touching it."""
        if self._serves:
            await self._go_on()

    def touch(self) -> None:
        """Note that the engine receives a part of an update."""
        self._serves = False

    async def _go_on(self) -> None:
        await self.engine.resume()
        if self._paused_at is not None:
            self.gauges["pause_s"] = time.monotonic() - self._paused_at
        self._paused_at, self._serves = None, True

    async def _resumed(self, proven: Proven) -> None:
        """Run the rest of the proven update."""
        assert self._updating is not None
        with suppress(StopAsyncIteration):  # its end
            await self._updating.asend(proven)

    async def _quarantined(self, version: int, reason: str) -> None:
        self.gauges["quarantines"] += 1
        log.error("weights of version %d are not live: %s [corrupt]; this engine is quarantined", version, reason)
        self._serves = False
        await self._on_quarantine(reason)

    # ---- in the subscriber's thread --------------------------------------------------------------------

    def _run(self, subscriber: Subscriber, before: threading.Thread | None) -> None:
        wake_quickly()
        try:
            if before is not None:
                before.join()  # ends at its next message, or with the update that it is in: one load at a time
            while True:
                subscriber.receive(
                    self.load,
                    activate=lambda _, evaluate: self.wait_for(self._resumed((subscriber.incarnation, evaluate))),
                    quarantine=lambda version, reason: self.wait_for(self._quarantined(version, reason)),
                )
        except BusClosed as closed:
            log.info("weight bus: %s", closed)
        except BaseException as error:  # the heartbeat raises it: a follower must not die silently
            self.failure = error
            raise
        finally:
            subscriber.close()

    def load(self, version: int, update: Any) -> Digests:
        """Start an update from the staging buffers; digests of what the engine then holds."""
        return self.begin(version, partial(self.engine.load, update, version))

    def begin(self, version: int, load: Callable[[], Awaitable[None]]) -> Digests:
        """Pause, run `load`; digests of what the engine then holds."""
        self.announce_wait()
        self._updating = self._update(version, load)
        return self.wait_for(self._updating.asend(None))  # type: ignore[arg-type]  # how a generator begins

    def announce_wait(self) -> None:
        """Announce to the publisher that the engine applies this version late, and why."""
        held, drains = self.wait_for(self._reasons_to_wait())
        if self._subscriber is None or self._paused_at is not None:
            return  # one that stands still already waits for nothing
        if held is not None:
            limit_s = self.config.evaluation.deadline_s + self.config.weight_bus.deadline_s
            self._subscriber.hold(limit_s, f"evaluates v{held}")
        elif drains:
            self._subscriber.hold(self.config.replay.lease_s, "drains running requests")

    async def _reasons_to_wait(self) -> tuple[int | None, bool]:
        """The version that an evaluation holds, and whether requests are drained first."""
        return self.engine.holds(), self.config.on_new_weights == "drain" and bool(self.engine.running_tokens())

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
