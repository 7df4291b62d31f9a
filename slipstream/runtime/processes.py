"""What the kernel knows of the processes of this machine, from one reading of /proc (Linux; nothing elsewhere)."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STATES = {
    "S": "sleeping",
    "D": "in the kernel (disk or device)",
    "T": "stopped (SIGSTOP)",
    "t": "traced",
    "Z": "dead, not reaped",
}
STUCK = "DTtZX"
"""States in which a process goes on with nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process. Example: ProcessStatus(pid=71, parent=70, name="python", state="T", cpu_s=3.2, started=81723)."""

    pid: int
    parent: int
    name: str
    """Of its program, at most 15 characters."""
    state: str
    cpu_s: float
    started: int
    """Clock ticks from boot on; with the pid it names one process for good."""

    def __str__(self) -> str:
        return f"pid {self.pid}: {self.does}, {self.cpu_s:.1f} s of CPU"

    @property
    def does(self) -> str:
        """Its state in words."""
        return STATES.get(self.state, "running")

    @property
    def command(self) -> str:
        """Its command line, shortened."""
        return " ".join(_read(PROC / str(self.pid) / "cmdline").replace("\0", " ").split())[:160]


def all_processes() -> dict[int, ProcessStatus]:
    """By pid."""
    found = (of(int(path.name)) for path in PROC.glob("[0-9]*"))
    return {process.pid: process for process in found if process is not None}


def of(pid: int) -> ProcessStatus | None:
    """One process, or None where there is none."""
    name, _, rest = _read(PROC / str(pid) / "stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return ProcessStatus(
        pid=pid,
        parent=int(fields[1]),
        name=name.partition("(")[2],
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        started=int(fields[19]),
    )


def descendants(roots: Iterable[int], processes: Mapping[int, ProcessStatus]) -> list[ProcessStatus]:
    """Children of these processes, their children and so on, without the roots themselves."""
    children: defaultdict[int, list[ProcessStatus]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process)
    found, level = dict.fromkeys(roots), [*roots]
    for pid in level:  # grows meanwhile
        new = [child.pid for child in children[pid] if child.pid not in found]
        found.update(dict.fromkeys(new))
        level += new
    return [processes[pid] for pid in level if pid not in set(roots)]


def _read(path: Path) -> str:
    """A small file of /proc; empty where the process has ended or belongs to another user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
