"""CURVE keys for the ZeroMQ sockets of a run (`network.keys`).

`python -m replay.keys --out keys --clients node1,node2` writes

    keys/server.key, keys/server.key_secret              replay and the weight bus, on the learner's node
    keys/clients/learner.key, learner.key_secret         whatever connects from the learner's node
    keys/clients/node1.key, node1.key_secret, ...        whatever connects from another node

The learner's node keeps this folder. Every other node gets a folder with its own key and all public ones:
`python -m replay.keys --out keys --export-node node1 --to node1-keys` writes it; copy it to where the run's
`network.keys` points on that node. server.key_secret never leaves the learner's node.

Nothing is overwritten: --force replaces a folder of keys, and every node needs its new files afterwards.

A folder of keys in use is changed on the learner's node; a run that serves with it notices within about a second:

    python -m replay.keys --out keys --add node3         one more may connect
    python -m replay.keys --out keys --remove node3      it may not connect any more, and what it sends is refused
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

from configs.errors import SlipstreamError
from replay.channel.keys import CLIENTS, LEARNER, PUBLIC, SECRET, SERVER, SHARED, KeysError, load_keys
from slipstream.runtime.program import program

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ENDS = (PUBLIC, SECRET)


class MakeError(SlipstreamError, RuntimeError, code="SLIP-KEYS-03"):
    """The keys cannot be made or changed; the message names the path and the way out."""


def make(out: Path, clients: Sequence[str], *, force: bool) -> None:
    """Write a folder of new keys, whole or not at all. Raises MakeError."""
    names = [LEARNER, *clients]
    for name in clients:
        _check_name("--clients", name)
        if names.count(name) > 1:
            raise MakeError(f"--clients {name!r} comes twice ({LEARNER!r} is always made)")
    with _new_folder(out, force=force) as folder:
        zmq.auth.create_certificates(folder, SERVER)
        for name in names:
            zmq.auth.create_certificates(folder / CLIENTS, name)


def export(keys: Path, name: str, out: Path) -> None:
    """Write another node's folder: its key pair, and all public keys, for teachers serve there. Raises as `make`."""
    known = sorted(load_keys(keys).clients.values())
    if name not in known or not (keys / CLIENTS / (name + SECRET)).is_file():
        raise MakeError(f"--export-node {name!r}: {keys / CLIENTS} holds no such key; there are {', '.join(known)}")
    with _new_folder(out, force=False) as folder:
        public = [f"{CLIENTS}/{path.name}" for path in sorted((keys / CLIENTS).glob("*" + PUBLIC))]
        for file in (SERVER + PUBLIC, *public, f"{CLIENTS}/{name}{SECRET}"):
            shutil.copyfile(keys / file, folder / file)


def add(keys: Path, name: str) -> None:
    """One more client. Raises MakeError: it is there already, or this folder does not serve."""
    _check_name("--add", name)
    _check_serves(keys)
    if (keys / CLIENTS / (name + PUBLIC)).exists():
        raise MakeError(f"--add {name!r}: {keys / CLIENTS} has that key; --remove {name} first")
    with _private_folder(keys) as work:  # each file appears whole, and the public one first
        zmq.auth.create_certificates(work, name)
        for end in ENDS:
            (work / (name + end)).replace(keys / CLIENTS / (name + end))


def remove(keys: Path, name: str) -> None:
    """Take a client away. Raises MakeError: unknown, or the learner's."""
    _check_name("--remove", name)
    _check_serves(keys)
    folder = keys / CLIENTS
    if not (folder / (name + PUBLIC)).is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*" + PUBLIC))) or "none"
        raise MakeError(f"--remove {name!r}: {folder} holds no such key; there are {known}")
    if name == LEARNER:
        raise MakeError(f"--remove {name!r}: the learner's node itself connects with it; --force makes all keys anew")
    for end in ENDS:
        (folder / (name + end)).unlink(missing_ok=True)


def _check_name(option: str, name: str) -> None:
    if not NAME.fullmatch(name) or name == SERVER:
        raise MakeError(f"{option} {name!r}: a name consists of letters, digits, '.', '_' and '-'; not {SERVER!r}")


def _check_serves(keys: Path) -> None:
    if not (keys / (SERVER + SECRET)).is_file():
        raise MakeError(f"{keys} has no {SERVER + SECRET}; keys are changed in the folder of the learner's node")


@contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    """A folder that only this user may enter, and that is gone afterwards."""
    mask = os.umask(0o077)
    work = Path(tempfile.mkdtemp(prefix=".new-keys.", dir=parent))
    try:
        yield work
    finally:
        os.umask(mask)
        shutil.rmtree(work)


@contextmanager
def _new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder that only this user may enter, in place of `out` once it is filled and proven to be readable."""
    if out.exists() and not force:
        raise MakeError(f"{out} exists, and keys are not overwritten; name another folder, or --force to replace it")
    foreign = [path for path in sorted(out.rglob("*")) if path.suffix not in ENDS and path.name != CLIENTS]
    if foreign or (out.exists() and not out.is_dir()):
        raise MakeError(f"{foreign[0] if foreign else out} was not made by this script, so nothing is replaced")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _private_folder(out.parent) as work:
        new = work / "new"
        (new / CLIENTS).mkdir(parents=True)
        yield new
        load_keys(new)
        if out.exists():
            out.rename(work / "old")
        new.rename(out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("replay.keys"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of keys of the learner's node")
    parser.add_argument(
        "--clients", default=SHARED, help=f"names of other nodes, by commas (default: {SHARED}, one key for them all)"
    )
    parser.add_argument("--force", action="store_true", help="replace a folder of keys")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where --export-node writes")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--export-node", metavar="NAME", help="write the folder of this node from --out to --to")
    one.add_argument("--add", metavar="NAME", help="a key for one more node")
    one.add_argument("--remove", metavar="NAME", help="take this node's key away")
    args = parser.parse_args(arguments)
    if (args.export_node is None) != (args.to is None):
        parser.error("--export-node NAME and --to DIR come together")
    return args


def _carry_out(args: argparse.Namespace) -> str:
    """Do what the command line says; the lines for standard output."""

    def folder_of(name: str) -> str:
        return f"python -m replay.keys --out {args.out} --export-node {name} --to {name}-keys"

    if args.export_node:
        export(args.out, args.export_node, args.to)
        return f"{args.to}: the keys of {args.export_node}; copy this folder to where network.keys points there"
    if args.add:
        add(args.out, args.add)
        return f"{args.out}: {args.add} may connect. Its folder: {folder_of(args.add)}"
    if args.remove:
        remove(args.out, args.remove)
        return f"{args.out}: {args.remove} may not connect any more"
    clients = [name.strip() for name in args.clients.split(",") if name.strip()]
    make(args.out, clients, force=args.force)
    first = f"{args.out}: keys of the learner's node; set network.keys={args.out}"
    others = [f"  {folder_of(name)}" for name in clients]
    return "\n".join([f"{first}. Other nodes:", *others] if others else [first])


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    try:
        sys.stdout.write(_carry_out(args) + "\n")
    except (MakeError, KeysError) as error:
        sys.stderr.write(f"replay.keys: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
