"""What a process and its descendants use, by role, as the kernel counts it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


@dataclass(slots=True)
class Use:
    """Of all processes of one role below one process."""

    processes: int = 0
    memory_bytes: int = 0
    """Resident set sizes added up; pages that several share count in each."""
    descriptors: int = 0
    threads: int = 0
    cpu_s: float = 0.0
    """User and system time of those that are there."""
    largest: int = 0
    """Pid of the process with the most memory."""
    cpu_by_pid: dict[int, float] = field(default_factory=dict)
    """CPU seconds of those whose own command line gives them the role, so without what they have started."""
    _most: int = 0

    def add(self, process: psutil.Process, *, is_named: bool = False) -> None:
        """Count a process; one that has ended meanwhile is left out, one that may not be looked into in part."""
        try:
            with process.oneshot():
                memory, threads, times = process.memory_info().rss, process.num_threads(), process.cpu_times()
            descriptors = open_descriptors(process)
        except GONE:
            return
        self.processes += 1
        self.memory_bytes += memory
        self.descriptors += descriptors
        self.threads += threads
        self.cpu_s += times.user + times.system
        if is_named:
            self.cpu_by_pid[process.pid] = times.user + times.system
        if memory > self._most:
            self._most, self.largest = memory, process.pid


def open_descriptors(process: psutil.Process) -> int:
    """Of a process; 0 where the kernel shows them to its owner alone, such as in a sandbox."""
    try:
        return int(process.num_fds())
    except psutil.AccessDenied:
        return 0


def by_role(root: psutil.Process, role: str, modules: Mapping[str, str], others: str | None) -> dict[str, Use]:
    """Use of a process and its descendants by role.

    Args:
        role: of the process itself.
        modules: role by a text in the command line; descendants of such a process have its role.
        others: role of the remaining descendants; None leaves all descendants out.
    """
    found: dict[str, Use] = {role: Use()}
    found[role].add(root)
    for process, its_role, is_named in descendants(root, modules, others) if others is not None else ():
        found.setdefault(its_role, Use()).add(process, is_named=is_named)
    return found


def descendants(
    root: psutil.Process, modules: Mapping[str, str], others: str
) -> Iterator[tuple[psutil.Process, str, bool]]:
    """Each with its role, and whether that is by its own command line, parents first."""
    roles: dict[int, str] = {}
    below = {process.pid: process for process in root.children(recursive=True)}
    for process in below.values():
        try:
            parent, command = process.ppid(), " ".join(process.cmdline())
        except (*GONE, psutil.AccessDenied):
            continue
        named = next((its for text, its in modules.items() if text in command), None)
        roles[process.pid] = named or roles.get(parent, others)
        yield process, roles[process.pid], named is not None
