"""`python -m scripts.chaos weights changes --versions 200 --seed 1`: updates sent as changes, among faults.

A real publisher sends versions of a small policy, made by real AdamW steps, as changes (weight_bus.delta) to two real
subscribers over gloo, and goes on publishing whatever becomes of them. With all faults gone, the newest version must be
reached everywhere. An oracle that shares no code with the bus compares what an engine is to serve with copies of what
was published, byte by byte. A proxy alters messages of the control plane, in both directions:

    dropped     it never comes
    repeated    it comes twice, one after the other
    late copy   it comes, and once more behind up to three other messages
    reordered   it comes after its successor
    other base  a Begin of a change names a base that is not the one that it was made from

Changes are taken from the wire whole, so that the group stays in step, and altered before the subscriber reads them:

    again       the change that came last, in place of this one
    stale       any earlier change, one of the same size where there is one
    twice       one piece comes twice, and all behind it are one late
    swapped     two pieces have changed places
"""

import argparse
import dataclasses
import itertools
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.channel import Envelope, decode, encode
from scripts.chaos.bus_cluster import BusCluster, Policy
from scripts.chaos.polling import Hung
from scripts.chaos.probe import Wrapped, wrapping
from scripts.chaos.proxy import Direction, Intercept, Link, Proxy, ZmtpMessage
from scripts.chaos.report import State, ends_within
from weight_bus.manifest import Entry
from weight_bus.messages import TO_SUBSCRIBER, Begin
from weight_bus.transports import Transport
from weight_bus.transports.base import ignore

OPTIONS: dict[str, tuple[Any, str]] = {"versions": (200, "to publish"), "log": (None, "file for what the bus logs")}
STARTING_S, PER_VERSION_S = 120.0, 3.0  # before this process takes itself for one that hangs
CONFIG = WeightBus(
    delta=True, full_every=20, bucket_bytes=32 * 1024, heartbeat_s=0.2, collective_timeout_s=0.5, deadline_s=1.0
)
NAMES = ("subscriber-0", "subscriber-1")
SLACK_S = 5.0  # a publish that takes so much longer than its deadline has hung
REFUSED = re.compile(r"'(?P<name>[^']+)': v(?P<version>\d+) (did not arrive|arrived with corrupt)")
MESSAGES: dict[Direction, tuple[str, ...]] = {
    "up": ("Staged", "Applied", "EpochReady", "Join", "Heartbeat", "ReceiveFailed"),
    "down": ("Begin", "Commit", "Epoch", "Abort", "Welcome", "Removed", "Heartbeat"),
}
DEEDS = ("dropped", "repeated", "late copy", "reordered")
BEHIND = AHEAD = 3
"""A late copy comes behind up to so many others; a fault waits for up to so many messages of its kind to pass first."""
DATA_KINDS = ("again", "stale", "twice", "swapped")
HISTORY = 40


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


def after(left: int, kind: str = "") -> Callable[[ZmtpMessage], bool]:
    """Wants the n-th message, from 0 on, of a kind, or of all but heartbeats, which have a pace of their own."""
    numbers = itertools.count()

    def wanted(message: ZmtpMessage) -> bool:
        counts = message.kind == kind if kind else message.kind != "Heartbeat"
        return counts and next(numbers) >= left

    return wanted


class ControlFaults:
    def __init__(self, seed: int, links: dict[str, Link]) -> None:
        self._rng, self._links = random.Random(seed), links
        self._armed: dict[tuple[str, Direction, str], Intercept] = {}
        self.done: dict[str, Counter[str]] = {deed: Counter() for deed in DEEDS}  # by kind of message
        self._bases: list[str] = []  # digests that changes were made from
        self.rebased: list[tuple[str, int]] = []  # (subscriber, version) of changes that were given another base

    def plan(self, name: str) -> None:
        """One fault more on a link; none where one of its kind is waiting already."""
        direction: Direction = self._rng.choice(("up", "down"))
        kind, deed = self._rng.choice(MESSAGES[direction]), self._rng.choice(DEEDS)
        if deed == "late copy" and kind == "Heartbeat":
            deed = "repeated"

        def change(message: ZmtpMessage) -> list[bytes]:
            self.done[deed][message.kind] += 1
            whole = message.wire()
            if deed == "late copy":
                again = Intercept(after(self._rng.randrange(BEHIND)), lambda other: [other.wire(), whole])
                self._links[name].intercepts[direction].append(again)
            return {"dropped": [], "repeated": [whole, whole]}.get(deed, [whole])

        wanted = after(self._rng.randrange(AHEAD), kind)
        self._arm(name, direction, kind, Intercept(wanted, change, hold_for_next=deed == "reordered"))

    def plan_other_base(self, name: str) -> None:
        """The next change that is begun names a base that some version before had."""
        self._arm(name, "down", "change", Intercept(self._is_change, lambda message: [self._rebased(name, message)]))

    def clear(self) -> None:
        for link in self._links.values():
            for intercepts in link.intercepts.values():
                intercepts.clear()

    def _arm(self, name: str, direction: Direction, kind: str, intercept: Intercept) -> None:
        waiting = self._armed.get((name, direction, kind))
        if waiting is None or waiting.kind:
            self._armed[name, direction, kind] = intercept
            self._links[name].intercepts[direction].append(intercept)

    def _is_change(self, message: ZmtpMessage) -> bool:
        begin = _envelope(message).message if message.kind == "Begin" else None
        if not isinstance(begin, Begin) or not begin.base:
            return False
        self._bases.append(begin.base)
        return len(set(self._bases)) > 1

    def _rebased(self, name: str, message: ZmtpMessage) -> bytes:
        envelope = _envelope(message)
        begin = envelope.message
        assert isinstance(begin, Begin)
        base = self._rng.choice([other for other in self._bases if other != begin.base])
        self.rebased.append((name, begin.version))
        header = encode(dataclasses.replace(begin, base=base), envelope.run_id, envelope.sequence)[0]
        return ZmtpMessage((dataclasses.replace(message.frames[0], body=bytes(header)),)).wire()


def _envelope(message: ZmtpMessage) -> Envelope:
    return decode([frame.body for frame in message.frames], TO_SUBSCRIBER)


class DataFaults:
    """What is to happen to the next change at each subscriber, and what has happened."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.due: dict[str, str] = {}  # kind by subscriber
        self.lock = threading.Lock()
        self.planted: list[tuple[str, int, str]] = []
        """(subscriber, version, kind), only where other bytes were given than had come."""

    def plan(self, name: str, kind: str = "") -> None:
        """One fault for this subscriber's next change that it fits; without a kind, any."""
        self.due[name] = kind or self._rng.choice(DATA_KINDS)

    def given(self, kind: str, real: torch.Tensor, piece: int, history: list[torch.Tensor]) -> torch.Tensor:
        """What to give instead; the real one where the fault does not fit."""
        if kind in ("twice", "swapped") and real.numel() > piece:
            first, rest = real[:piece], real[piece:]
            order = [first, first, rest] if kind == "twice" else [rest[:piece], first, rest[piece:]]
            return torch.cat(order)[: real.numel()]
        if kind in ("again", "stale") and history:
            fitting = [one for one in history if one.numel() == real.numel() and not torch.equal(one, real)]
            found = history[-1] if kind == "again" else self._rng.choice(fitting or history)
            return torch.cat([found, real[found.numel() :]])[: real.numel()]
        return real


class AlteredTransport(Wrapped):
    """A subscriber's transport; `label` says which version comes, and whether as a change."""

    def __init__(self, inner: Transport, faults: DataFaults, name: str) -> None:
        super().__init__(inner)
        self._faults, self._name, self._version, self._is_change = faults, name, -1, False
        self._pieces: list[torch.Tensor] = []
        self._history: list[torch.Tensor] = []

    def label(self, version: int, entries: Sequence[Sequence[Entry]] | None) -> None:
        self._version, self._is_change, self._pieces = version, entries is None, []
        super().label(version, entries)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        self.inner.broadcast(bucket, index)
        self._pieces.append(bucket)

    def finish(self, arrived: Callable[[int], Any] = ignore) -> None:
        self.inner.finish(arrived)
        if not self._is_change:
            return
        faults, real = self._faults, torch.cat(self._pieces)
        with faults.lock:
            kind = faults.due.get(self._name, "")
            given = faults.given(kind, real, self._pieces[0].numel(), self._history)
            if not torch.equal(given, real):
                faults.due.pop(self._name, None)
                faults.planted.append((self._name, self._version, kind))
                for piece, part in zip(self._pieces, given.split([p.numel() for p in self._pieces]), strict=True):
                    piece.copy_(part)
        self._history = [*self._history, real][-HISTORY:]


@dataclasses.dataclass(frozen=True, slots=True)
class Chances:
    """Of a fault of each sort, per version and subscriber; `back` counts for versions that go back."""

    control: float = 0.5
    data: float = 0.1
    back: float = 0.5
    base: float = 0.05


class Changes(BusCluster):
    """Publisher, proxies and subscribers of one process; a context manager.

    `pace_s`: between versions, as a learner has steps in between; `heal_s`: until all serve the last one.
    """

    def __init__(
        self, seed: int, policy: Policy, *, chances: Chances = Chances(), pace_s: float = 0.1, heal_s: float = 30.0
    ) -> None:
        super().__init__(CONFIG)
        self._rng, self._policy, self._chances = random.Random(seed), policy, chances
        self._pace_s, self._heal_s = pace_s, heal_s
        self.data, self._proxy = DataFaults(seed), Proxy()

    def __enter__(self) -> "Changes":
        self._proxy.__enter__()
        super().__enter__()
        links = {name: self._proxy.link(self.publisher.address) for name in NAMES}
        self.control = ControlFaults(self._rng.randrange(1 << 30), links)
        for name, link in links.items():
            self.add(name, address=link.address, transport_factory=wrapping(AlteredTransport, self.data, name))
        self.wait_for_all()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()  # the receivers end before their proxy
        self._proxy.__exit__()

    def run(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        """Publish so many versions among faults; what came of it, ready for JSON, and what is wrong."""
        started, publisher, kinds = time.monotonic(), self.publisher, Counter[str]()
        as_changes, longest_s = 0, 0.0
        for _ in range(versions):
            kind, named = self._policy.next()
            kinds[kind] += 1
            self._plan(kind)
            began, before = time.monotonic(), publisher.stats()["changes"]
            version = self.start_publish(named)
            self.oracle.claims(version, publisher.wait().served)  # the learner goes on whatever becomes of it
            longest_s = max(longest_s, time.monotonic() - began)
            as_changes += publisher.stats()["changes"] > before
            time.sleep(self._pace_s)
        self.control.clear()
        self.data.due.clear()
        wrong: list[str] = []
        try:
            what = f"all serve v{versions} after the last fault"
            self.wait(lambda: all(self.has(versions, name) for name in NAMES), what, self._heal_s)
        except Hung as hung:
            wrong = [str(hung)]
        is_healed = not wrong
        if longest_s > CONFIG.deadline_s + SLACK_S:
            wrong.append(f"a publish took {longest_s:.1f} s, its deadline is {CONFIG.deadline_s:g} s")
        sums = {
            "versions": versions,
            "kinds": dict(kinds),
            "as_changes": as_changes,
            "whole": versions - as_changes,
            "longest_publish_s": round(longest_s, 2),
            "all_at_the_newest": is_healed,
        }
        self.end()
        found, more = self._result(versions)
        wrong += more
        return {**sums, **found, "seconds": round(time.monotonic() - started, 1), "in_order": not wrong}, wrong

    def has(self, version: int, name: str) -> bool:
        """Whether a subscriber serves a version, and the publisher knows it."""
        return self.publisher.members().get(name) == ("live", version) and self.serves(version, name)

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

    def _result(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        oracle, stats, receivers = self.oracle, self.publisher.stats(), self.receivers.values()
        activated = {name: set(oracle.activated.get(name, ())) for name in NAMES}
        planted = [*self.data.planted, *((name, version, "other base") for name, version in self.control.rebased)]
        refusals = [(line, found) for line in self.lines if (found := REFUSED.search(line))]
        refused = {(found["name"], int(found["version"])) for _, found in refusals}
        unseen = [one for one in planted if one[:2] not in refused]
        ended = all(receiver.closed and not receiver.is_alive() for receiver in receivers)
        wrong = list(oracle.wrong)
        wrong += [f"{kind} of v{version} at {name!r} was not noticed" for name, version, kind in unseen]
        wrong += [f"{name!r} served no version" for name, found in activated.items() if not found]
        wrong += [] if ended else ["a subscriber has not ended with the bus"]
        return {
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
            "removed": dict(sorted(Counter(event.symptom for event in self.removed).items())),
            "restarts": sum(receiver.removals for receiver in receivers),
            "ended": ended,
            "served_wrong": len(oracle.wrong),
            "bit_exact": not oracle.wrong and all(activated.values()),
        }, wrong


def longest_gap(activated: set[int], versions: int) -> int:
    """Most versions in a row, from 1 to `versions`, that are not among these."""
    edges = [0, *sorted(activated), versions + 1]
    return max(after - before - 1 for before, after in itertools.pairwise(edges))
