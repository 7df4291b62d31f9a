"""What a server checks before a message counts: whose it is, whether it is whole, whether it came before.

A DEALER numbers its messages upwards from the microseconds of its wall clock, so a peer that starts anew under its old
identity goes on above the numbers that it used before. Only `Arrivals` knows sockets and the clock.

A routing id is an identity and a secret token. A ROUTER gives a routing id to the connection that claims it last
(ROUTER_HANDOVER), before any message shows whose key it has, and ZAP (RFC 27) does not carry the id of the peer. So
nobody can claim the route of another, and an identity moves to a new route only with a message of its own key.
"""

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from replay.channel.frames import Envelope, Registry, WireError, decode
from replay.channel.keys import LEARNER
from replay.channel.roster import Roster, name_of

WINDOW = 1024
"""Messages of one identity, counted back from its highest number, that may still come, each once."""
MAX_IDENTITIES = 4096
"""Remembered for each sender; the one that was not heard for longest is forgotten first."""
MAX_IDENTITY_BYTES = 200
TOKEN_BYTES = 16
BEAT_SUFFIX = "/beat"
"""Of the identity of a peer's heartbeats, which come over a connection of their own (replay/channel/pulse.py)."""
WHY = "it is a copy, or two peers share an identity"
ONLY_LEARNER = {"learner", "launcher"}
"""Roles that speak for the run."""
SMALL_BYTES = 8192
"""ZeroMQ cuts messages up to this size out of a shared receive buffer: they are copied, so that they are aligned and do
not keep that buffer."""
NO_RUN = ""
"""Run id of a peer that does not know the run yet."""


class DuplicateMessage(WireError, code="SLIP-NET-06"):
    """A message that was received before, or is too old to tell."""

    symptom = "duplicate"


class NotAdmitted(WireError, code="SLIP-KEYS-02"):
    """A message over a connection that ends with it: the key was removed, or the identity is another's."""

    symptom = "closed"


def sequence_numbers() -> Iterator[int]:
    """Numbers for the messages of one new socket, above those of any that this machine made before."""
    return itertools.count(time.time_ns() // 1000)


def may_be(role: str, sender: str, nodes: Collection[str] = ()) -> str | None:
    """Why the holder of the key `sender` may not have this role, as a sentence; None where it may.

    `sender` is empty where the run has no keys; `nodes` are other keys that this role is for.
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
        """Note a whole message's number. Raises DuplicateMessage: it came before, or is too old."""
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


@dataclass(slots=True)
class KnownPeer:
    """What is known of one identity. `user` and `route` are the key and routing id of its last message."""

    sender: str
    user: str
    route: bytes
    window: Window = field(default_factory=Window)


class Admission:
    """Identities by sender, each with its window. Memory is bounded for each sender, so none can push out another's."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}
        self._of: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def bind(self, identity: str, user: str, route: bytes) -> KnownPeer:
        """The peer behind an identity, its first sender's. Raises NotAdmitted: it is another's."""
        sender = name_of(user)
        names = dict.fromkeys((identity.removesuffix(BEAT_SUFFIX), identity))  # a beat also tells the route of its peer
        for name in names:
            if (owner := self._peers.get(name)) is not None and owner.sender != sender:
                raise NotAdmitted(f"identity {name!r} belongs to key {owner.sender!r}, this came with key {sender!r}")
        mine = self._of.setdefault(sender, OrderedDict())
        for name in names:
            peer = self._peers.setdefault(name, KnownPeer(sender, user, route))
            peer.user, peer.route = user, route
            mine[name] = None
            mine.move_to_end(name)
            if len(mine) > MAX_IDENTITIES:
                del self._peers[mine.popitem(last=False)[0]]
        return self._peers[identity]

    def get(self, identity: str) -> KnownPeer | None:
        return self._peers.get(identity)


def routing_id(identity: str) -> bytes:
    """What a DEALER gives ZeroMQ as its identity: new with each socket, and known to its two ends alone."""
    return identity.encode() + b"\0" + secrets.token_bytes(TOKEN_BYTES)


def beating(route: bytes) -> bytes:
    """The routing id of a peer's heartbeats."""
    identity, _, token = route.partition(b"\0")
    return identity + BEAT_SUFFIX.encode() + b"\0" + token


def identity_of(frame: bytes) -> str:
    """The identity in a routing id. Raises WireError: not UTF-8, not printable, too long, or without its token."""
    name, _, token = frame.partition(b"\0")
    try:
        identity = name.decode("utf-8")
    except UnicodeDecodeError:
        identity = ""
    if not identity or not identity.isprintable() or len(name) > MAX_IDENTITY_BYTES:
        raise WireError(f"identity {name[:40]!r} is not text of 1 to {MAX_IDENTITY_BYTES} printable characters")
    if len(token) != TOKEN_BYTES:
        raise WireError(f"identity {identity[:40]!r} has no token of {TOKEN_BYTES} bytes behind it")
    return identity


def _of_peer(route: bytes) -> bytes:
    """The routing id of the peer whose heartbeats have this one, or itself."""
    return route.replace(BEAT_SUFFIX.encode() + b"\0", b"\0", 1)


def shown(identity: str) -> str:
    """What may be shown of an identity: `rollout-0` of `rollout-0.1f3a`."""
    return identity[:40].rpartition(".")[0] or identity[:40]


def contents(parts: Sequence[zmq.Frame]) -> list[bytes | memoryview]:
    """What received frames hold; large ones are read-only views without a copy."""
    return [part.buffer.toreadonly() if len(part) > SMALL_BYTES else part.bytes for part in parts]


class Arrivals:
    """The checks of one ROUTER, in order: size, identity, key, schema, run id, number."""

    def __init__(self, accepted: Registry, max_message_bytes: int, roster: Roster | None) -> None:
        """`roster` is the gate's; None without keys."""
        self._accepted, self._max_message_bytes, self._roster = accepted, max_message_bytes, roster
        self._admission = Admission()

    def take(self, parts: Sequence[zmq.Frame], run_id: str | None) -> tuple[str, Envelope | WireError]:
        """(identity, message) of what recv_multipart(copy=False) gave; what is wrong comes as its error.

        A message must carry `run_id`, or none; None lets all pass. A beat comes as of the peer whose it is.
        """
        identity = ""
        try:
            identity = identity_of(parts[0].bytes)
            return identity.removesuffix(BEAT_SUFFIX), self._checked(identity, parts, run_id)
        except WireError as error:
            return identity.removesuffix(BEAT_SUFFIX), error

    def route(self, identity: str) -> bytes | None:
        """The routing id for a peer that was heard; None for others, and when the key that it has was removed since."""
        peer = self._admission.get(identity)
        admitted = peer is not None and (self._roster is None or self._roster.admits(peer.user, time.monotonic()))
        return peer.route if peer is not None and admitted else None

    def _checked(self, identity: str, parts: Sequence[zmq.Frame], run_id: str | None) -> Envelope:
        size = sum(map(len, parts))
        if size > self._max_message_bytes:
            raise WireError(f"message of {size} bytes is above {self._max_message_bytes} (network.max_message_bytes)")
        try:
            peer = self._admission.bind(identity, self._user(parts[0]), _of_peer(parts[0].bytes))
        except NotAdmitted:
            _cut(parts[0])  # or it would get what is meant for others
            raise
        envelope = decode(contents(parts[1:]), self._accepted, peer.sender)
        if run_id is not None and envelope.run_id not in (NO_RUN, run_id):
            raise WireError(f"run id {envelope.run_id!r}, this is {run_id!r}")
        peer.window.take(envelope.sequence)
        return envelope

    def _user(self, part: zmq.Frame) -> str:
        """User id of the connection that a frame came over. Raises NotAdmitted when its key was removed."""
        if self._roster is None:
            return ""
        user = str(part.get("User-Id"))
        if not self._roster.admits(user, time.monotonic()):
            raise NotAdmitted(f"the key {name_of(user)!r} was removed from {self._roster.folder}")
        return user


def _cut(part: zmq.Frame) -> None:
    """End the connection that a frame came over; when its peer connects again, the gate refuses it.

    ZeroMQ itself cannot close one connection of a socket. Its number may belong to another one by now: then that one
    ends, and its peer connects again.
    """
    number = part.get(zmq.MessageOption.SRCFD)
    with contextlib.suppress(OSError):  # it is closed already, or is no connection any more
        copy = socket.socket(fileno=os.dup(number))
        with copy:
            peer = str(part.get("Peer-Address"))
            if copy.type == socket.SOCK_STREAM and _plain(str(copy.getpeername()[0])) == _plain(peer):
                copy.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")
