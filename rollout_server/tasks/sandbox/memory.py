"""A bound on the memory of all processes of a program together: a control group, where this process may make one.

That takes cgroup v2, and this process's group, or the one above, handed over to it with the memory controller enabled
for groups within (systemd: Delegate=yes). Elsewhere the memory is added up from /proc, ten times a second.
"""

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PAGE = resource.getpagesize()


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


def held_below(pid: int, enough: int) -> int:
    """Bytes that a process and its descendants hold; shared pages count once where the sum would exceed `enough`."""
    found, waiting = [], [pid]
    while waiting:
        found.append(Path("/proc", str(waiting.pop())))
        with contextlib.suppress(OSError):  # it has ended
            for task in (found[-1] / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    resident = sum(_number_in(process / "statm", r"\d+ (\d+)") for process in found) * PAGE
    if resident <= enough:
        return resident
    return sum(_number_in(process / "smaps_rollup", r"Pss: +(\d+)") for process in found) * 1024


def _number_in(file: Path, pattern: str) -> int:
    """The number in a file of /proc; 0 where its process has ended."""
    with contextlib.suppress(OSError):
        match = re.search(pattern, file.read_text())
        return int(match[1]) if match else 0
    return 0
