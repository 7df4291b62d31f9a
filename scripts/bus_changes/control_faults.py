"""The control plane between the publisher and a subscriber, on which messages are lost, repeated and out of order.

dropped    it never comes
repeated   it comes twice, one after the other
late copy  it comes, and once more behind up to three other messages
reordered  it comes after its successor
other base a Begin of a change names a base that is not the one that it was made from
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from replay.channel import decode, encode
from scripts.chaos.proxy import Direction, Hand, Link
from scripts.chaos.zmtp import Parcel
from weight_bus.messages import TO_SUBSCRIBER, Begin

UP = ("Staged", "Applied", "EpochReady", "Join", "Heartbeat", "ReceiveFailed")
DOWN = ("Begin", "Commit", "Epoch", "Abort", "Welcome", "Removed", "Heartbeat")
DEEDS = ("dropped", "repeated", "late copy", "reordered")
BEHIND = 3
AHEAD = 3
"""A fault waits for up to so many messages of its kind to pass first."""


@dataclass(slots=True)
class After:
    """Wanted is the n-th message, from 0 on, of those of a kind, or of all but heartbeats: these have a pace, and in
    part a connection, of their own."""

    left: int
    kind: str = ""

    def __call__(self, parcel: Parcel) -> bool:
        """Whether it is this one."""
        counts = parcel.kind == self.kind if self.kind else parcel.kind != "Heartbeat"
        self.left -= counts
        return counts and self.left < 0


class ControlFaults:
    """Faults on the links of all subscribers, and what came of them."""

    def __init__(self, seed: int, links: dict[str, Link]) -> None:
        self._rng = random.Random(seed)
        self._links = links
        self._armed: dict[tuple[str, str], Hand] = {}
        self.done: dict[str, Counter[str]] = {deed: Counter() for deed in DEEDS}
        """By deed and kind of message."""
        self._bases: list[str] = []
        """Digests that changes were made from."""
        self.rebased: list[tuple[str, int]] = []
        """(subscriber, version) of changes that were given another base."""

    def plan(self, name: str) -> None:
        """One fault more on a link; none where one of its kind is waiting already."""
        direction: Direction = self._rng.choice(("up", "down"))
        kinds = UP if direction == "up" else DOWN
        kind, deed = self._rng.choice(kinds), self._rng.choice(DEEDS)
        if deed == "late copy" and kind == "Heartbeat":
            deed = "repeated"
        hand = Hand(After(self._rng.randrange(AHEAD), kind), self._changes(name, direction, deed))
        hand.hold_for_next = deed == "reordered"
        self._arm(name, direction, kind, hand)

    def plan_other_base(self, name: str) -> None:
        """The next change that is begun names a base that some version before had."""
        self._arm(name, "down", "change", Hand(self._is_change, lambda parcel: [self._rebased(name, parcel)]))

    def _is_change(self, parcel: Parcel) -> bool:
        begin = _begin(parcel) if parcel.kind == "Begin" else None
        if begin is None or not begin.base:
            return False
        self._bases.append(begin.base)
        return len(set(self._bases)) > 1

    def _rebased(self, name: str, parcel: Parcel) -> bytes:
        begin = _begin(parcel)
        base = self._rng.choice([other for other in self._bases if other != begin.base])
        self.rebased.append((name, begin.version))
        envelope = decode([frame.body for frame in parcel.frames], TO_SUBSCRIBER)
        header = encode(dataclasses.replace(begin, base=base), envelope.run_id, envelope.sequence)[0]
        return Parcel((dataclasses.replace(parcel.frames[0], body=bytes(header)),)).wire()

    def clear(self) -> None:
        """Let everything pass from now on."""
        for link in self._links.values():
            for hands in link.hands.values():
                hands.clear()

    def _arm(self, name: str, direction: Direction, kind: str, hand: Hand) -> None:
        waiting = self._armed.get((name, f"{direction}/{kind}"))
        if waiting is None or waiting.kind:
            self._armed[name, f"{direction}/{kind}"] = hand
            self._links[name].hands[direction].append(hand)

    def _changes(self, name: str, direction: Direction, deed: str) -> Callable[[Parcel], list[bytes]]:
        def change(parcel: Parcel) -> list[bytes]:
            self.done[deed][parcel.kind] += 1
            whole = parcel.wire()
            if deed == "late copy":
                again = Hand(After(self._rng.randrange(BEHIND)), lambda other: [other.wire(), whole])
                self._links[name].hands[direction].append(again)
            return {"dropped": [], "repeated": [whole, whole]}.get(deed, [whole])

        return change


def _begin(parcel: Parcel) -> Begin:
    message = decode([frame.body for frame in parcel.frames], TO_SUBSCRIBER).message
    assert isinstance(message, Begin)
    return message
