"""CURVE keys: what a folder of them holds, who may read it, and how a socket gets them.

    keys/server.key               public key of replay and of the weight bus; on every node
    keys/server.key_secret        their secret key; on the learner's node only
    keys/clients/NAME.key         public keys of those who may connect; on the learner's node
    keys/clients/NAME.key_secret  the key of one who connects; every node holds one, the learner's node all

`python -m replay.keys` writes such folders. A server admits exactly the public keys that its folder lists.
"""

import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, overload

import zmq
import zmq.auth
from zmq.utils import z85

from configs.errors import SlipstreamError

SERVER = "server"
CLIENTS = "clients"
LEARNER = "learner"
"""The client key that the learner's own node takes where it holds several."""
SHARED = "nodes"
"""The client key of all nodes that have none of their own name."""
PUBLIC, SECRET = ".key", ".key_secret"
Z85_CHARACTERS = 40
ZAP_DOMAIN = b"slipstream"


class ChannelError(SlipstreamError, RuntimeError, code="SLIP-NET-01"):
    """A peer could not be reached. `symptom` is one of closed, silent, slow, corrupt, full, duplicate."""

    def __new__(cls, *args: Any) -> Self:
        """The class of the symptom, as OSError does with errno."""
        kind: Any = BY_SYMPTOM.get(args[-1] if args else "", cls) if cls is ChannelError else cls
        made: Self = super().__new__(kind, *args)
        return made

    def __init__(self, message: str, symptom: str) -> None:
        super().__init__(f"{message} [{symptom}]")
        self.symptom = symptom


class PeerRefused(ChannelError):
    """This peer may not take part: its configuration, model folder or key is another; another start is no use."""


class KeyRefused(ChannelError, code="SLIP-KEYS-04"):
    """The CURVE handshake failed: the keys of the two ends do not belong together."""


class PeerSilent(ChannelError, code="SLIP-NET-02"):
    """Nothing came from a peer for too long [silent]."""


class PeerSlow(ChannelError, code="SLIP-NET-03"):
    """A peer lives and does not finish in time [slow]."""


class QueueFull(ChannelError, code="SLIP-NET-04"):
    """Messages for a peer pile up [full]."""


BY_SYMPTOM = {"silent": PeerSilent, "slow": PeerSlow, "full": QueueFull}


class KeysError(ChannelError, code="SLIP-KEYS-01"):
    """CURVE keys are missing, incomplete, broken or readable by others; the message names the file and a way out."""

    def __init__(self, message: str) -> None:
        RuntimeError.__init__(self, message)
        self.symptom = "closed"


@dataclass(frozen=True, slots=True)
class Keys:
    """What one node holds; keys are Z85 text (40 bytes)."""

    folder: Path
    server_public: bytes
    name: str
    """Of this node's client key."""
    client_public: bytes
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(default=None, repr=False)
    clients: Mapping[bytes, str] = field(default_factory=dict)
    """Public key to name of everyone who may connect to this node; empty where no server secret is."""

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        """Make a socket speak CURVE and nothing else: a ROUTER as the server, any other as a client.

        Raises KeysError: a ROUTER, and this folder cannot serve.
        """
        if socket.type != zmq.ROUTER:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
            return
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.serving_secret())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # without it, a context in which nobody answers ZAP requests admits every key
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def on_this_node(self) -> "Keys":
        """For a server of this node, whichever it is: its client key proves it where the server's secret is not.

        Raises KeysError: a public key of `clients/` is broken.
        """
        if self.server_secret is not None:
            return self
        public, secret = self.client_public, self.client_secret
        return replace(self, server_public=public, server_secret=secret, clients=_listed(self.folder))

    def serving_secret(self) -> bytes:
        """The server's secret key. Raises KeysError: this folder cannot serve."""
        secret = self.folder / (SERVER + SECRET)
        if self.server_secret is None:
            raise KeysError(
                f"network.keys: {secret} is missing; replay and the weight bus serve on the node where"
                " `python -m replay.keys` made the keys: start the learner there, or copy the whole folder"
            )
        if not self.clients:
            raise KeysError(
                f"network.keys: {self.folder / CLIENTS} lists no *{PUBLIC}, so nobody could connect; copy the whole"
                " folder that `python -m replay.keys` made"
            )
        return self.server_secret


@overload
def load_keys(folder: str | Path) -> Keys: ...
@overload
def load_keys(folder: str | Path | None) -> Keys | None: ...
def load_keys(folder: str | Path | None) -> Keys | None:
    """The keys of `network.keys`; None for None.

    Raises KeysError: the folder or a file is missing, does not hold a key, does not belong to its other half, or may be
    read (secret) or written (any) by other users.
    """
    if folder is None:
        return None
    folder = Path(folder)
    if not folder.is_dir():
        raise KeysError(
            f"network.keys: no folder {str(folder)!r}; make one with `python -m replay.keys --out keys`, and copy"
            " to every other node what its --export-node gives"
        )
    public_file, secret_file = folder / (SERVER + PUBLIC), folder / (SERVER + SECRET)
    server_public, _ = read_key(public_file)
    own = _own_client(folder)
    keys = Keys(folder, server_public, own.stem, *_read_pair(own))
    if not secret_file.exists():
        return keys
    public, server_secret = _read_pair(secret_file)
    if public != server_public:
        raise KeysError(
            f"network.keys: {public_file} and {secret_file} are not of one pair; files of two runs of"
            " `python -m replay.keys` were mixed: copy one folder whole"
        )
    return replace(keys, server_secret=server_secret, clients=_listed(folder))


def _listed(folder: Path) -> dict[bytes, str]:
    """Public key to name of everyone in `clients/`."""
    return {read_key(path)[0]: path.stem for path in sorted((folder / CLIENTS).glob("*" + PUBLIC))}


def _own_client(folder: Path) -> Path:
    """The secret file that this node connects with: the learner's, or else the only one."""
    secrets = sorted((folder / CLIENTS).glob("*" + SECRET))
    learner = folder / CLIENTS / (LEARNER + SECRET)
    if learner in secrets:
        return learner
    if len(secrets) != 1:
        found = ", ".join(path.name for path in secrets) or "none"
        raise KeysError(
            f"network.keys: {folder / CLIENTS} must hold one *{SECRET}, the key of this node (or {learner.name});"
            f" found {found}. python -m replay.keys --out keys --export-node NAME --to DIR gives a node's folder"
        )
    return secrets[0]


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    """(public, secret) of a secret file that is this user's alone."""
    public, secret = read_key(path)
    if secret is None:
        raise KeysError(f'network.keys: {path} has no line secret-key = "..."; copy the file again')
    if zmq.curve_public(secret) != public:
        raise KeysError(f"network.keys: the two keys in {path} are not of one pair; copy the file again")
    return public, secret


def read_key(path: Path) -> tuple[bytes, bytes | None]:
    """(public, secret or None) of a key file; the mode is checked before anything is read.

    Raises KeysError: it is missing, holds no key, or is open to others.
    """
    is_secret = path.suffix == SECRET
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & (0o077 if is_secret else 0o022):
            may = "read" if is_secret else "changed"
            raise KeysError(f"network.keys: {path} may be {may} by other users (mode {mode:04o}); chmod 600 {path}")
        public, secret = zmq.auth.load_certificate(path)
    except FileNotFoundError as error:
        raise KeysError(
            f"network.keys: {path} is missing; copy what python -m replay.keys made for this node again"
        ) from error
    except OSError as error:
        raise KeysError(f"network.keys: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise KeysError(f'network.keys: {path} has no line public-key = "..."; copy the file again') from error
    if not all(_is_key(key) for key in (public, secret) if key is not None):
        raise KeysError(f"network.keys: {path} does not hold a key of {Z85_CHARACTERS} Z85 characters; copy it again")
    return public, secret


def _is_key(key: bytes) -> bool:
    try:
        return len(key) == Z85_CHARACTERS and len(z85.decode(key)) == Z85_CHARACTERS * 4 // 5
    except (KeyError, struct.error):  # not of the alphabet; five characters above 2^32
        return False
