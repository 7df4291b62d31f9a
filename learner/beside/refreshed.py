"""Teachers that the run refreshes itself: the policy of an earlier version, or an average over its versions.

Each is float32 shards that lie as the policy's do (of a policy with adapters, the adapters alone), and has a weight bus
of its own. Teacher processes follow it as engines follow the policy's: none scores with a version before the digest of
what it holds is that of these shards.
"""

import logging
from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from configs.teachers import Teacher
from learner.checkpoints.parts import Part
from learner.policy.model import Policy
from learner.ranks import Ranks
from learner.weights import WeightPublisher, numbers_of
from weight_bus.digest import combined

log = logging.getLogger(__name__)


class RefreshedTeacher:
    """One rank's part of a teacher."""

    def __init__(self, name: str, settings: Teacher, policy: Policy) -> None:
        """At first it is the policy as it is."""
        self.name, self.settings, self.policy = name, settings, policy
        self.held = {parameter: local.clone() for parameter, local in policy.local_parameters().items()}
        self.version, self.published = 0, -1
        """Of the policy: of what was taken last, and of what went to the bus last."""
        self.bus: WeightPublisher | None = None
        self._ended: dict[str, Any] = {}
        """Numbers of a broadcast that ended before the next one began, until a row takes them."""

    def follow(self, step: int) -> None:
        """Take the policy as this step has left it, if it is a multiple of `every`."""
        if step % self.settings.every:
            return
        for parameter, new in self.policy.local_parameters().items():
            if self.settings.kind == "average":
                self.held[parameter].lerp_(new, 1 - self.settings.decay)
            else:
                self.held[parameter].copy_(new)
        self.version = step

    def publish(self) -> None:
        """Hand a version to the bus, unless it went there before. A collective."""
        if self.bus is not None and self.version != self.published:
            self._ended = self.metrics(last=False)
            digests, self.published = self.bus.digests(), self.version
            log.info("teacher %r is version %d, digest %s", self.name, self.version, combined(digests))
            self.bus.start(self.version, digests, evaluate=False)

    def metrics(self, *, last: bool) -> dict[str, Any]:
        """Numbers of a broadcast that ended since the last call; with `last` it is waited for."""
        ended, self._ended = self._ended, {}
        if self.bus is None or not (last or self.bus.settled):
            return ended
        return numbers_of(self.bus.wait(last=True)) or ended


class RefreshedTeachers:
    """All of a run. All ranks call its methods, in one order.

    No step waits for their processes: one that is slow or was killed goes on with the version that it has, or gets the
    newest when it is back.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self._config = config
        self._all = {
            name: RefreshedTeacher(name, one, policy) for name, one in config.teachers.items() if one.is_refreshed
        }

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds of them, by folder, beside `versions`."""
        return {f"teachers/{name}": Part(one.policy, held=one.held) for name, one in self._all.items()}

    @property
    def buses(self) -> dict[str, WeightPublisher]:
        """Those that are open."""
        return {name: one.bus for name, one in self._all.items() if one.bus is not None}

    @property
    def versions(self) -> dict[str, int]:
        """The step that refreshed each one last."""
        return {name: one.version for name, one in self._all.items()}

    def restore(self, versions: Mapping[str, int]) -> None:
        """Go on from `versions`, after `parts` were loaded; from nothing, as the policy that the run began with."""
        for name, one in self._all.items():
            one.version = versions.get(name, 0)

    def open(self, ranks: Ranks, *, run_id: str, incarnation: int) -> dict[str, str]:
        """Open their buses, a collective; control addresses by name, none on other ranks than the first."""
        for name, one in self._all.items():
            own = self._config.model_copy(update={"weight_bus": self._config.weight_bus.of_teacher(name)})
            shards = one.policy.layout.shards(one.held)
            one.bus = WeightPublisher(own, one.policy, ranks, run_id=run_id, incarnation=incarnation, shards=shards)
        return {name: bus.address for name, bus in self.buses.items() if bus.address is not None}

    def follow(self, step: int) -> None:
        """After a step: those whose turn it is take the policy."""
        for one in self._all.values():
            one.follow(step)

    def publish(self) -> None:
        """Hand new versions to their buses. A collective."""
        for one in self._all.values():
            one.publish()

    def metrics(self, *, last: bool = False) -> dict[str, Any]:
        """Numbers of broadcasts that have ended; with `last` of all."""
        found = {name: one.metrics(last=last) for name, one in self._all.items()}
        return {
            f"teacher/{name}/{key.removeprefix('weight_sync/')}": value
            for name, numbers in found.items()
            for key, value in numbers.items()
        }

    def close(self) -> None:
        """Leave their buses."""
        for bus in self.buses.values():
            bus.close()
