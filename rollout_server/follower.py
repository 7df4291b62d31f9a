"""Keeps an engine at the newest proven version: pause, load, digest; once proven, resume.

The engine lives on the event loop, the subscriber blocks in collectives: it has a thread, whose callbacks each hand
one step to the loop and wait for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from configs.schema import Config
from replay.channel import load_keys
from rollout_server.engines import Engine, staging_in
from rollout_server.engines.base import PauseMode
from slipstream.runtime.hang import expired
from slipstream.runtime.trace import Recorder, to_ns
from weight_bus.control import wake_quickly
from weight_bus.digest import combined
from weight_bus.errors import BusClosed
from weight_bus.remote import RemoteIntake
from weight_bus.staging import Staging
from weight_bus.subscriber import Subscriber

log = logging.getLogger(__name__)
T = TypeVar("T")
Digests = Mapping[str, int]


class WeightFollower:
    """Follows the weight bus for one engine, which lives on the running event loop.

    Args:
        on_live: called with (version, incarnation) when the engine serves a proven version.
        on_quarantine: called with the reason when the engine holds something else.
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
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder.off()
        self.failure: BaseException | None = None
        """What ended the subscriber's thread."""
        self.gauges: dict[str, float] = {"weight_updates": 0.0, "pause_s": 0.0, "pausing_s": 0.0, "quarantines": 0.0}
        self._config = config
        self._engine = engine
        self._name = name
        self._on_live = on_live
        self._on_quarantine = on_quarantine
        self._make_subscriber = subscriber
        self._loop = asyncio.get_running_loop()
        self._address: str | None = None
        self._subscriber: Subscriber | None = None
        self._thread: threading.Thread | None = None
        self._paused_at: float | None = None
        """Since when the engine stands still, for an update that may have failed since."""
        self.digest = ""
        """Of what the last update left in the engine."""
        self._pinned: dict[int, str] = {}
        """Digest of each version that was pinned."""
        self._stages = staging_in(config, engine)
        # of all subscribers: the engine keeps it mapped, so another set would not fit beside it on a GPU
        self._staging = Staging()

    def follow(self, address: str, run_id: str) -> None:
        """Subscribe to the publisher at this address; a new address replaces the old subscription.

        At an address that stays, the next learner is another publisher: the subscriber joins it by itself, and each
        activation is announced under the incarnation of the publisher that it came from. A subscription that its
        publisher has ended is made anew.
        """
        here = address == self._address and self._thread is not None and self._thread.is_alive()
        if here or self.failure is not None:
            return
        if self._subscriber is not None:
            self._subscriber.stop()  # its thread ends by itself; joining it here would block this loop
        self._address = address
        stages, bus, network = self._stages, self._config.weight_bus, self._config.network
        self._subscriber = self._make_subscriber(
            address,
            name=self._name,
            config=bus,
            host=network.host,
            run_id=run_id,
            keys=load_keys(network.keys),
            intake=RemoteIntake(lambda: self.wait_for(stages.link()), bus, run_id, self._load) if stages else None,
            staging=self._staging,
            on_silence=_silence,
        )
        run = partial(self._run, self._subscriber, self._thread)
        self._thread = threading.Thread(target=run, name="weight-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the bus."""
        if self._subscriber is not None and self._thread is not None:
            self._subscriber.stop()
            if self._stages is not None:
                self._stages.close()
            self._thread.join(timeout=self._config.weight_bus.collective_timeout_s + 1)
            self._subscriber = self._thread = None

    async def pause(self) -> None:
        """Stop the engine as on_new_weights says."""
        if self._paused_at is None:
            began = time.monotonic()
            with self._recorder.span("weights", "pausing"):
                await self._engine.pause(cast(PauseMode, self._config.on_new_weights))
            self._paused_at = began
            self.gauges["pausing_s"] = time.monotonic() - began

    async def update(self, load: Callable[[], Awaitable[None]]) -> Digests:
        """Pause, run `load`; digests of what the engine then holds."""
        await self.pause()
        with self._recorder.span("weights", "load"):
            await load()
        with self._recorder.span("weights", "digest"):
            digests = await self._engine.digest()
        self.digest = combined(digests)
        return digests

    async def _activate(self, version: int, incarnation: int, pin: bool) -> None:
        """Serve what was loaded and has been proven."""
        if pin:
            if self._pinned.get(version) != self.digest:
                # a resumed learner may have made other weights, and the word that the earlier ones are lost got lost
                await self._engine.unpin(version)
            await self._engine.pin(version)
            self._pinned[version] = self.digest
        await self._go_on()
        self.gauges["weight_updates"] += 1
        await self._on_live(version, incarnation)

    async def _go_on(self) -> None:
        await self._engine.resume()
        if self._paused_at is not None:
            began, ended = self._engine.stood() or (self._paused_at, time.monotonic())
            self.gauges["pause_s"] = ended - began
            self._recorder.add("weights", "paused", to_ns(began), to_ns(ended))
        self._paused_at = None

    async def _quarantine(self, version: int, reason: str) -> None:
        self.gauges["quarantines"] += 1
        log.error("weights of version %d are not live: %s [corrupt]; this engine is quarantined", version, reason)
        await self._on_quarantine(reason)

    async def _busy(self) -> tuple[float, str] | None:
        """For how long at most an evaluation keeps the version that is live, and which."""
        held = self._engine.holds()
        if held is None or self._paused_at is not None:
            return None  # what stands still waits for nothing
        return self._config.evaluation.deadline_s, f"evaluates v{held}"

    async def _reasons_to_wait(self) -> tuple[int | None, bool]:
        """The version that an evaluation holds, and whether requests are drained first."""
        return self._engine.holds(), self._config.on_new_weights == "drain" and bool(self._engine.running_tokens())

    def _run(self, subscriber: Subscriber, before: threading.Thread | None) -> None:
        """The subscriber's thread. What follows runs in it, the coroutines above on the event loop."""
        wake_quickly()
        try:
            if before is not None:
                before.join()  # ends at its next message, or with the update that it is in: one load at a time
            while True:
                subscriber.receive(
                    self._load,
                    activate=lambda version, evaluate: self.wait_for(
                        self._activate(version, subscriber.incarnation, evaluate)
                    ),
                    quarantine=lambda version, reason: self.wait_for(self._quarantine(version, reason)),
                    busy=lambda: self.wait_for(self._busy()),
                )
        except BusClosed as closed:
            log.info("weight bus: %s", closed)
        except BaseException as error:  # the heartbeat raises it: a follower must not die silently
            self.failure = error
            raise
        finally:
            subscriber.close()

    def _load(self, version: int, update: Any) -> Digests:
        """Start an update from the staging buffers; digests of what the engine then holds."""
        self.announce_wait()
        # of another subscription by now: the engine waits for `resume`, as with any digests that it does not hold
        expected = self._subscriber.expected if self._subscriber is not None else None
        return self.wait_for(self.update(partial(self._engine.load, update, version, expected)))

    def announce_wait(self) -> None:
        """Announce to the publisher that the engine applies this version late, and why."""
        held, drains = self.wait_for(self._reasons_to_wait())
        if self._subscriber is None or self._paused_at is not None:
            return  # one that stands still already waits for nothing
        waits: dict[str, float] = {}
        if held is not None:
            waits[f"evaluates v{held}"] = self._config.evaluation.deadline_s
        if drains:  # afterwards
            waits["drains running requests"] = self._config.replay.lease_s
        if waits:
            self._subscriber.hold(sum(waits.values(), self._config.weight_bus.deadline_s), ", then ".join(waits))

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _silence(what: str, waited_s: float) -> str:
    """The hang report of a publisher that has been silent past the deadline; the subscriber waits on."""
    return expired(what, owed_by=("learner-0",), waited_s=waited_s, key="weight_bus.deadline_s", ends=False)
