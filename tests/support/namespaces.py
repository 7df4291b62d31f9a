"""Hosts on one machine: a network namespace each, behind a switch."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class Switch:
    """A bridge in a namespace of its own, with a port for each host; hosts know no other network."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        self.hosts = dict(hosts)
        self.prefix = f"slip{os.getpid()}"
        self.name = f"{self.prefix}-switch"

    def make(self) -> None:
        for name in (self.name, *map(self.host, self.hosts)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.name, "link", "add", "br0", "type", "bridge")
        ip("-n", self.name, "link", "set", "br0", "up")
        for node, address in self.hosts.items():
            ip("-n", self.name, "link", "add", node, "type", "veth", "peer", "name", "net0", "netns", self.host(node))
            ip("-n", self.name, "link", "set", node, "master", "br0", "up")
            ip("-n", self.host(node), "addr", "add", f"{address}/24", "dev", "net0")
            ip("-n", self.host(node), "link", "set", "net0", "up")
        ip("netns", "exec", self.name, "mount", "--bind", "/tmp", "/mnt")

    def remove(self) -> None:
        for name in (*map(self.host, self.hosts), self.name):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def host(self, node: str) -> str:
        """The namespace of a host."""
        return f"{self.prefix}-{node}"

    def names(self) -> str:
        """What stands in /etc/hosts: torch looks up names of addresses, and there is no name server."""
        return "127.0.0.1 localhost\n" + "".join(f"{address} {node}\n" for node, address in self.hosts.items())

    def cut(self, node: str) -> None:
        ip("-n", self.name, "link", "set", node, "down")

    def heal(self, node: str) -> None:
        ip("-n", self.name, "link", "set", node, "up")


@contextlib.contextmanager
def switched(hosts: Mapping[str, str]) -> Iterator[Switch]:
    """Hosts by name and address; skips the test where this machine has no namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command (iproute2)")
    made = Switch(hosts)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces, bridges, veth or bind mounts here: {error.stderr.strip()[:100]}")
    try:
        yield made
    finally:
        made.remove()
