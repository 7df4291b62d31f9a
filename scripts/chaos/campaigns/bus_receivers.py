"""Faults of a receiver: a publisher in this process and three receivers in processes of their own."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from signal import SIGKILL

import torch

from configs.infrastructure import WeightBus
from scripts.chaos import processes
from scripts.chaos.bus_cluster import BusCluster, Weights, bytes_digest, start_receiver
from scripts.chaos.campaigns.bus_points import JOINING, Bench, Outcome, Point
from scripts.chaos.settings import START_S
from scripts.chaos.watch import CLASS, Gate, Probe
from weight_bus.subscriber import JOIN_AGAIN_BEATS, SILENT_BEATS

ROLE = "receiver"
CONFIG = WeightBus(bucket_bytes=100_000, deadline_s=5.0, collective_timeout_s=2.0, heartbeat_s=0.5, max_heals=3)
SHAPES = {"first": (64, 256), "middle": (1024, 1024), "between": (64, 256), "last": (1024, 1024), "norm": (33,)}
"""Float32, a bucket each. 4 MB is more than the kernel's socket buffers take: there a sender really waits for its peer.
The others are small, so that a busy machine has time for a hundred faults."""
VICTIM, SURVIVORS = "rollout-2", ("rollout-0", "rollout-1")
ALL = (*SURVIVORS, VICTIM)
BUSY_S = 5.0  # what a machine with fewer cores than processes adds
CLASSES = {"closed", "silent", "slow"}
"""Of a peer that was killed, stopped, cut off or stuck, depending on the observer and the moment."""


def deadline_s(config: WeightBus) -> float:
    """From a fault to the next version: the learner waits for one version, and then for the next."""
    return 2 * config.deadline_s + BUSY_S


def return_s(config: WeightBus) -> float:
    """Until a receiver that was away serves again: a repeated Join, an epoch, a version."""
    return JOIN_AGAIN_BEATS * config.heartbeat_s + config.collective_timeout_s + config.deadline_s + BUSY_S


class Receivers(Bench):
    """A publisher and three receivers, of which one is renewed for each case and hit."""

    role = ROLE

    def __init__(self, work: Path, config: WeightBus = CONFIG) -> None:
        self.config, self._bus = config, BusCluster(config)
        self._probes = {name: Probe(work / name) for name in ALL}
        self._pids: dict[str, int] = {}
        self._truth: dict[int, str] = {}
        self._mark, self._hit, self._was_member = 0, 0, False
        """Lines of the log before a case; the pid that was hit; whether the bus knew it."""

    def __enter__(self) -> "Receivers":
        self._bus.__enter__()
        try:
            for name in ALL:
                self._start(name)
            self._publish()
            self._bus.wait(lambda: self._serve(ALL), "the first version", START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids.values():
            processes.send(pid, SIGKILL)
        self._bus.__exit__()

    # ---- one case ----------------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        return deadline_s(self.config)

    @property
    def pid(self) -> int:
        self._was_member = VICTIM in self._bus.publisher.members()
        self._hit = self._pids[VICTIM]
        return self._hit

    def gate(self, point: Point) -> Gate:
        return self._probes[VICTIM].gate

    def duration_s(self, fault: str) -> float:
        config, silence = self.config, SILENT_BEATS * self.config.heartbeat_s
        longest = max(silence, config.collective_timeout_s, config.deadline_s)
        lasts = {"kill": 0.0, "stop": longest + 1.0, "stuck": config.deadline_s + 1.0}
        return lasts.get(fault, silence + 1.0)

    def approach(self, point: Point, hold_s: float, strike: Callable[[], None]) -> None:
        """Bring the bus to the point. A new member makes the next version begin a new epoch, with all of its steps."""
        gate, members = self._probes[VICTIM].gate, self._bus.publisher.members
        processes.send(self._pids[VICTIM], SIGKILL)
        self._bus.wait(lambda: VICTIM not in members(), "the end of the last victim", self.deadline_s)
        if point.name in JOINING:
            gate.aim(point.moment, hold_s)
        self._start(VICTIM)
        if point.name not in JOINING:
            self._bus.wait(lambda: self._serve([VICTIM]), "a new victim to be filled", return_s(self.config))
        self._bus.removed.clear()
        self._mark = len(self._bus.lines)
        if point.name in ("between updates", "gathering"):
            strike() if point.name == "between updates" else self._publish(strike)
            return
        if point.name == "refill":
            gate.spoil()
            self._publish()
            self._bus.wait(lambda: gate.spoiled, "a spoiled update", self.deadline_s)
            gate.aim(point.moment, hold_s)
        elif point.name not in JOINING:
            gate.aim(point.moment, hold_s)
            self._publish()
        self._bus.wait(lambda: gate.arrived, f"the point {point.name!r}", self.deadline_s)
        if point.name == "overtaken":
            self._publish()
        strike()

    def outlast(self, outcome: Outcome, until: float) -> None:
        """As a learner does: wait for the version that is out, publish the next; the others must serve it."""
        publisher = self._bus.publisher
        publisher.wait()
        self._publish()
        those = ALL if outcome.fault == "slow" else SURVIVORS
        left = self.deadline_s - (time.monotonic() - self.began)
        self._bus.wait(lambda: self._serve(those), f"v{publisher.version} at {', '.join(those)}", left)
        outcome.seconds = time.monotonic() - self.began
        time.sleep(max(0.0, until - time.monotonic()))

    def recover(self, outcome: Outcome) -> None:
        """The victim, or the next of its name, comes back."""
        if outcome.fault == "kill":
            self._start(VICTIM)
        self._bus.wait(lambda: self._serve(ALL), "the return of the victim", return_s(self.config))
        self._publish()
        self._bus.wait(lambda: self._serve(ALL), "one more version at all", self.deadline_s)

    def judge(self, outcome: Outcome) -> None:
        """The victim must be named and no other receiver; none where the fault changes nothing."""
        outcome.digests_equal = all(
            event["digest"] == self._truth[int(str(event["version"]))] for name in ALL for event in self._live(name)
        )
        outcome.wrong += [f"{event.name!r} was removed" for event in self._bus.removed if event.name != VICTIM]
        victim = re.compile(rf"{VICTIM!r} \(pid {self._hit}\b")
        named = [line for line in self._bus.lines[self._mark :] if CLASSES & set(CLASS.findall(line))]
        best = sorted(filter(victim.search, named), key=names_survivors)
        if outcome.fault == "slow":
            outcome.culprit = "changes nothing"
            outcome.wrong += [f"named: {line}" for line in best if not names_survivors(line)]
        elif best:
            outcome.culprit = best[0].removeprefix("weight bus: ")
        elif self._was_member:
            outcome.wrong.append("no line names it")
        else:
            outcome.culprit = "changes nothing: the bus does not know it yet"

    # ---- publisher and receivers -------------------------------------------------------------------------

    def _publish(self, reach: Callable[[], None] = lambda: None) -> None:
        named = weights(self._bus.next_version)
        version = self._bus.start_publish(named, reach=reach)
        self._truth[version] = bytes_digest(named)

    def _start(self, name: str) -> None:
        address, folder = self._bus.publisher.address, self._probes[name].folder
        self._pids[name] = start_receiver(address, self.config, name, folder)

    def _serve(self, names: Iterable[str]) -> bool:
        """Whether these processes themselves were told to serve the newest version."""
        newest = self._bus.publisher.version
        lives = [[e for e in self._live(name) if e["pid"] == self._pids[name]] for name in names]
        return all(events and events[-1]["version"] == newest for events in lives)

    def _live(self, name: str) -> list[dict[str, object]]:
        return [event for event in self._probes[name].events if event["event"] == "live"]


def weights(version: int) -> Weights:
    rng = torch.Generator().manual_seed(version)
    return {name: torch.rand(shape, generator=rng) for name, shape in SHAPES.items()}


def names_survivors(line: str) -> bool:
    """Whether a line names survivors, too: those that have not got a version yet when the next one comes."""
    return any(repr(name) in line for name in SURVIVORS)
