"""The weight follower's end of updates that the engine receives by itself (weight_bus.apply: direct).

What fails once it has begun to receive is no quarantine but the end of this process: the launcher starts it again.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout_server.engines import EngineError
from weight_bus.errors import EngineSpoiled, TransportError
from weight_bus.manifest import Entry
from weight_bus.transports.base import Formation

if TYPE_CHECKING:
    from rollout_server.engines.sglang.direct import DirectGroup

T = TypeVar("T")


class Pausing(Protocol):
    """What the follower of the weight bus does for an engine that receives by itself."""

    def announce_wait(self) -> None:
        """Announce to the publisher that the engine applies this version late, and why."""

    async def pause(self) -> None:
        """Stop the engine as on_new_weights says."""

    async def call_off(self) -> None:
        """Resume a serving engine after an update that ended before touching it."""

    def touch(self) -> None:
        """Note that the engine receives a part of an update."""

    def begin(self, version: int, load: Callable[[], Awaitable[None]]) -> Mapping[str, int]:
        """Pause, run `load`; digests of what the engine then holds."""
        ...

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; its result."""
        ...


class DirectEnd:
    """Implements `DirectReceiver`: calls the engine from the subscriber's thread, translates its errors."""

    def __init__(self, follower: Pausing, updates: "DirectGroup") -> None:
        self._follower = follower
        self._updates = updates

    @property
    def ranks(self) -> int:
        """See `DirectReceiver.ranks`."""
        return self._updates.ranks

    def pause(self, version: int) -> None:
        """See `DirectReceiver.pause`: between two forwards, after an evaluation, or when all is drained."""
        self._follower.announce_wait()
        try:
            self._follower.wait_for(self._follower.pause())
        except EngineError as error:
            raise TransportError(f"the engine did not pause for v{version}: {error}", "slow") from error

    def resume(self) -> None:
        """See `DirectReceiver.resume`."""
        self._follower.wait_for(self._follower.call_off())

    def form(self, formation: Formation) -> None:
        """See `DirectReceiver.form`."""
        self._spoil(self._wait(self._updates.form(formation)), f"the engine did not enter epoch {formation.epoch}")

    def receive(self, bucket: Sequence[Entry], index: int) -> None:
        """See `DirectReceiver.receive`."""
        self._follower.touch()
        self._spoil(
            self._wait(self._updates.receive(bucket, index)), f"bucket {index + 1} did not arrive in the engine"
        )

    def prove(self, version: int, entries: Sequence[Entry]) -> Mapping[str, int]:
        """See `DirectReceiver.prove`."""
        proof = partial(self._follower.begin, version, partial(self._updates.prove, entries, version))
        return self._spoil(proof, f"v{version} was not proven")

    def leave(self) -> None:
        """See `DirectReceiver.leave`."""
        self._spoil(self._wait(self._updates.leave()), "the engine did not leave its group")

    def _wait(self, call: Coroutine[Any, Any, T]) -> Callable[[], T]:
        return partial(self._follower.wait_for, call)

    def _spoil(self, call: Callable[[], T], what: str) -> T:
        try:
            return call()
        except EngineError as error:
            raise EngineSpoiled(f"{what}, it must be restarted: {error}") from error
