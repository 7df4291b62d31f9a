"""A bound on the memory of all processes of a program together: a control group, where this process may make one.

That takes cgroup v2, and this process's group, or the one above, handed over to it with the memory controller enabled
for groups within (systemd: Delegate=yes). Elsewhere limits hold for each process alone.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@contextlib.contextmanager
def bounded(name: str, memory_bytes: int, processes: int) -> Iterator[str]:
    """A group of this name until the end of the block: the file that takes its processes; empty where there is none.

    Raises OSError: the group cannot be made, although its place says that it can.
    """
    if (place := place_of_groups()) is None:
        yield ""
        return
    group = place / name
    group.mkdir()
    try:
        (group / "memory.max").write_text(str(memory_bytes))
        if (group / "pids.max").exists():
            (group / "pids.max").write_text(str(processes))
        yield str(group / "cgroup.procs")
    finally:
        group.rmdir()


def place_of_groups() -> Path | None:
    """Folder in which groups with a bound on memory may be made; None where there is no such."""
    own = next((line[3:].lstrip("/") for line in OWN.read_text().splitlines() if line.startswith("0::")), None)
    for folder in [] if own is None else [ROOT / own, (ROOT / own).parent]:
        enabled = folder / "cgroup.subtree_control"
        if os.access(folder, os.W_OK) and enabled.exists() and "memory" in enabled.read_text().split():
            return folder
    return None
