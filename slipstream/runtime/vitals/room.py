"""Memory that is left to this process: the machine's, or less where a cgroup such as a container's has a limit."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
GIB = 2**30


@dataclass(frozen=True, slots=True, order=True)
class Room:
    """Bytes that are left, and in what."""

    left: int
    where: str
    """As the subject of a sentence."""


def memory_left() -> Room:
    """The least that anything leaves to this process."""
    return min([Room(psutil.virtual_memory().available, "the machine"), *_in_cgroups()])


def _in_cgroups() -> Iterator[Room]:
    """What this process's cgroups with a limit leave, those above its own included; none outside Linux."""
    if not OWN.exists():
        return
    for line in OWN.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")  # not there in a container that sees its own cgroup as the root
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield from _in_cgroup(folder, *names)


def _in_cgroup(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[Room]:
    """What a cgroup leaves; nothing where it has no limit, as the topmost one, or says none to this process."""
    with suppress(OSError):
        most = (folder / limit).read_text().strip()
        if most == "max":
            return
        used = int((folder / usage).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:  # the kernel drops these pages of files before it kills; `available` has them, too
                used -= int(value)
        yield Room(max(0, int(most) - used), f"the cgroup {folder} (limit {int(most) / GIB:.1f} GiB)")
