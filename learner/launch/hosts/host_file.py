"""The host file: which machine is behind a node's name.

    # name  address    how to get there        GPUs it has
    node0   10.0.0.1   ssh=ubuntu@10.0.0.1     gpus=8
    node1   10.0.0.2

One node a line; `#` begins a comment. `address` is the machine's own address on the network that the nodes share: it is
what its sockets bind. `ssh` is where ssh connects to (default: the address), `gpus` lets the start scripts refuse a
placement before they connect.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from configs.plan import Machine

FORM = "name address [ssh=user@host] [gpus=8]"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")
SSH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9@.:_-]*")


class HostsError(ValueError):
    """The host file cannot be used; the message has its name, the line and what to write."""


@dataclass(frozen=True, slots=True)
class Host:
    """One line of the host file."""

    name: str
    address: str
    ssh: str
    gpus: int | None = None

    def machine(self) -> Machine:
        """What the placement needs of it."""
        return Machine(self.address, gpus=self.gpus)


def read_hosts(path: Path) -> dict[str, Host]:
    """All hosts by name. Raises HostsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"--hosts {path}: not readable ({error}); give a file with lines `{FORM}`") from error
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> dict[str, Host]:
    """All hosts of a host file's text by name. Raises HostsError."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{source}, line {number}")
        for other in hosts.values():
            if host.name == other.name:
                raise HostsError(
                    f"{source}, line {number}: {host.name!r} is there already; give each node its own name"
                )
            if host.address == other.address:
                raise HostsError(
                    f"{source}, line {number}: address {host.address!r} is that of {other.name!r}; one machine is one"
                    " node, with all its GPUs"
                )
        hosts[host.name] = host
    if not hosts:
        raise HostsError(f"{source}: no host; write lines `{FORM}`")
    return hosts


def _host(words: list[str], where: str) -> Host:
    if len(words) < 2 or "=" in words[0] or "=" in words[1]:
        raise HostsError(f"{where}: {' '.join(words)!r} is not of the form `{FORM}`")
    name, address, *options = words
    for what, word, pattern in (("name", name, NAME), ("address", address, ADDRESS)):
        if not pattern.fullmatch(word):
            raise HostsError(f"{where}: {word!r} is no {what}; write `{FORM}`")
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in ("ssh", "gpus") or not equals or not value or key in given:
            raise HostsError(f"{where}: {option!r}: after the address there are ssh=user@host and gpus=8, once each")
        given[key] = value
    ssh = given.get("ssh", address)
    if not SSH.fullmatch(ssh):  # above all no leading dash: ssh would take it for an option
        raise HostsError(f"{where}: ssh={ssh!r} is no [user@]host")
    if "gpus" in given and not given["gpus"].isdecimal():
        raise HostsError(f"{where}: gpus={given['gpus']!r} is no number")
    return Host(name, address, ssh, int(given["gpus"]) if "gpus" in given else None)
