"""Two network namespaces joined by a cable of a stated speed. Needs root, iproute2 and a kernel with veth and tbf."""

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "net0"
BURST = "512kb"
"""Above 256 KiB: what TCP hands down in one piece (TSO, GSO) must fit into it, or nothing passes."""
QUEUE = "8mb"


class NoLink(RuntimeError):
    """This machine cannot make the link. The text says what is missing."""


class Cable:
    """A context manager; `enter` makes a command one that runs at an end (0 or 1)."""

    def __init__(self, mb_s: float, folder: Path) -> None:
        """`mb_s`: 10^6 bytes a second in each direction; `folder`: for a file of host names."""
        self._mb_s = mb_s
        self._ends = [f"slip{os.getpid()}-{end}" for end in "ab"]
        self._made: list[str] = []
        self._names = folder / "names"

    def __enter__(self) -> "Cable":
        """Raises NoLink."""
        for command in ("ip", "tc"):
            if shutil.which(command) is None:
                raise NoLink(f"no `{command}` command; install iproute2")
        # torch asks for the names of addresses, and there is no name server in here
        lines = ["127.0.0.1 localhost", *(f"{address} end{n}" for n, address in enumerate(ADDRESSES))]
        self._names.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            self._join()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def enter(self, end: int, command: list[str]) -> list[str]:
        """The command, to be run in the namespace of an end; its process is the one that is started."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self._ends[end], "bash", "-c", script, str(self._names), *command]

    def _join(self) -> None:
        for name in self._ends:
            _do("ip", "netns", "add", name)
            self._made.append(name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        first, second = self._ends
        _do("ip", "-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self._ends, ADDRESSES, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _do("ip", "-n", name, "link", "set", DEVICE, "up")
            rate = f"{round(8e6 * self._mb_s)}bit"
            shape = ["tbf", "rate", rate, "burst", BURST, "limit", QUEUE]
            _do("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *shape)
        _do(*self.enter(0, ["true"]))

    def _remove(self) -> None:
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._made.clear()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"`{' '.join(command)}` failed: {done.stderr.strip()[:300]}; it needs root and iproute2")
