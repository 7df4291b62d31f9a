"""A learner that goes on publishing changes, two subscribers behind proxies, and faults between them."""

import itertools
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from configs.infrastructure import WeightBus
from scripts.chaos.bus_cluster import BusCluster, Weights
from scripts.chaos.campaigns.message_faults import AlteredTransport, ControlFaults, DataFaults
from scripts.chaos.campaigns.policy import Policy
from scripts.chaos.polling import Hung
from scripts.chaos.probe import wrapping
from scripts.chaos.proxy import Proxy

CONFIG = WeightBus(
    delta=True,
    full_every=20,
    bucket_bytes=32 * 1024,
    heartbeat_s=0.2,
    collective_timeout_s=0.5,
    deadline_s=1.0,
)
NAMES = ("subscriber-0", "subscriber-1")
JOIN_S, HEAL_S = 30.0, 30.0
SLACK_S = 5.0
"""A publish that takes so much longer than its deadline has hung."""
REFUSED = re.compile(r"'(?P<name>[^']+)': v(?P<version>\d+) (did not arrive|arrived with corrupt)")


@dataclass(frozen=True, slots=True)
class Chances:
    """Of a fault of each sort, per version and subscriber; `back` counts for versions that go back."""

    control: float = 0.5
    data: float = 0.1
    back: float = 0.5
    base: float = 0.05


class Changes:
    """Publisher, proxies and subscribers of one process; a context manager."""

    def __init__(
        self,
        seed: int,
        policy: Policy,
        *,
        chances: Chances = Chances(),
        pace_s: float = 0.1,
        heal_s: float = HEAL_S,
    ) -> None:
        """`pace_s`: between versions, as a learner has steps in between; `heal_s`: until all serve the last one."""
        self._rng, self._policy, self._chances = random.Random(seed), policy, chances
        self._pace_s, self._heal_s = pace_s, heal_s
        self.bus, self.data, self._proxy = BusCluster(CONFIG), DataFaults(seed), Proxy()
        self.oracle = self.bus.oracle
        self._kinds: Counter[str] = Counter()
        self._as_changes = 0
        self._longest_s = 0.0

    def __enter__(self) -> "Changes":
        self.bus.__enter__()
        self._proxy.__enter__()
        address = self.bus.publisher.address
        links = {name: self._proxy.link(address) for name in NAMES}
        self.control = ControlFaults(self._rng.randrange(1 << 30), links)
        for name, link in links.items():
            self.bus.add(name, address=link.address, transport_factory=wrapping(AlteredTransport, self.data, name))
        self.bus.wait(lambda: len(self.bus.publisher.members()) == len(NAMES), "all have joined", JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.bus.close()
        self._proxy.__exit__()
        self.bus.__exit__()

    def run(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        """Publish so many versions among faults; what came of it, ready for JSON, and what is wrong."""
        started = time.monotonic()
        for _ in range(versions):
            kind, named = self._policy.next()
            self._kinds[kind] += 1
            self._plan(kind)
            self._publish(named)
            time.sleep(self._pace_s)
        self.control.clear()
        self.data.clear()
        healed = ""
        try:
            what = f"all serve v{versions} after the last fault"
            self.bus.wait(lambda: all(self.serves(versions, name) for name in NAMES), what, self._heal_s)
        except Hung as hung:
            healed = str(hung)
        self.bus.close()
        return self._result(versions, healed, time.monotonic() - started)

    def serves(self, version: int, name: str) -> bool:
        """Whether a subscriber serves a version, and the publisher knows it."""
        return self.bus.publisher.members().get(name) == ("live", version) and self.bus.serves(version, name)

    def _plan(self, kind: str) -> None:
        """Faults for the next version, which is of this kind."""
        chances = self._chances
        for name in NAMES:
            if self._rng.random() < chances.control:
                self.control.plan(name)
            if kind == "back" and self._rng.random() < chances.back:
                self.data.plan(name, "again")  # has the size of the change back, so only the digests can tell
            elif self._rng.random() < chances.data:
                self.data.plan(name)
            if self._rng.random() < chances.base:
                self.control.plan_other_base(name)

    def _publish(self, named: Weights) -> None:
        """One version; the learner goes on whatever becomes of it."""
        began, before = time.monotonic(), self.bus.publisher.stats()["changes"]
        version = self.bus.start_publish(named)
        report = self.bus.publisher.wait()
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self.oracle.claims(version, report.served)
        self._as_changes += self.bus.publisher.stats()["changes"] > before

    def _result(self, versions: int, healed: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
        oracle, stats, receivers = self.oracle, self.bus.publisher.stats(), self.bus.receivers.values()
        activated = {name: set(oracle.activated.get(name, ())) for name in NAMES}
        planted = [*self.data.planted, *((name, version, "other base") for name, version in self.control.rebased)]
        refused = {(found["name"], int(found["version"])) for found in map(REFUSED.search, self.bus.log.lines) if found}
        unseen = [one for one in planted if one[:2] not in refused]
        ended = all(receiver.closed and not receiver.is_alive() for receiver in receivers)
        bit_exact = not oracle.wrong and all(activated.values())
        in_time = self._longest_s <= CONFIG.deadline_s + SLACK_S
        wrong = oracle.wrong + ([healed] if healed else [])
        wrong += [f"{kind} of v{version} at {name!r} was not noticed" for name, version, kind in unseen]
        result = {
            "versions": versions,
            "kinds": dict(self._kinds),
            "as_changes": self._as_changes,
            "whole": versions - self._as_changes,
            "rounds": int(stats["rounds"]),
            "rounds_of_changes": int(stats["changes"]),
            "messages": {deed: dict(sorted(kinds.items())) for deed, kinds in self.control.done.items()},
            "faults_of_messages": sum(kinds.total() for kinds in self.control.done.values()),
            "faults_of_data": dict(sorted(Counter(kind for _, _, kind in planted).items())),
            "unnoticed": len(unseen),
            "refused_by_digest": self._lines("arrived with corrupt"),
            "refused_other_base": self._lines("comes as a change of"),
            "activated": {name: len(found) for name, found in activated.items()},
            "missed": {name: versions - len(found) for name, found in activated.items()},
            "longest_gap": {name: longest_gap(found, versions) for name, found in activated.items()},
            "rejoins": int(stats["joins"]) - len(NAMES),
            "removed": dict(sorted(Counter(event.symptom for event in self.bus.removed).items())),
            "restarts": sum(receiver.removals for receiver in receivers),
            "longest_publish_s": round(self._longest_s, 2),
            "all_at_the_newest": not healed,
            "ended": ended,
            "served_wrong": len(oracle.wrong),
            "bit_exact": bit_exact,
            "seconds": round(seconds, 1),
            "in_order": bit_exact and not unseen and not healed and ended and in_time,
        }
        return result, wrong

    def _lines(self, words: str) -> int:
        return sum(words in line and REFUSED.search(line) is not None for line in self.bus.log.lines)


def longest_gap(activated: set[int], versions: int) -> int:
    """Most versions in a row, from 1 to `versions`, that are not among these."""
    edges = [0, *sorted(activated), versions + 1]
    return max(after - before - 1 for before, after in itertools.pairwise(edges))
