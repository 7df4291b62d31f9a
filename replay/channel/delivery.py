"""When a message is sent again: the rules of both ends of a channel. No socket, and time is an argument.

A link loses what was on its way when it breaks, and keeps the order of what it delivers. Therefore
- a *question* is small: it is repeated until its answer has come (`Repeat`), and answering it twice changes nothing;
- a *payload* (Lease, EvaluationLease, Group, EvaluationResult, Batch) is sent once. No timer repeats it. It goes out
  again after Hello, or once its receiver shows that it is not there: an inventory lacks it for BEATS beats in a row
  (`Inventory`), or a word that its sender sent after it has come without it (Renew.finished, Sent).
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

BEATS = 2
"""Inventories in a row that lack what was sent: the first one may have crossed it on its way."""


class Repeat:
    """A question that is due at once, and again every `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self._at = every_s, 0.0
        self.asked = False

    def due(self, now: float) -> bool:
        """Whether to ask now; True counts as asked."""
        if self.asked and now < self._at:
            return False
        self.asked, self._at = True, now + self.every_s
        return True


class Inventory(Generic[Key]):
    """What the other end says to hold, one word a beat, against what it was sent."""

    def __init__(self) -> None:
        self._held: frozenset[Key] = frozenset()
        self._beats = 0
        self._since: dict[Key, int] = {}
        """Of what was sent and is not held: beats when that was seen first, or when it was sent last."""

    def heard(self, held: Iterable[Key]) -> None:
        """The word of one beat: all that is held now."""
        self._beats += 1
        self._held = frozenset(held)
        self._since = {k: n for k, n in self._since.items() if k not in self._held and self._beats - n <= BEATS}

    def lacks(self, key: Key) -> bool:
        """Whether to send `key` again: BEATS words have come without it. True counts as sent."""
        if key in self._held:
            return False
        if self._beats - self._since.setdefault(key, self._beats) < BEATS:
            return False
        self._since[key] = self._beats
        return True
