"""What a server remembers of its peers: whose key an identity belongs to, and which messages it has had already.

Pure: no socket, no clock. A DEALER numbers its messages upwards from the microseconds of its wall clock, so a peer that
starts anew under its old identity goes on above the numbers that it used before.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator

from replay.channel.frames import WireError
from replay.channel.keys import LEARNER
from replay.channel.roster import name_of

WINDOW = 1024
"""Messages of one identity, counted back from its highest number, that may still come, each once."""
MAX_IDENTITIES = 1024
"""Remembered for each sender; the one that was not heard for longest is forgotten first."""
MAX_IDENTITY_BYTES = 200
WHY = "it is a copy, or two peers share an identity"
ONLY_LEARNER = {"learner", "launcher"}
"""Roles that speak for the run."""


class DuplicateMessage(WireError):
    """A message that was received before, or is too old to tell."""

    symptom = "duplicate"


class NotAdmitted(WireError):
    """A message over a connection that ends with it: the key was removed, or the identity is another's."""

    symptom = "closed"


def sequence_numbers() -> Iterator[int]:
    """Numbers for the messages of one new socket, above those of any that this machine made before."""
    return itertools.count(time.time_ns() // 1000)


def may_be(role: str, sender: str, nodes: Collection[str] = ()) -> str | None:
    """Why the holder of this key may not have this role, as a sentence; None where it may.

    Args:
        role: as Hello says.
        sender: name of the key, from Envelope.sender; empty where the run has no keys, and then nothing is known.
        nodes: other keys that this role is for.
    """
    if not sender or sender == LEARNER or sender in nodes or role not in ONLY_LEARNER:
        return None
    problem = (
        f"the key {sender!r} may not be a {role}: that takes the key {LEARNER!r}, which is on the learner's node"
        " (network.keys)"
    )
    if nodes:
        problem += (
            f", or for ranks above 0 one of {sorted(nodes)}; a learner node has a key of its own name: python -m"
            " replay.keys --out keys --add NODE, and --export-node NODE --to DIR writes its folder"
        )
    return problem


class Window:
    """The numbers of one identity: which of the last WINDOW have come."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: number _highest - n has come

    def take(self, number: int) -> None:
        """Note the number of a message that was found to be whole.

        Raises:
            DuplicateMessage: it came before, or is older than the window.
        """
        ahead = number - self._highest
        if self._highest < 0 or ahead >= WINDOW:
            self._highest, self._seen = number, 1
        elif ahead > 0:
            self._highest = number
            self._seen = (self._seen << ahead | 1) & ((1 << WINDOW) - 1)
        elif ahead <= -WINDOW:
            raise DuplicateMessage(f"message {number} is older than the last {WINDOW}, up to {self._highest}; {WHY}")
        elif self._seen >> -ahead & 1:
            raise DuplicateMessage(f"message {number} came before; {WHY}")
        else:
            self._seen |= 1 << -ahead


class Peer:
    """What is known of one identity. `user` is the key of its last message, "" without keys."""

    __slots__ = ("sender", "user", "window")

    def __init__(self, sender: str, user: str) -> None:
        self.sender, self.user, self.window = sender, user, Window()


class Admission:
    """Identities by sender, each with its window. Memory is bounded for each sender, so none can push out another's."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._of: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def bind(self, identity: str, user: str) -> Peer:
        """The peer behind an identity, which is that of the first sender who used it.

        Raises:
            NotAdmitted: it is another's.
        """
        sender = name_of(user)
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = Peer(sender, user)
        elif peer.sender != sender:
            raise NotAdmitted(f"identity {identity!r} belongs to key {peer.sender!r}, this came with key {sender!r}")
        peer.user = user
        mine = self._of.setdefault(sender, OrderedDict())
        mine[identity] = None
        mine.move_to_end(identity)
        if len(mine) > MAX_IDENTITIES:
            del self._peers[mine.popitem(last=False)[0]]
        return peer

    def get(self, identity: str) -> Peer | None:
        """The peer behind an identity; None for an unknown one."""
        return self._peers.get(identity)


def identity_of(frame: bytes) -> str:
    """The identity as text; replay prints it and answers to it.

    Raises:
        WireError: it is not UTF-8, not printable, or too long.
    """
    try:
        identity = frame.decode("utf-8")
    except UnicodeDecodeError:
        identity = ""
    if not identity or not identity.isprintable() or len(frame) > MAX_IDENTITY_BYTES:
        raise WireError(f"identity {frame[:40]!r} is not text of 1 to {MAX_IDENTITY_BYTES} printable characters")
    return identity
