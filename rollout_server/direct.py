"""The weight follower's end of updates that the engine receives by itself (weight_bus.apply: direct).

What fails once it has begun to receive is no quarantine but the end of this process: the launcher starts it again.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_server.engines import EngineError
from weight_bus.errors import EngineSpoiled, TransportError
from weight_bus.manifest import Entry
from weight_bus.transports.base import Formation

if TYPE_CHECKING:
    from rollout_server.engines.sglang.direct import DirectGroup
    from rollout_server.follower import WeightFollower

T = TypeVar("T")


class DirectEnd:
    """Implements `DirectReceiver`: calls the engine from the subscriber's thread, translates its errors."""

    def __init__(self, follower: "WeightFollower", updates: "DirectGroup") -> None:
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
