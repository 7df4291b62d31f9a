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

from configs.errors import BadHosts
from slipstream.plan.processes import Machine

FORM = "name address [ssh=user@host] [gpus=8]"
WORDS = {
    "name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
    "address": re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*"),
    # above all no leading dash: ssh would take it for an option
    "ssh": re.compile(r"[A-Za-z0-9_][A-Za-z0-9@.:_-]*"),
    "gpus": re.compile(r"[0-9]+"),
}


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
    """All hosts by name. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadHosts(f"--hosts {path}: not readable ({error}); give a file with lines `{FORM}`") from error
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str, *, is_made: bool = False) -> dict[str, Host]:
    """All hosts of a host file's text by name. Raises ConfigError.

    In a text that a reach has made hosts may share an address: Ray may have several nodes on one machine.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words, where = line.partition("#")[0].split(), f"{source}, line {number}"
        if not words:
            continue
        host = _host(words, where)
        if host.name in hosts:
            raise BadHosts(f"{where}: {host.name!r} is there already; give each node its own name")
        same = (other.name for other in hosts.values() if other.address == host.address and not is_made)
        if other := next(same, None):
            raise BadHosts(
                f"{where}: address {host.address!r} is that of {other!r}; one machine is one node, with all its GPUs"
            )
        hosts[host.name] = host
    if not hosts:
        raise BadHosts(f"{source}: no host; write lines `{FORM}`")
    return hosts


def _host(words: list[str], where: str) -> Host:
    if len(words) < 2 or "=" in words[0] or "=" in words[1]:
        raise BadHosts(f"{where}: {' '.join(words)!r} is not of the form `{FORM}`")
    given = {"name": words[0], "address": words[1]}
    for option in words[2:]:
        key, _, value = option.partition("=")
        if key not in ("ssh", "gpus") or not value or key in given:
            raise BadHosts(f"{where}: {option!r}: after the address there are ssh=user@host and gpus=8, once each")
        given[key] = value
    for key, word in given.items():
        if not WORDS[key].fullmatch(word):
            shown = f"{key}={word!r}" if key in ("ssh", "gpus") else repr(word)
            raise BadHosts(f"{where}: {shown} is no {key}; write `{FORM}`")
    gpus = int(given["gpus"]) if "gpus" in given else None
    return Host(given["name"], given["address"], given.get("ssh", given["address"]), gpus)
