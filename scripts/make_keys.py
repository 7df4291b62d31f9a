"""CURVE keys for the ZeroMQ sockets of a run (`network.keys`).

`python -m scripts.make_keys --out keys --clients node1,node2` writes

    keys/server.key, keys/server.key_secret              replay and the weight bus, on the learner's node
    keys/clients/learner.key, learner.key_secret         whatever connects from the learner's node
    keys/clients/node1.key, node1.key_secret, ...        whatever connects from another node

The learner's node keeps this folder. Every other node gets a folder with its own key and the server's public key:
`python -m scripts.make_keys --out keys --export-node node1 --to node1-keys` writes it; copy it to where the run's
`network.keys` points on that node. server.key_secret never leaves the learner's node.

Nothing is overwritten: --force replaces a folder of keys, and every node needs its new files afterwards.
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
from replay.channel.keys import CLIENTS, LEARNER, PUBLIC, SECRET, SERVER, load_keys

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NODES = "nodes"
"""The client that all other nodes share where --clients names none."""


class MakeError(RuntimeError):
    """The keys cannot be made; the message names the path and the way out."""


def make(out: Path, clients: Sequence[str], *, force: bool) -> None:
    """Write a folder of new keys, whole or not at all.

    Raises:
        MakeError: a name cannot be a file name or comes twice, or `out` exists and may not be replaced.
    """
    for name in clients:
        if not NAME.fullmatch(name):
            raise MakeError(f"--clients {name!r}: a name consists of letters, digits, '.', '_' and '-'")
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


def check_free(out: Path, *, force: bool) -> None:
    """Raises MakeError when `out` exists, or, with force, when it holds anything but keys."""
    if not out.exists():
        return
    if not force:
        raise MakeError(f"{out} exists, and keys are not overwritten; name another folder, or --force to replace it")
    foreign = [path for path in sorted(out.rglob("*")) if path.suffix not in (PUBLIC, SECRET) and path.name != CLIENTS]
    if foreign or not out.is_dir():
        raise MakeError(f"{foreign[0] if foreign else out} was not made by this script, so nothing is replaced")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that only this user may enter, in place of `out` once it is filled and proven to be readable."""
    out.parent.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        new = work / "new"
        new.mkdir()
        yield new
        load_keys(new)
        if out.exists():
            out.rename(work / "old")
        new.rename(out)
    finally:
        os.umask(mask)
        shutil.rmtree(work)


def say(text: str) -> None:
    """One line on standard output."""
    sys.stdout.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.make_keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of keys of the learner's node")
    parser.add_argument(
        "--clients", default=NODES, help=f"names of other nodes, by commas (default: {NODES}, one key for them all)"
    )
    parser.add_argument("--force", action="store_true", help="replace a folder of keys")
    parser.add_argument("--export-node", metavar="NAME", help="write the folder of this node from --out to --to")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where --export-node writes")
    args = parser.parse_args(arguments)
    if (args.export_node is None) != (args.to is None):
        parser.error("--export-node NAME and --to DIR come together")
    try:
        if args.export_node is not None:
            export(args.out, args.export_node, args.to)
            say(f"{args.to}: the keys of {args.export_node}; copy this folder to where network.keys points there")
            return 0
        clients = [name.strip() for name in args.clients.split(",") if name.strip()]
        make(args.out, clients, force=args.force)
    except (MakeError, KeysError) as error:
        sys.stderr.write(f"make_keys: {error}\n")
        return 2
    say(f"{args.out}: keys of the learner's node; set network.keys={args.out}" + (". Other nodes:" if clients else ""))
    for name in clients:
        say(f"  python -m scripts.make_keys --out {args.out} --export-node {name} --to {name}-keys")
    return 0


if __name__ == "__main__":
    sys.exit(main())
