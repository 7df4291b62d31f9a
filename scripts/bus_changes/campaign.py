"""A learner that goes on publishing, two subscribers behind proxies, and what the faults between them came to."""

import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from configs.infrastructure import WeightBus
from scripts.bus_changes.control_faults import ControlFaults
from scripts.bus_changes.data_faults import DataFaults, wires
from scripts.bus_changes.policy import Policy, Weights
from scripts.bus_changes.witness import HOST, RUN, Heard, Receiver, Witness
from scripts.chaos.proxy import Proxy
from weight_bus import Event, Publisher
from weight_bus.digest import slice_digest

CONFIG = WeightBus(
    delta=True,
    full_every=20,
    bucket_bytes=32 * 1024,
    heartbeat_s=0.2,
    collective_timeout_s=0.5,
    deadline_s=1.0,
)
NAMES = ("subscriber-0", "subscriber-1")
JOIN_S, HEAL_S, END_S = 30.0, 30.0, 20.0
SLACK_S = 5.0
"""A publish that takes so much longer than its deadline has hung."""
PACE_S = 0.1
"""Between versions, as a learner has steps in between."""
CONTROL, DATA, BACK, BASE = 0.5, 0.1, 0.5, 0.05
"""Chance, per version and subscriber, of a fault of each sort; BACK counts for versions that go back."""


class Campaign:
    """Publisher, proxies and subscribers of one process; a context manager."""

    def __init__(self, seed: int, *, lossy: bool = True, hidden: int = 256) -> None:
        """`lossy`: the control plane has faults; `hidden`: size of the policy."""
        self._config, self._lossy = CONFIG, lossy
        self._rng, self._policy = random.Random(seed), Policy(seed, hidden=hidden)
        self.witness, self.heard, self.data = Witness(), Heard(), DataFaults(seed)
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._removed: Counter[str] = Counter()
        self._changes = 0
        """Rounds of changes so far."""
        self._longest_s = 0.0

    def __enter__(self) -> "Campaign":
        self._log = logging.getLogger("weight_bus")
        self._log.addHandler(self.heard)
        self._publisher = Publisher(self._config, host=HOST, run_id=RUN, incarnation=1)
        self._publisher.on_event.append(self._on_event)
        self._proxy = Proxy().__enter__()
        links = {name: self._proxy.link(self._publisher.address) for name in NAMES}
        self.control = ControlFaults(self._rng.randrange(1 << 30), links)
        self._receivers = {
            name: Receiver(link.address, name, self._config, self.witness, wires(self.data, name))
            for name, link in links.items()
        }
        self._until(lambda: len(self._publisher.members()) == len(NAMES), JOIN_S, "all have joined")
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
        for receiver in self._receivers.values():
            receiver.join(END_S)
        self._proxy.__exit__()
        self._log.removeHandler(self.heard)

    def run(self, versions: int) -> dict[str, Any]:
        """Publish so many versions among faults; what has come of it when all serve the last one, ready for JSON."""
        started = time.monotonic()
        for version in range(1, versions + 1):
            kind, named = self._policy.next()
            self._kinds[kind] += 1
            self._plan(kind)
            self._publish(version, named)
            time.sleep(PACE_S)
        self.control.clear()
        self.data.clear()
        what = f"all serve v{versions} after the last fault"
        healed = self._until(lambda: all(self._serves(versions, name) for name in NAMES), HEAL_S, what)
        self._publisher.close()
        for receiver in self._receivers.values():
            receiver.join(END_S)
        return self._result(versions, healed, time.monotonic() - started)

    def _plan(self, kind: str) -> None:
        """Faults for the next version, which is of this kind."""
        for name in NAMES:
            if self._lossy and self._rng.random() < CONTROL:
                self.control.plan(name)
            if kind == "back" and self._rng.random() < BACK:
                self.data.plan(name, "again")  # has the size of the change back, so only the digests can tell
            elif self._rng.random() < DATA:
                self.data.plan(name)
            if self._rng.random() < BASE:
                self.control.plan_other_base(name)

    def _publish(self, version: int, named: Weights) -> None:
        """One version; the learner does not care what becomes of it."""
        self.witness.publish(version, named)
        began = time.monotonic()
        digests = {name: slice_digest(tensor) for name, tensor in named.items()}
        report = self._publisher.publish(version, named.items(), digests)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self.witness.claims(version, report.served)
        changes = int(self._publisher.stats()["changes"])
        self._counts["as_changes" if changes > self._changes else "whole"] += 1
        self._changes = changes

    def _on_event(self, event: Event) -> None:
        """On the thread of the bus."""
        if event.kind == "removed":
            self._removed[event.symptom] += 1

    def _serves(self, version: int, name: str) -> bool:
        last = self.witness.activated.get(name, [-1])[-1]
        says = self._publisher.members().get(name, ("", -1))
        return last == version and says == ("live", version) and self.witness.holds(version, self._receivers[name].live)

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                say(f"WRONG: not within {limit_s:.0f} s: {what}; members {self._publisher.members()}")
                return False
            time.sleep(0.02)
        return True

    def _result(self, versions: int, healed: bool, seconds: float) -> dict[str, Any]:
        activated = {name: set(self.witness.activated.get(name, ())) for name in NAMES}
        planted = [*self.data.planted, *((name, version, "other base") for name, version in self.control.rebased)]
        unseen = [one for one in planted if one[:2] not in self.heard.refused]
        ended = all(receiver.closed and not receiver.is_alive() for receiver in self._receivers.values())
        for text in self.witness.wrong:
            say(f"WRONG: {text}")
        for name, version, kind in unseen:
            say(f"WRONG: {kind} of v{version} at {name!r} was not noticed")
        stats = self._publisher.stats()
        bit_exact = not self.witness.wrong and all(activated.values())
        in_time = self._longest_s <= self._config.deadline_s + SLACK_S
        return {
            "versions": versions,
            "kinds": dict(self._kinds),
            "as_changes": self._counts["as_changes"],
            "whole": self._counts["whole"],
            "rounds": int(stats["rounds"]),
            "rounds_of_changes": int(stats["changes"]),
            "messages": {deed: dict(sorted(kinds.items())) for deed, kinds in self.control.done.items()},
            "faults_of_messages": sum(kinds.total() for kinds in self.control.done.values()),
            "faults_of_data": dict(sorted(Counter(kind for _, _, kind in planted).items())),
            "unnoticed": len(unseen),
            "refused_by_digest": self.heard.by_digest(),
            "refused_other_base": self.heard.other_base(),
            "activated": {name: len(found) for name, found in activated.items()},
            "missed": {name: versions - len(found) for name, found in activated.items()},
            "longest_gap": {name: longest_gap(found, versions) for name, found in activated.items()},
            "rejoins": int(stats["joins"]) - len(NAMES),
            "removed": dict(sorted(self._removed.items())),
            "restarts": sum(receiver.restarts for receiver in self._receivers.values()),
            "longest_publish_s": round(self._longest_s, 2),
            "all_at_the_newest": healed,
            "ended": ended,
            "served_wrong": len(self.witness.wrong),
            "bit_exact": bit_exact,
            "seconds": round(seconds, 1),
            "in_order": bit_exact and not unseen and healed and ended and in_time,
        }


def longest_gap(activated: set[int], versions: int) -> int:
    """Most versions in a row, from 1 to `versions`, that are not among these."""
    edges = [0, *sorted(activated), versions + 1]
    return max(after - before - 1 for before, after in itertools.pairwise(edges))


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
