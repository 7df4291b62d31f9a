"""Faults of a receiver: a publisher in this process and three receivers in processes of their own."""

import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import torch

from configs.infrastructure import WeightBus
from scripts.chaos import processes
from scripts.chaos.bus_cluster import BusCluster, Weights, bytes_digest, start_receiver
from scripts.chaos.campaigns.bus_points import FAULTS, HOLD_S, JOINING, Outcome, Point
from scripts.chaos.polling import Hung
from scripts.chaos.settings import START_S
from scripts.chaos.watch import CLASS, Probe
from weight_bus.subscriber import JOIN_AGAIN_BEATS, SILENT_BEATS

ROLE = "receiver"
CONFIG = WeightBus(bucket_bytes=100_000, deadline_s=5.0, collective_timeout_s=2.0, heartbeat_s=0.5, max_heals=3)
SHAPES = {"first": (64, 256), "middle": (1024, 1024), "between": (64, 256), "last": (1024, 1024), "norm": (33,)}
"""Float32, a bucket each. 4 MB is more than the kernel's socket buffers take: there a sender really waits for its peer.
The others are small, so that a busy machine has time for a hundred faults."""
VICTIM = "rollout-2"
SURVIVORS = ("rollout-0", "rollout-1")
ALL = (*SURVIVORS, VICTIM)
BUSY_S = 5.0
"""What a machine with fewer cores than processes adds."""
CLASSES = {"closed", "silent", "slow"}
"""Of a peer that was killed, stopped, cut off or stuck, depending on the observer and the moment."""


def deadline_s(config: WeightBus) -> float:
    """From a fault to the next version: the learner waits for one version, and then for the next."""
    return 2 * config.deadline_s + BUSY_S


def return_s(config: WeightBus) -> float:
    """Until a receiver that was away serves again: a repeated Join, an epoch, a version."""
    return JOIN_AGAIN_BEATS * config.heartbeat_s + config.collective_timeout_s + config.deadline_s + BUSY_S


def duration_s(fault: str, config: WeightBus) -> float:
    """How long a fault lasts: beyond each deadline that could notice it."""
    silence = SILENT_BEATS * config.heartbeat_s
    return {
        "kill": 0.0,
        "stop": max(silence, config.collective_timeout_s, config.deadline_s) + 1.0,
        "cut": silence + 1.0,
        "slow": silence + 1.0,
        "stuck": config.deadline_s + 1.0,
    }[fault]


def weights(version: int) -> Weights:
    """The tensors of a version."""
    rng = torch.Generator().manual_seed(version)
    return {name: torch.rand(shape, generator=rng) for name, shape in SHAPES.items()}


@dataclass(slots=True)
class Hit:
    """The process that a fault has met, and when."""

    pid: int
    mark: int
    """Lines of the log before it."""
    at: float = 0.0
    was_member: bool = False
    """Whether the bus knew it."""
    during: AbstractContextManager[None] | None = None


class Receivers:
    """A publisher, three receivers, and one case after the other; a context manager."""

    def __init__(self, work: Path, config: WeightBus = CONFIG) -> None:
        self.config, self._bus = config, BusCluster(config)
        self._probes = {name: Probe(work / name) for name in ALL}
        self._pids: dict[str, int] = {}
        self._truth: dict[int, str] = {}

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

    def case(self, fault: str, point: Point) -> Outcome:
        """A fault of the victim at a point, until everything is as it was before."""
        limit = deadline_s(self.config)
        outcome = Outcome(role=ROLE, fault=fault, point=point.name, deadline_s=limit)
        lasts = duration_s(fault, self.config)
        holds = fault == "stuck"
        gate = self._probes[VICTIM].gate
        victim: Hit | None = None
        try:
            self._renew(point, lasts if holds else HOLD_S)
            self._bus.removed.clear()
            hit = victim = Hit(self._pids[VICTIM], len(self._bus.log.lines))
            self._approach(point, lasts if holds else HOLD_S, lambda: self._strike(fault, hit))
            try:
                if not holds:
                    gate.release()
                self._go_on(outcome, fault, hit.at)
                time.sleep(max(0.0, hit.at + lasts - time.monotonic()))
            finally:
                if hit.during is not None:
                    hit.during.__exit__(None, None, None)
                gate.release()
            self._recover(fault)
            outcome.digests_equal = self._held_the_truth()
            self._judge(outcome, fault, hit)
        except Hung as hung:
            outcome.hung = str(hung)
            outcome.seconds = time.monotonic() - victim.at if victim is not None and victim.at else 0.0
        return outcome

    def _strike(self, fault: str, hit: Hit) -> None:
        hit.was_member = VICTIM in self._bus.publisher.members()
        hit.during = FAULTS[fault][1](hit.pid)
        hit.during.__enter__()
        hit.at = time.monotonic()

    def _renew(self, point: Point, hold_s: float) -> None:
        """A new victim; a new member also makes the next version begin a new epoch, with all of its steps."""
        processes.send(self._pids[VICTIM], SIGKILL)
        members = self._bus.publisher.members
        self._bus.wait(lambda: VICTIM not in members(), "the end of the last victim", deadline_s(self.config))
        if point.name in JOINING:
            self._probes[VICTIM].gate.aim(point.moment, hold_s)
        self._start(VICTIM)
        if point.name not in JOINING:
            self._bus.wait(lambda: self._serve([VICTIM]), "a new victim to be filled", return_s(self.config))

    def _approach(self, point: Point, hold_s: float, strike: Callable[[], None]) -> None:
        """Bring the bus to the point, and strike there."""
        gate, limit = self._probes[VICTIM].gate, deadline_s(self.config)
        if point.name == "between updates":
            strike()
            return
        if point.name == "gathering":
            self._publish(strike)
            return
        if point.name == "refill":
            gate.spoil()
            self._publish()
            self._bus.wait(lambda: gate.spoiled, "a spoiled update", limit)
            gate.aim(point.moment, hold_s)
        elif point.name not in JOINING:
            gate.aim(point.moment, hold_s)
            self._publish()
        self._bus.wait(lambda: gate.arrived, f"the point {point.name!r}", limit)
        if point.name == "overtaken":
            self._publish()
        strike()

    def _go_on(self, outcome: Outcome, fault: str, began: float) -> None:
        """As a learner does: wait for the version that is out, publish the next; the others must serve it."""
        publisher = self._bus.publisher
        publisher.wait()
        self._publish()
        those = ALL if fault == "slow" else SURVIVORS
        left = deadline_s(self.config) - (time.monotonic() - began)
        self._bus.wait(lambda: self._serve(those), f"v{publisher.version} at {', '.join(those)}", left)
        outcome.seconds = time.monotonic() - began

    def _recover(self, fault: str) -> None:
        """The victim, or the next of its name, comes back; then one more version for all."""
        if fault == "kill":
            self._start(VICTIM)
        self._bus.wait(lambda: self._serve(ALL), "the return of the victim", return_s(self.config))
        self._publish()
        self._bus.wait(lambda: self._serve(ALL), "one more version at all", deadline_s(self.config))

    def _judge(self, outcome: Outcome, fault: str, victim: Hit) -> None:
        """The victim must be named and no other receiver; none where the fault changes nothing."""
        outcome.wrong += [f"{event.name!r} was removed" for event in self._bus.removed if event.name != VICTIM]
        named = [line for line in self._bus.log.lines[victim.mark :] if CLASSES & set(CLASS.findall(line))]
        named = [line for line in named if re.search(rf"{VICTIM!r} \(pid {victim.pid}\b", line)]
        best = sorted(named, key=names_survivors)
        if fault == "slow":
            outcome.culprit = "changes nothing"
            outcome.wrong += [f"named: {line}" for line in best if not names_survivors(line)]
        elif best:
            outcome.culprit = best[0].removeprefix("weight bus: ")
        elif victim.was_member:
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

    def _held_the_truth(self) -> bool:
        """Whether everything that was ever served was what had been published."""
        return all(event["digest"] == self._truth[int(str(event["version"]))] for n in ALL for event in self._live(n))


def names_survivors(line: str) -> bool:
    """Whether a line names survivors, too: those that have not got a version yet when the next one comes."""
    return any(repr(name) in line for name in SURVIVORS)
