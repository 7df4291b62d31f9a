"""Follows the weight bus: pauses the engine, loads, proves and resumes, in the subscriber's own thread.

The engine lives on the event loop, the subscriber blocks in collectives; each callback here hands a coroutine
to the loop and waits for it.

With weight_bus.apply `direct` the engine receives by itself. What fails once it has begun to is no quarantine but the
end of this process: the launcher starts it again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from configs.schema import Config
from replay.channel import load_keys
from rollout_server.engines import DirectUpdates, Engine, EngineError, direct_updates, staging_in
from rollout_server.engines.base import PauseMode
from weight_bus.control import wake_quickly
from weight_bus.errors import BusClosed, EngineSpoiled, TransportError
from weight_bus.manifest import Entry
from weight_bus.remote import RemoteIntake, RemoteUpdate
from weight_bus.staging import Staging
from weight_bus.subscriber import Subscriber
from weight_bus.transports.base import Formation

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
        self._loop = asyncio.get_running_loop()
        self._make_subscriber = subscriber
        self._subscriber: Subscriber | None = None
        self._thread: threading.Thread | None = None
        self._paused_at = 0.0
        self._proven = False
        """The engine holds the version that was activated last."""
        self.paused = False
        """The engine stands still, for an update that may have failed since."""
        updates = direct_updates(config, engine)
        self._direct = DirectEnd(self, updates) if updates is not None else None
        self._stages = staging_in(config, engine)
        # of all subscribers: the engine has it mapped, and another one's would be a second set on its GPU
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
        subscriber = self._make_subscriber(
            address,
            name=self.name,
            config=self.config.weight_bus,
            host=self.config.network.host,
            run_id=run_id,
            keys=load_keys(self.config.network.keys),
            direct=self._direct,
            intake=self._remote_intake(run_id),
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

    def _run(self, subscriber: Subscriber, before: threading.Thread | None) -> None:
        wake_quickly()
        try:
            if before is not None:
                before.join()  # ends at its next message, or with the update that it is in: one load at a time
            activate = partial(self._activate, subscriber)
            while True:
                subscriber.receive(self._load, activate=activate, quarantine=self._quarantine)
        except BusClosed as closed:
            log.info("weight bus: %s", closed)
        except BaseException as error:  # the heartbeat raises it: a follower must not die silently
            self.failure = error
            raise
        finally:
            subscriber.close()

    def _remote_intake(self, run_id: str) -> RemoteIntake | None:
        stages = self._stages
        if stages is None:
            return None

        def load(version: int, update: RemoteUpdate) -> Mapping[str, int]:
            self.announce_wait()
            return self.wait_for(self._apply(partial(stages.load, update, version)))

        return RemoteIntake(lambda: self.wait_for(stages.link()), self.config.weight_bus, run_id, load)

    # ---- called by the subscriber, in its thread -------------------------------------------------------

    def _load(self, version: int, named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> Mapping[str, int]:
        self.announce_wait()
        return self.wait_for(self._apply(partial(self.engine.load, named_tensors, version)))

    def announce_wait(self) -> None:
        """Tell the publisher when the engine will apply this version late, so that it is not taken for slow."""
        held, drains = self.wait_for(self._reasons_to_wait())
        if held is not None:
            limit_s = self.config.evaluation.deadline_s + self.config.weight_bus.deadline_s
            self._hold(limit_s, f"evaluates v{held}")
        elif drains:
            self._hold(self.config.replay.lease_s, "drains running requests")

    def _hold(self, limit_s: float, reason: str) -> None:
        if self._subscriber is not None:
            self._subscriber.hold(limit_s, reason)

    def _activate(self, subscriber: Subscriber, version: int, evaluate: bool) -> None:
        self.wait_for(self._go_live(subscriber.incarnation, version, evaluate))

    def _quarantine(self, version: int, reason: str) -> None:
        self.gauges["quarantines"] += 1
        log.error("weights of version %d are not live: %s [corrupt]; this engine is quarantined", version, reason)
        self._proven = False
        self.wait_for(cast(Coroutine[Any, Any, None], self._on_quarantine(reason)))

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns that runs on the engine's loop. For the subscriber's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- on the event loop -----------------------------------------------------------------------------

    async def _apply(self, load: Callable[[], Awaitable[None]]) -> Mapping[str, int]:
        began = time.monotonic()
        await self.pause()
        self.gauges["pausing_s"] = time.monotonic() - began
        self._proven = False
        await load()
        return await self.engine.digest()

    async def _reasons_to_wait(self) -> tuple[int | None, bool]:
        """The version that an evaluation holds, and whether requests are drained first."""
        return self.engine.holds(), self.config.on_new_weights == "drain" and bool(self.engine.running_tokens())

    async def pause(self) -> None:
        """Stop the engine as on_new_weights says."""
        self._paused_at = time.monotonic()
        await self.engine.pause(cast(PauseMode, self.config.on_new_weights))
        self.paused = True

    async def resume(self) -> None:
        """An update was called off before it touched the engine: go on, if it was serving."""
        if self._proven:
            await self.engine.resume()
            self.paused = False

    def touch(self) -> None:
        """The engine is about to receive a part of an update."""
        self._proven = False

    async def _go_live(self, incarnation: int, version: int, evaluate: bool) -> None:
        if evaluate:
            await self.engine.pin(version)
        await self.engine.resume()
        self.paused = False
        if self._paused_at:
            self.gauges["pause_s"] = time.monotonic() - self._paused_at
        self._proven = True
        self.gauges["weight_updates"] += 1
        await self._on_live(version, incarnation)


class DirectEnd:
    """Implements the bus's DirectReceiver: the engine's calls from the subscriber's thread, its errors as the bus's."""

    def __init__(self, follower: WeightFollower, updates: DirectUpdates) -> None:
        self._follower = follower
        self._updates = updates

    @property
    def ranks(self) -> int:
        """See `DirectReceiver.ranks`."""
        return self._updates.ranks

    def pause(self, version: int) -> None:
        """See `DirectReceiver.pause`: between two forwards, after an evaluation, or when all is drained."""
        if not self._follower.paused:  # else requests that wait for the update would be waited for
            self._follower.announce_wait()
        try:
            self._follower.wait_for(self._follower.pause())
        except EngineError as error:
            raise TransportError(f"the engine did not pause for v{version}: {error}", "slow") from error

    def resume(self) -> None:
        """See `DirectReceiver.resume`."""
        self._follower.wait_for(self._follower.resume())

    def form(self, formation: Formation) -> None:
        """See `DirectReceiver.form`."""
        self._spoil(self._updates.form(formation), f"the engine did not enter epoch {formation.epoch}")

    def receive(self, bucket: Sequence[Entry], index: int) -> None:
        """See `DirectReceiver.receive`."""
        self._follower.touch()
        self._spoil(self._updates.receive(bucket, index), f"bucket {index + 1} did not arrive in the engine")

    def prove(self, version: int, entries: Sequence[Entry]) -> Mapping[str, int]:
        """See `DirectReceiver.prove`."""
        return self._spoil(self._updates.prove(entries, version), f"v{version} was not proven")

    def leave(self) -> None:
        """See `DirectReceiver.leave`."""
        self._spoil(self._updates.leave(), "the engine did not leave its group")

    def _spoil(self, call: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return self._follower.wait_for(call)
        except EngineError as error:
            raise EngineSpoiled(f"{what}, it must be restarted: {error}") from error
