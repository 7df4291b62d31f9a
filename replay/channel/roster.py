"""Who may connect: the public keys of `clients/`, read again when the folder has changed while a server runs."""

import contextlib
import logging
import os
import threading
from pathlib import Path

from zmq.utils import z85

from replay.channel.keys import CLIENTS, PUBLIC, Keys, KeysError, read_key

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""At most this often the folder is looked at."""
MARK_BYTES = 8
"""Of the public key in a user id: it tells keys that a name has had from each other."""

Signature = tuple[tuple[str, int, int, int, int], ...]


class Roster:
    """The admitted keys as the folder lists them now. Any thread may ask; the caller gives the time.

    A user id is `NAME/` and the beginning of the key in hex: what libzmq attaches to every message of a connection.
    """

    def __init__(self, keys: Keys) -> None:
        self.folder = keys.folder / CLIENTS
        self._lock = threading.Lock()
        self._users = {z85.decode(public): user_id(name, public) for public, name in keys.clients.items()}
        self._admitted = frozenset(self._users.values())
        self._problems: dict[str, str] = {}
        self._signature: Signature | None = None
        self._looked_at = float("-inf")

    def user(self, public: bytes, now: float) -> str | None:
        """User id of the holder of a public key (32 bytes), or None for a stranger."""
        with self._lock:
            self._look(now)
            return self._users.get(public)

    def admits(self, user: str, now: float) -> bool:
        """Whether the key of this user id is still listed."""
        with self._lock:
            self._look(now)
            return user in self._admitted

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        signature = _signature(self.folder)
        if signature == self._signature:
            return
        self._signature = signature
        users, problems = {}, {}
        for name, *_ in signature:
            path = self.folder / name
            try:
                public, _ = read_key(path)
                users[z85.decode(public)] = user_id(path.stem, public)
            except KeysError as error:
                problems[name] = str(error)
                if self._problems.get(name) != str(error):
                    log.error("a key is left out: %s", error)
        before, self._users, self._problems = self._admitted, users, problems
        self._admitted = frozenset(users.values())
        for user in sorted(self._admitted - before):
            log.info("%s: key %s was added, it may connect", self.folder, user)
        for user in sorted(before - self._admitted):
            log.warning("%s: key %s was removed, it may not connect any more", self.folder, user)


def user_id(name: str, public: bytes) -> str:
    """Example: `node1/0f3c9a77d1b2e860`, of a public key in Z85."""
    return f"{name}/{z85.decode(public)[:MARK_BYTES].hex()}"


def name_of(user: str) -> str:
    """The key's name in a user id."""
    return user.rpartition("/")[0]


def _signature(folder: Path) -> Signature:
    """What changes when a public key does; empty for a folder that is gone, which admits nobody."""
    found = []
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # removed just now
                status = (folder / name).stat()
                if name.endswith(PUBLIC):
                    found.append((name, status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode))
    except OSError as error:
        log.error("%s cannot be read, so nobody may connect: %s", folder, error.strerror)
    return tuple(sorted(found))
