"""What the kernel knows of the processes of this machine, from one reading of /proc (Linux; nothing elsewhere)."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (disk or device)",
    "T": "stopped (SIGSTOP)",
    "t": "traced",
    "Z": "dead, not reaped",
    "X": "dead",
    "I": "idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. Example: Process(pid=71, parent=70, name="python", state="T", cpu_s=3.2, started=81723)."""

    pid: int
    parent: int
    name: str
    """Of its program, at most 15 characters."""
    state: str
    cpu_s: float
    started: int
    """Clock ticks from boot on; with the pid it names one process for good."""

    @property
    def does(self) -> str:
        """Its state in words."""
        return STATES.get(self.state, self.state)

    @property
    def is_stopped(self) -> bool:
        """Whether it answers no signal but SIGKILL and SIGCONT."""
        return self.state in "Tt"

    @property
    def waits_in(self) -> str:
        """The function of the kernel that it sleeps in, where the kernel shows it."""
        found = _read(PROC / str(self.pid) / "wchan")
        return found if found not in ("", "0") else ""

    @property
    def command(self) -> str:
        """Its command line, shortened."""
        return " ".join(_read(PROC / str(self.pid) / "cmdline").replace("\0", " ").split())[:160]


def all_processes() -> dict[int, Process]:
    """By pid."""
    found = (of(int(path.name)) for path in PROC.glob("[0-9]*"))
    return {process.pid: process for process in found if process is not None}


def of(pid: int) -> Process | None:
    """One process, or None where there is none."""
    name, _, rest = _read(PROC / str(pid) / "stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Process(
        pid=pid,
        parent=int(fields[1]),
        name=name.partition("(")[2],
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
        started=int(fields[19]),
    )


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> list[Process]:
    """Children of these processes, their children and so on, without the roots themselves."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process)
    known = set(roots)
    found: list[Process] = []
    level = list(known)
    while level:
        new = [child for pid in level for child in children[pid] if child.pid not in known]
        known |= {child.pid for child in new}
        found += new
        level = [child.pid for child in new]
    return found


def _read(path: Path) -> str:
    """A small file of /proc; empty where the process has ended or belongs to another user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
