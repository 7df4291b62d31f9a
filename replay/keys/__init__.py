"""CURVE keys for the ZeroMQ sockets of a run (`network.keys`).

`python -m replay.keys --out keys --clients node1,node2` writes

    keys/server.key, keys/server.key_secret              replay and the weight bus, on the learner's node
    keys/clients/learner.key, learner.key_secret         whatever connects from the learner's node
    keys/clients/node1.key, node1.key_secret, ...        whatever connects from another node

The learner's node keeps this folder. Every other node gets a folder with its own key and the server's public key:
`python -m replay.keys --out keys --export-node node1 --to node1-keys` writes it; copy it to where the run's
`network.keys` points on that node. server.key_secret never leaves the learner's node.

Nothing is overwritten: --force replaces a folder of keys, and every node needs its new files afterwards.

A folder of keys in use is changed on the learner's node; a run that serves with it notices within about a second:

    python -m replay.keys --out keys --add node3         one more may connect
    python -m replay.keys --out keys --remove node3      it may not connect any more, and what it sends is refused
    python -m replay.keys --out keys --rotate node1      a new key for node1; its old one is valid as well, until
    python -m replay.keys --out keys --remove-old node1  node1 has its new files and was started with them
    python -m replay.keys --out keys --rotate server     all nodes need the new server.key, the run a restart
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq.auth

from replay.channel.errors import KeysError
from replay.channel.keys import CLIENTS, LEARNER, OLD, PUBLIC, SECRET, SERVER, load_keys

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ENDS = (PUBLIC, OLD, SECRET)
NODES = "nodes"
"""The client that all other nodes share where --clients names none."""


class MakeError(RuntimeError):
    """The keys cannot be made or changed; the message names the path and the way out."""


def make(out: Path, clients: Sequence[str], *, force: bool) -> None:
    """Write a folder of new keys, whole or not at all.

    Raises:
        MakeError: a name cannot be a file name or comes twice, or `out` exists and may not be replaced.
    """
    for name in clients:
        check_name("--clients", name)
    names = [LEARNER, *clients]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MakeError(f"--clients {twice[0]!r} comes twice ({LEARNER!r} is always made)")
    check_free(out, force=force)
    with new_folder(out) as folder:
        (folder / CLIENTS).mkdir(mode=0o700)
        zmq.auth.create_certificates(folder, SERVER)
        for name in names:
            zmq.auth.create_certificates(folder / CLIENTS, name)


def export(keys: Path, name: str, out: Path) -> None:
    """Write the folder of one other node: its own key pair and the server's public key.

    Raises:
        MakeError: there is no such client, or `out` exists.
        KeysError: `keys` is not a folder of keys.
    """
    known = sorted(load_keys(keys).clients.values())
    if name not in known or not (keys / CLIENTS / (name + SECRET)).is_file():
        raise MakeError(f"--export-node {name!r}: {keys / CLIENTS} holds no such key; there are {', '.join(known)}")
    check_free(out, force=False)
    with new_folder(out) as folder:
        (folder / CLIENTS).mkdir(mode=0o700)
        for file in (SERVER + PUBLIC, f"{CLIENTS}/{name}{PUBLIC}", f"{CLIENTS}/{name}{SECRET}"):
            shutil.copyfile(keys / file, folder / file)


def add(keys: Path, name: str) -> None:
    """One more client in a folder of keys.

    Raises:
        MakeError: there is such a client, or this folder is not that of the node that serves.
    """
    check_name("--add", name)
    check_serves(keys)
    if (keys / CLIENTS / (name + PUBLIC)).exists():
        raise MakeError(f"--add {name!r}: {keys / CLIENTS} has that key; --rotate {name} replaces it")
    put_pair(keys, f"{CLIENTS}/{name}")


def remove(keys: Path, name: str) -> None:
    """Take a client away, its old key included.

    Raises:
        MakeError: there is no such client, or it is the learner's own.
    """
    check_client("--remove", keys, name)
    if name == LEARNER:
        raise MakeError(f"--remove {name!r}: the learner's node itself connects with it; --rotate {name} replaces it")
    for end in ENDS:
        (keys / CLIENTS / (name + end)).unlink(missing_ok=True)


def rotate(keys: Path, name: str) -> None:
    """A new pair. A client's old public key stays valid beside it; the server has one key at a time.

    Raises:
        MakeError: there is no such client, or its last rotation has not ended.
    """
    if name == SERVER:
        check_serves(keys)
        put_pair(keys, SERVER)
        return
    check_client("--rotate", keys, name)
    public, old = keys / CLIENTS / (name + PUBLIC), keys / CLIENTS / (name + OLD)
    if old.exists():
        raise MakeError(f"--rotate {name!r}: {old} is still valid; end that rotation first with --remove-old {name}")
    with private_folder(keys) as work:
        shutil.copyfile(public, work / old.name)
        (work / old.name).replace(old)
    put_pair(keys, f"{CLIENTS}/{name}")


def remove_old(keys: Path, name: str) -> None:
    """End a rotation: only the new key is valid from now on.

    Raises:
        MakeError: there is no such client, or no old key of it.
    """
    check_client("--remove-old", keys, name)
    old = keys / CLIENTS / (name + OLD)
    if not old.exists():
        raise MakeError(f"--remove-old {name!r}: {old} is not there, so no rotation is under way")
    old.unlink()


def check_name(option: str, name: str) -> None:
    """Raises MakeError when a name cannot be a file name."""
    if not NAME.fullmatch(name) or name == SERVER:
        raise MakeError(f"{option} {name!r}: a name consists of letters, digits, '.', '_' and '-'; not {SERVER!r}")


def check_serves(keys: Path) -> None:
    """Raises MakeError when this folder does not decide which clients may connect."""
    if not (keys / (SERVER + SECRET)).is_file():
        raise MakeError(f"{keys} has no {SERVER + SECRET}; keys are changed in the folder of the learner's node")


def check_client(option: str, keys: Path, name: str) -> None:
    """Raises MakeError when there is no such client, or `keys` does not decide which clients may connect."""
    check_name(option, name)
    check_serves(keys)
    if not (keys / CLIENTS / (name + PUBLIC)).is_file():
        known = ", ".join(sorted(path.stem for path in (keys / CLIENTS).glob("*" + PUBLIC))) or "none"
        raise MakeError(f"{option} {name!r}: {keys / CLIENTS} holds no such key; there are {known}")


def put_pair(keys: Path, name: str) -> None:
    """A new pair as `name` (a path in `keys`), in place of the one that is there. Each file appears whole, the public
    one first: a server must know a key before anybody can connect with it."""
    with private_folder(keys) as work:
        zmq.auth.create_certificates(work, "new")
        for end in (PUBLIC, SECRET):
            (work / ("new" + end)).replace(keys / (name + end))


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """A folder that only this user may enter, and that is gone afterwards."""
    mask = os.umask(0o077)
    work = Path(tempfile.mkdtemp(prefix=".new-keys.", dir=parent))
    try:
        yield work
    finally:
        os.umask(mask)
        shutil.rmtree(work)


def check_free(out: Path, *, force: bool) -> None:
    """Raises MakeError when `out` exists, or, with force, when it holds anything but keys."""
    if not out.exists():
        return
    if not force:
        raise MakeError(f"{out} exists, and keys are not overwritten; name another folder, or --force to replace it")
    foreign = [path for path in sorted(out.rglob("*")) if path.suffix not in ENDS and path.name != CLIENTS]
    if foreign or not out.is_dir():
        raise MakeError(f"{foreign[0] if foreign else out} was not made by this script, so nothing is replaced")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that only this user may enter, in place of `out` once it is filled and proven to be readable."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(out.parent) as work:
        new = work / "new"
        new.mkdir()
        yield new
        load_keys(new)
        if out.exists():
            out.rename(work / "old")
        new.rename(out)


def say(text: str) -> None:
    """One line on standard output."""
    sys.stdout.write(text + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `change` is one of CHANGES with its name, or None."""
    parser = argparse.ArgumentParser(
        prog="python -m replay.keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of keys of the learner's node")
    parser.add_argument(
        "--clients", default=NODES, help=f"names of other nodes, by commas (default: {NODES}, one key for them all)"
    )
    parser.add_argument("--force", action="store_true", help="replace a folder of keys")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where --export-node writes")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--export-node", metavar="NAME", help="write the folder of this node from --out to --to")
    one.add_argument("--add", metavar="NAME", help="a key for one more node")
    one.add_argument("--remove", metavar="NAME", help="take this node's key away")
    one.add_argument("--rotate", metavar="NAME", help=f"a new key for this node, or for the server ({SERVER})")
    one.add_argument("--remove-old", metavar="NAME", help="end a rotation: only the new key is valid")
    args = parser.parse_args(arguments)
    if (args.export_node is None) != (args.to is None):
        parser.error("--export-node NAME and --to DIR come together")
    return args


def change(args: argparse.Namespace) -> bool:
    """Change or export from a folder of keys as the command line says; False when it says to make one."""
    keys, name, command = args.out, "", f"python -m replay.keys --out {args.out}"
    if name := args.export_node:
        export(keys, name, args.to)
        say(f"{args.to}: the keys of {name}; copy this folder to where network.keys points there")
    elif name := args.add:
        add(keys, name)
        say(f"{keys}: {name} may connect. Its folder: {command} --export-node {name} --to {name}-keys")
    elif name := args.remove:
        remove(keys, name)
        say(f"{keys}: {name} may not connect any more")
    elif (name := args.rotate) == SERVER:
        rotate(keys, name)
        say(f"{keys}: a new {SERVER + PUBLIC}; copy it to every node, and start the run again")
    elif name:
        rotate(keys, name)
        say(f"{keys}: {name} has a new key, its old one is valid as well. Its new folder:")
        say(f"  {command} --export-node {name} --to {name}-keys")
        say(f"When it was started with that: {command} --remove-old {name}")
    elif name := args.remove_old:
        remove_old(keys, name)
        say(f"{keys}: the old key of {name} is not valid any more")
    return bool(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = parse(arguments)
    clients = [name.strip() for name in args.clients.split(",") if name.strip()]
    try:
        if change(args):
            return 0
        make(args.out, clients, force=args.force)
    except (MakeError, KeysError) as error:
        sys.stderr.write(f"replay.keys: {error}\n")
        return 2
    say(f"{args.out}: keys of the learner's node; set network.keys={args.out}" + (". Other nodes:" if clients else ""))
    for name in clients:
        say(f"  python -m replay.keys --out {args.out} --export-node {name} --to {name}-keys")
    return 0
