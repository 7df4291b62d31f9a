"""Faults of a receiver: a publisher in this process and three receivers in processes of their own, over gloo."""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL
from types import TracebackType

import torch

from configs.infrastructure import WeightBus
from scripts.bus_faults.faults import Fault
from scripts.bus_faults.gates import Hand
from scripts.bus_faults.points import HOLD_S, JOINING, Outcome, Point
from scripts.bus_faults.receiver import HOST, RUN, Weights, bytes_digest, weights
from scripts.chaos import processes
from scripts.chaos.logs import CLASS
from scripts.chaos.settings import ROOT, START_S
from weight_bus import Event, Publisher
from weight_bus.digest import slice_digest
from weight_bus.subscriber import JOIN_AGAIN_BEATS, SILENT_BEATS

ROLE = "receiver"
CONFIG = WeightBus(bucket_bytes=100_000, deadline_s=5.0, collective_timeout_s=2.0, heartbeat_s=0.5, max_heals=3)
VICTIM = "rollout-2"
SURVIVORS = ("rollout-0", "rollout-1")
BUSY_S = 5.0
"""What a machine with fewer cores than processes adds."""
CLASSES = {"closed", "silent", "slow"}
"""Of a peer that was killed, stopped, cut off or stuck, depending on who looks, and when."""


def bound_s(config: WeightBus) -> float:
    """From a fault to the next version: the learner waits for one version, and then for the next."""
    return 2 * config.deadline_s + BUSY_S


def return_s(config: WeightBus) -> float:
    """Until somebody who was away serves again: a Join that is said again, an epoch, a version."""
    return JOIN_AGAIN_BEATS * config.heartbeat_s + config.collective_timeout_s + config.deadline_s + BUSY_S


def lasts_s(fault: Fault, config: WeightBus) -> float:
    """How long a fault lasts: beyond each bound that could notice it."""
    silence = SILENT_BEATS * config.heartbeat_s
    return {
        "kill": 0.0,
        "stop": max(silence, config.collective_timeout_s, config.deadline_s) + 1.0,
        "cut": silence + 1.0,
        "slow": silence + 1.0,
        "stuck": config.deadline_s + 1.0,
    }[fault.name]


class Hung(RuntimeError):
    """A wait was not over at its deadline; the message says which."""


class Heard(logging.Handler):
    """What the publisher's side of the bus logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.lines.append(record.getMessage())


@dataclass(slots=True)
class Hit:
    """Whom a fault has met, and when."""

    pid: int
    mark: int
    """Lines of the log before it."""
    at: float = 0.0
    was_member: bool = False
    """Whether the bus knew it."""


class BusBench:
    """A publisher, three receivers, and one case after the other; a context manager."""

    def __init__(self, work: Path, config: WeightBus = CONFIG) -> None:
        self.config, self.work = config, work
        self._hands = {name: Hand(work / name) for name in (*SURVIVORS, VICTIM)}
        self._pids: dict[str, int] = {}
        self._truth: dict[int, str] = {}
        self._removed: list[str] = []
        self._heard = Heard()

    def __enter__(self) -> "BusBench":
        log = logging.getLogger("weight_bus")
        log.setLevel(logging.INFO)
        log.addHandler(self._heard)
        self._publisher = Publisher(self.config, host=HOST, run_id=RUN, incarnation=1)
        self._publisher.on_event.append(self._note)
        arguments = [self._publisher.address, self.config.model_dump_json()]
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "scripts.bus_faults.receiver", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._answer() == "ready"
            for name in (*SURVIVORS, VICTIM):
                self._start(name)
            self._publish()
            self._wait(lambda: self._serve((*SURVIVORS, VICTIM)), "the first version", START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for pid in self._pids.values():
            processes.send(pid, SIGKILL)
        self._nursery.kill()
        self._nursery.wait()
        self._publisher.close()
        logging.getLogger("weight_bus").removeHandler(self._heard)

    # ---- one case ----------------------------------------------------------------------------------------

    def case(self, fault: Fault, point: Point) -> Outcome:
        """A fault of the victim at a point, until everything is as it was before."""
        outcome = Outcome(role=ROLE, fault=fault.name, point=point.name)
        hold_s = lasts_s(fault, self.config) if fault.holds else HOLD_S
        victim: Hit | None = None
        try:
            self._renew(point, hold_s)
            self._removed.clear()
            victim = Hit(self._pids[VICTIM], len(self._heard.lines))
            self._approach(point, hold_s, partial(self._strike, fault, victim))
            try:
                if not fault.holds:
                    self._hands[VICTIM].release()
                self._go_on(outcome, fault, victim.at)
                time.sleep(max(0.0, victim.at + lasts_s(fault, self.config) - time.monotonic()))
            finally:
                fault.end()
                self._hands[VICTIM].release()
            self._recover(fault)
            outcome.digests_equal = self._all_held_the_truth()
            self._judge(outcome, fault, victim)
        except Hung as hung:
            outcome.hung = str(hung)
            outcome.seconds = time.monotonic() - victim.at if victim is not None and victim.at else 0.0
        return outcome

    def _strike(self, fault: Fault, victim: Hit) -> None:
        victim.was_member = VICTIM in self._publisher.members()
        fault.begin(victim.pid)
        victim.at = time.monotonic()

    def _renew(self, point: Point, hold_s: float) -> None:
        """A new victim; a new member also makes the next version begin a new epoch, with all of its steps."""
        processes.send(self._pids[VICTIM], SIGKILL)
        self._wait(lambda: VICTIM not in self._publisher.members(), "the last victim is gone", bound_s(self.config))
        if point.name in JOINING:
            self._hands[VICTIM].aim(point.moment, hold_s)
        self._start(VICTIM)
        if point.name not in JOINING:
            self._wait(lambda: self._serve([VICTIM]), "a new victim is filled", return_s(self.config))

    def _approach(self, point: Point, hold_s: float, strike: Callable[[], None]) -> None:
        """Bring the bus to the point, and strike there."""
        hand = self._hands[VICTIM]
        if point.name == "between updates":
            strike()
            return
        if point.name == "gathering":
            self._publish(halfway=strike)
            return
        if point.name == "refill":
            hand.spoil()
            self._publish()
            self._wait(lambda: hand.spoiled, "a spoiled update", bound_s(self.config))
            hand.aim(point.moment, hold_s)
        elif point.name not in JOINING:
            hand.aim(point.moment, hold_s)
            self._publish()
        self._wait(lambda: hand.arrived, f"the point {point.name!r}", bound_s(self.config))
        if point.name == "overtaken":
            self._publish()
        strike()

    def _go_on(self, outcome: Outcome, fault: Fault, began: float) -> None:
        """As a learner does: wait for the version that is out, publish the next; who was not hit must serve it."""
        self._publisher.wait()
        self._publish()
        those = (*SURVIVORS, VICTIM) if fault.changes_nothing else SURVIVORS
        left = bound_s(self.config) - (time.monotonic() - began)
        self._wait(lambda: self._serve(those), f"v{self._publisher.version} at {', '.join(those)}", left)
        outcome.seconds = time.monotonic() - began

    def _recover(self, fault: Fault) -> None:
        """Whoever was hit, or the next of that name, comes back; then one more version for all."""
        if not fault.survives:
            self._start(VICTIM)
        everybody = (*SURVIVORS, VICTIM)
        self._wait(lambda: self._serve(everybody), "the return of the victim", return_s(self.config))
        self._publish()
        self._wait(lambda: self._serve(everybody), "one more version at all", bound_s(self.config))

    def _judge(self, outcome: Outcome, fault: Fault, victim: Hit) -> None:
        """Who was named: the victim and nobody else, or nobody where the fault changes nothing."""
        outcome.wrong += [f"{name!r} was removed" for name in self._removed if name != VICTIM]
        named = [line for line in self._heard.lines[victim.mark :] if CLASSES & set(CLASS.findall(line))]
        named = [line for line in named if re.search(rf"{VICTIM!r} \(pid {victim.pid}\b", line)]
        best = sorted(named, key=about_all)
        if fault.changes_nothing:
            outcome.culprit = "changes nothing"
            outcome.wrong += [f"named: {line}" for line in best if not about_all(line)]
        elif best:
            outcome.culprit = best[0].removeprefix("weight bus: ")
        elif victim.was_member:
            outcome.wrong.append("no line names it")
        else:
            outcome.culprit = "changes nothing: the bus does not know it yet"

    # ---- publisher and receivers -------------------------------------------------------------------------

    def _publish(self, halfway: Callable[[], None] | None = None) -> None:
        """Hand the next version to the bus; do something while it is put together."""
        version = self._publisher.version + 1
        named = weights(version)
        self._truth[version] = bytes_digest(named)
        digests = {name: slice_digest(tensor) for name, tensor in named.items()}
        self._publisher.start_publish(version, _gathered(named, halfway), digests)

    def _start(self, name: str) -> None:
        folder = self.work / name
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(f"{name} {folder}\n")
        self._nursery.stdin.flush()
        self._pids[name] = int(self._answer())

    def _answer(self) -> str:
        assert self._nursery.stdout is not None
        line = self._nursery.stdout.readline()
        if not line:
            raise RuntimeError(f"the receivers' parent ended with {self._nursery.wait()}")
        return line.strip()

    def _serve(self, names: "list[str] | tuple[str, ...]") -> bool:
        """Whether these processes themselves have been told to serve the newest version."""
        newest = self._publisher.version
        lives = {name: [e for e in self._events(name) if e["pid"] == self._pids[name]] for name in names}
        return all(events and events[-1]["live"] == newest for events in lives.values())

    def _events(self, name: str) -> list[dict[str, object]]:
        path = self.work / name / "events.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _all_held_the_truth(self) -> bool:
        """Whether everything that anybody was ever told to serve was what had been published."""
        return all(
            event["digest"] == self._truth[int(str(event["live"]))]
            for name in (*SURVIVORS, VICTIM)
            for event in self._events(name)
        )

    def _note(self, event: Event) -> None:
        if event.kind == "removed":
            self._removed.append(event.name)

    def _wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Raises Hung after the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise Hung(f"{what}: not within {limit_s:.1f} s; members {self._publisher.members()}")
            time.sleep(0.01)


def about_all(line: str) -> bool:
    """Whether a line names survivors, too: those who have not got a version yet when the next one comes."""
    return any(repr(name) in line for name in SURVIVORS)


def _gathered(named: Weights, halfway: Callable[[], None] | None) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(named.items()):
        if halfway is not None and number == len(named) // 2:
            halfway()
        yield pair
