"""What a process has cost so far, from /proc: CPU seconds by thread, resident memory, bytes written."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ZMQ_IO = "ZMQbg/IO"
NAME_END = ")"
UTIME, STIME = 11, 12
"""Fields of /proc/PID/stat behind the name, counted from 0 (proc(5) counts from 1 and has two before)."""
RESIDENT = 1
"""Field of /proc/PID/statm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds since the start of the process."""

    user: float
    system: float
    main: float
    """The main thread: Python, the service, the batches."""
    zmq_io: float
    """ZeroMQ's thread: sockets, framing, CURVE."""

    @property
    def total(self) -> float:
        """All threads, those that have ended included."""
        return self.user + self.system

    def since(self, before: "Cost") -> "Cost":
        """What was spent between two readings."""
        return Cost(
            user=self.user - before.user,
            system=self.system - before.system,
            main=self.main - before.main,
            zmq_io=self.zmq_io - before.zmq_io,
        )


def cost_of(pid: int) -> Cost:
    """CPU seconds of a process. Raises FileNotFoundError when it is gone."""
    folder = Path("/proc") / str(pid)
    user, system = _times(folder / "stat")[1:]
    main = zmq_io = 0.0
    for thread in (folder / "task").iterdir():
        name, thread_user, thread_system = _times(thread / "stat")
        if thread.name == str(pid):
            main = thread_user + thread_system
        elif name.startswith(ZMQ_IO):
            zmq_io += thread_user + thread_system
    return Cost(user=user, system=system, main=main, zmq_io=zmq_io)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int((Path("/proc") / str(pid) / "statm").read_text(encoding="ascii").split()[RESIDENT]) * PAGE_BYTES


def written_bytes(pid: int) -> int:
    """Bytes that a process gave to write() and its like; what goes to sockets by send() is not in it."""
    lines = (Path("/proc") / str(pid) / "io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _times(path: Path) -> tuple[str, float, float]:
    """(name, user seconds, system seconds) of a stat file; the name may hold spaces and brackets."""
    head, _, tail = path.read_text(encoding="utf-8").rpartition(NAME_END)
    fields = tail.split()
    return head.partition("(")[2], int(fields[UTIME]) / TICKS_PER_S, int(fields[STIME]) / TICKS_PER_S
