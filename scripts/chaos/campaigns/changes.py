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
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.channel import Envelope, decode, encode
from scripts.chaos.bus_cluster import BusCluster, Places, Policy
from scripts.chaos.polling import Hung
from scripts.chaos.proxy import Direction, Intercept, Link, Proxy, ZmtpMessage
from scripts.chaos.report import State, ends_within
from weight_bus.messages import TO_SUBSCRIBER, Begin

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


@dataclasses.dataclass(frozen=True, slots=True)
class Chances:
    """Of a fault of each sort, per version and subscriber; `back` counts for versions that go back."""

    control: float = 0.5
    data: float = 0.1
    back: float = 0.5
    base: float = 0.05


class Faults:
    """What is to happen to the messages and the changes of one subscriber, and what has happened."""

    def __init__(self, seed: str, link: Link) -> None:
        self._rng, self._link = random.Random(seed), link
        self._waiting: set[tuple[Direction, str]] = set()  # kinds of message with a fault to come
        self.of_messages: Counter[tuple[str, str]] = Counter()  # by deed and kind
        self.due = ""  # a fault of data, for the next change that it fits
        self.planted: list[tuple[int, str]] = []  # (version, kind), only where something else was given than had come
        self._bases: list[str] = []  # digests that changes were made from
        self._history: list[torch.Tensor] = []

    def plan(self, kind: str, chances: Chances) -> None:
        """Before a version of this kind: faults of messages and of data, drawn by their chances."""
        if self._rng.random() < chances.control:
            self._plan_message()
        if kind == "back" and self._rng.random() < chances.back:
            self.due = "again"  # has the size of the change back, so only the digests can tell
        elif self._rng.random() < chances.data:
            self.due = self._rng.choice(DATA_KINDS)
        if self._rng.random() < chances.base:  # the next change that is begun names a base that another one had
            self._arm("down", "other base", Intercept(self._has_another_base, self._rebased))

    def _plan_message(self) -> None:
        """One fault more of a message; none where one of its kind is to come already."""
        direction: Direction = self._rng.choice(("up", "down"))
        kind, deed = self._rng.choice(MESSAGES[direction]), self._rng.choice(DEEDS)
        if deed == "late copy" and kind == "Heartbeat":
            deed = "repeated"

        def change(message: ZmtpMessage) -> list[bytes]:
            self._waiting.remove((direction, kind))
            self.of_messages[deed, kind] += 1
            whole = message.wire()
            if deed == "late copy":
                again = Intercept(after(self._rng.randrange(BEHIND)), lambda other: [other.wire(), whole])
                self._link.intercepts[direction].append(again)
            return {"dropped": [], "repeated": [whole, whole]}.get(deed, [whole])

        wanted = after(self._rng.randrange(AHEAD), kind)
        self._arm(direction, kind, Intercept(wanted, change, hold_for_next=deed == "reordered"))

    def clear(self) -> None:
        self.due = ""
        for intercepts in self._link.intercepts.values():
            intercepts.clear()

    def come(self, version: int, entries: Places | None, pieces: list[torch.Tensor]) -> None:
        """Spoil a change that has come, where the fault that is due fits it."""
        if entries is not None:
            return
        real = torch.cat(pieces)
        given = self._given(real, pieces[0].numel())
        if not torch.equal(given, real):
            self.planted.append((version, self.due))
            self.due = ""
            for piece, part in zip(pieces, given.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)
        self._history = [*self._history, real][-HISTORY:]

    def _given(self, real: torch.Tensor, piece: int) -> torch.Tensor:
        """What to give instead; the real one where the fault does not fit."""
        kind, history = self.due, self._history
        if kind in ("twice", "swapped") and real.numel() > piece:
            first, rest = real[:piece], real[piece:]
            order = [first, first, rest] if kind == "twice" else [rest[:piece], first, rest[piece:]]
            return torch.cat(order)[: real.numel()]
        if kind in ("again", "stale") and history:
            fitting = [one for one in history if one.numel() == real.numel() and not torch.equal(one, real)]
            found = history[-1] if kind == "again" else self._rng.choice(fitting or history)
            return torch.cat([found, real[found.numel() :]])[: real.numel()]
        return real

    def _arm(self, direction: Direction, kind: str, intercept: Intercept) -> None:
        if (direction, kind) not in self._waiting:
            self._waiting.add((direction, kind))
            self._link.intercepts[direction].append(intercept)

    def _has_another_base(self, message: ZmtpMessage) -> bool:
        begin = _envelope(message).message if message.kind == "Begin" else None
        if not isinstance(begin, Begin) or not begin.base:
            return False
        self._bases.append(begin.base)
        return len(set(self._bases)) > 1

    def _rebased(self, message: ZmtpMessage) -> list[bytes]:
        envelope = _envelope(message)
        begin = envelope.message
        assert isinstance(begin, Begin)
        self._waiting.remove(("down", "other base"))
        self.planted.append((begin.version, "other base"))
        base = self._rng.choice([other for other in self._bases if other != begin.base])
        header = encode(dataclasses.replace(begin, base=base), envelope.run_id, envelope.sequence)[0]
        return [ZmtpMessage((dataclasses.replace(message.frames[0], body=bytes(header)),)).wire()]


def _envelope(message: ZmtpMessage) -> Envelope:
    return decode([frame.body for frame in message.frames], TO_SUBSCRIBER)


class Changes(BusCluster):
    """Publisher, proxies and subscribers of one process; a context manager.

    `pace_s`: between versions, as a learner has steps in between; `heal_s`: until all serve the last one.
    """

    def __init__(
        self, seed: int, policy: Policy, *, chances: Chances = Chances(), pace_s: float = 0.1, heal_s: float = 30.0
    ) -> None:
        super().__init__(CONFIG)
        self._seed, self._policy, self._chances = seed, policy, chances
        self._pace_s, self._heal_s = pace_s, heal_s
        self._proxy, self.faults = Proxy(), dict[str, Faults]()

    def __enter__(self) -> "Changes":
        self._proxy.__enter__()
        super().__enter__()
        for name in NAMES:
            link = self._proxy.link(self.publisher.address)
            self.faults[name] = Faults(f"{self._seed}/{name}", link)
            self.add(name, self.faults[name].come, address=link.address)
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()  # the receivers end before their proxy
        self._proxy.__exit__()

    def run(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        """Publish so many versions among faults; what came of it, ready for JSON, and what is wrong."""
        started, kinds, as_changes, longest_s = time.monotonic(), Counter[str](), 0, 0.0
        for version in range(1, versions + 1):
            kind, named = self._policy.next()
            kinds[kind] += 1
            for faults in self.faults.values():
                faults.plan(kind, self._chances)
            began, before = time.monotonic(), self.publisher.stats()["changes"]
            self.oracle.claims(version, self.publish(version, named).served)  # whatever becomes of it, it goes on
            longest_s = max(longest_s, time.monotonic() - began)
            as_changes += self.publisher.stats()["changes"] > before
            time.sleep(self._pace_s)
        wrong = self._heal(versions)
        sums = {
            "versions": versions,
            "kinds": dict(kinds),
            "as_changes": as_changes,
            "whole": versions - as_changes,
            "longest_publish_s": round(longest_s, 2),
            "all_at_the_newest": not wrong,
        }
        if longest_s > CONFIG.deadline_s + SLACK_S:
            wrong.append(f"a publish took {longest_s:.1f} s, its deadline is {CONFIG.deadline_s:g} s")
        self.end()
        found, more = self._result(versions)
        wrong += more
        return {**sums, **found, "seconds": round(time.monotonic() - started, 1), "in_order": not wrong}, wrong

    def _heal(self, version: int) -> list[str]:
        """Without faults from now on, all must serve the last version, and the publisher must know it."""
        for faults in self.faults.values():
            faults.clear()

        def all_serve() -> bool:
            members = self.publisher.members()
            return all(members.get(name) == ("live", version) and self.serves(version, name) for name in NAMES)

        try:
            self.wait(all_serve, f"all serve v{version} after the last fault", self._heal_s)
        except Hung as hung:
            return [str(hung)]
        return []

    def _result(self, versions: int) -> tuple[dict[str, Any], list[str]]:
        oracle, stats, receivers = self.oracle, self.publisher.stats(), self.receivers.values()
        activated = {name: set(oracle.activated[name]) for name in NAMES}
        between = {name: itertools.pairwise([0, *sorted(found), versions + 1]) for name, found in activated.items()}
        messages = sum((faults.of_messages for faults in self.faults.values()), Counter[tuple[str, str]]())
        planted = [(name, *one) for name, faults in self.faults.items() for one in faults.planted]
        refusals = [found for line in self.lines if (found := REFUSED.search(line))]
        refused = {(found["name"], int(found["version"])) for found in refusals}
        unseen = [one for one in planted if one[:2] not in refused]
        ended = all(receiver.closed and not receiver.is_alive() for receiver in receivers)
        wrong = list(oracle.wrong)
        wrong += [f"{kind} of v{version} at {name!r} was not noticed" for name, version, kind in unseen]
        wrong += [f"{name!r} served no version" for name, found in activated.items() if not found]
        wrong += [] if ended else ["a subscriber has not ended with the bus"]
        return {
            "rounds": int(stats["rounds"]),
            "rounds_of_changes": int(stats["changes"]),
            "messages": {deed: {k: n for (d, k), n in sorted(messages.items()) if d == deed} for deed in DEEDS},
            "faults_of_messages": messages.total(),
            "faults_of_data": dict(sorted(Counter(kind for _, _, kind in planted).items())),
            "unnoticed": len(unseen),
            "refused_by_digest": sum("arrived with corrupt" in found.string for found in refusals),
            "refused_other_base": sum("comes as a change of" in found.string for found in refusals),
            "activated": {name: len(found) for name, found in activated.items()},
            "missed": {name: versions - len(found) for name, found in activated.items()},
            "longest_gap": {name: max(after - before - 1 for before, after in gaps) for name, gaps in between.items()},
            "rejoins": int(stats["joins"]) - len(NAMES),
            "removed": dict(sorted(Counter(e.symptom for e in self.events if e.kind == "removed").items())),
            "restarts": sum(receiver.removals for receiver in receivers),
            "ended": ended,
            "served_wrong": len(oracle.wrong),
            "bit_exact": not oracle.wrong and all(activated.values()),
        }, wrong
