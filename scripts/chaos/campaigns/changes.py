"""`python -m scripts.chaos weights changes --versions 200 --seed 1`: updates sent as changes, among faults.

A real publisher sends versions of a small policy, made by real AdamW steps, as changes (weight_bus.delta) to two real
subscribers over gloo. A proxy loses, repeats, delays and reorders messages of every kind in both directions; changes on
the data plane are stale, come again or are in disorder; some name another base than theirs. The learner goes on
publishing. With all faults gone, the newest version must be reached everywhere.

An oracle that shares no code with the bus compares what an engine is to serve with copies of what was published, byte
by byte.
"""

import argparse
import itertools
import logging
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.chaos.bus_cluster import BusCluster
from scripts.chaos.campaigns.message_faults import AlteredTransport, ControlFaults, DataFaults
from scripts.chaos.campaigns.policy import Policy
from scripts.chaos.polling import Hung
from scripts.chaos.probe import wrapping
from scripts.chaos.proxy import Proxy
from scripts.chaos.report import State, ends_within

OPTIONS: dict[str, tuple[Any, str]] = {"versions": (200, "to publish"), "log": (None, "file for what the bus logs")}
STARTING_S, PER_VERSION_S = 120.0, 3.0  # before this process takes itself for one that hangs
CONFIG = WeightBus(
    delta=True, full_every=20, bucket_bytes=32 * 1024, heartbeat_s=0.2, collective_timeout_s=0.5, deadline_s=1.0
)
NAMES = ("subscriber-0", "subscriber-1")
SLACK_S = 5.0  # a publish that takes so much longer than its deadline has hung
REFUSED = re.compile(r"'(?P<name>[^']+)': v(?P<version>\d+) (did not arrive|arrived with corrupt)")


def plan(args: argparse.Namespace) -> Policy:
    torch.set_num_threads(1)
    return Policy(args.seed)


def run(policy: Policy, state: State, args: argparse.Namespace) -> None:
    if state.done:
        return
    if args.log is not None:
        logging.basicConfig(filename=args.log, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    with ends_within(STARTING_S + PER_VERSION_S * args.versions), Changes(args.seed, policy) as campaign:
        state.add(campaign.run(args.versions))


def verdict(state: State, _hung: str, _args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    return state.done[0] if state.done else ({}, [])


@dataclass(frozen=True, slots=True)
class Chances:
    """Of a fault of each sort, per version and subscriber; `back` counts for versions that go back."""

    control: float = 0.5
    data: float = 0.1
    back: float = 0.5
    base: float = 0.05


class Changes:
    """Publisher, proxies and subscribers of one process; a context manager.

    `pace_s`: between versions, as a learner has steps in between; `heal_s`: until all serve the last one.
    """

    def __init__(
        self, seed: int, policy: Policy, *, chances: Chances = Chances(), pace_s: float = 0.1, heal_s: float = 30.0
    ) -> None:
        self._rng, self._policy, self._chances = random.Random(seed), policy, chances
        self._pace_s, self._heal_s = pace_s, heal_s
        self.bus, self.data, self._proxy = BusCluster(CONFIG), DataFaults(seed), Proxy()
        self.oracle = self.bus.oracle
        self._kinds: Counter[str] = Counter()
        self._as_changes, self._longest_s = 0, 0.0

    def __enter__(self) -> "Changes":
        self._proxy.__enter__()
        self.bus.__enter__()
        links = {name: self._proxy.link(self.bus.publisher.address) for name in NAMES}
        self.control = ControlFaults(self._rng.randrange(1 << 30), links)
        for name, link in links.items():
            self.bus.add(name, address=link.address, transport_factory=wrapping(AlteredTransport, self.data, name))
        self.bus.wait_for_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.bus.__exit__()  # the receivers end before their proxy
        self._proxy.__exit__()

    def run(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        """Publish so many versions among faults; what came of it, ready for JSON, and what is wrong."""
        started, publisher = time.monotonic(), self.bus.publisher
        for _ in range(versions):
            kind, named = self._policy.next()
            self._kinds[kind] += 1
            self._plan(kind)
            began, before = time.monotonic(), publisher.stats()["changes"]
            version = self.bus.start_publish(named)
            self.oracle.claims(version, publisher.wait().served)  # the learner goes on whatever becomes of it
            self._longest_s = max(self._longest_s, time.monotonic() - began)
            self._as_changes += publisher.stats()["changes"] > before
            time.sleep(self._pace_s)
        self.control.clear()
        self.data.due.clear()
        healed = ""
        try:
            what = f"all serve v{versions} after the last fault"
            self.bus.wait(lambda: all(self.serves(versions, name) for name in NAMES), what, self._heal_s)
        except Hung as hung:
            healed = str(hung)
        self.bus.end()
        return self._result(versions, healed, time.monotonic() - started)

    def serves(self, version: int, name: str) -> bool:
        """Whether a subscriber serves a version, and the publisher knows it."""
        return self.bus.publisher.members().get(name) == ("live", version) and self.bus.serves(version, name)

    def _plan(self, kind: str) -> None:
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

    def _result(self, versions: int, healed: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
        oracle, stats, receivers = self.oracle, self.bus.publisher.stats(), self.bus.receivers.values()
        activated = {name: set(oracle.activated.get(name, ())) for name in NAMES}
        planted = [*self.data.planted, *((name, version, "other base") for name, version in self.control.rebased)]
        refusals = [(line, found) for line in self.bus.lines if (found := REFUSED.search(line))]
        refused = {(found["name"], int(found["version"])) for _, found in refusals}
        unseen = [one for one in planted if one[:2] not in refused]
        ended = all(receiver.closed and not receiver.is_alive() for receiver in receivers)
        bit_exact = not oracle.wrong and all(activated.values())
        wrong = oracle.wrong + ([healed] if healed else [])
        wrong += [f"{kind} of v{version} at {name!r} was not noticed" for name, version, kind in unseen]
        wrong += [f"{name!r} served no version" for name, found in activated.items() if not found]
        wrong += [] if ended else ["a subscriber has not ended with the bus"]
        if self._longest_s > CONFIG.deadline_s + SLACK_S:
            wrong.append(f"a publish took {self._longest_s:.1f} s, its deadline is {CONFIG.deadline_s:g} s")
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
            "refused_by_digest": sum("arrived with corrupt" in line for line, _ in refusals),
            "refused_other_base": sum("comes as a change of" in line for line, _ in refusals),
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
            "in_order": not wrong,
        }
        return result, wrong


def longest_gap(activated: set[int], versions: int) -> int:
    """Most versions in a row, from 1 to `versions`, that are not among these."""
    edges = [0, *sorted(activated), versions + 1]
    return max(after - before - 1 for before, after in itertools.pairwise(edges))
