"""What happens to a process: killed, stopped, cut off, slowed, stuck. All from outside, by its pid, over when ended."""

import ctypes
import errno
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from signal import SIGCONT, SIGKILL, SIGSTOP

LIBC = ctypes.CDLL(None, use_errno=True)
SYS_PIDFD_GETFD = 438
LOOK_S = 0.02
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.2, 0.1
"""Two thirds of the time it stands still, never for as long as a beat."""


class Fault:
    """Something that begins and ends. `changes_nothing` says that no peer may take it for a failure."""

    name = ""
    what = ""
    changes_nothing = False
    survives = True
    """Whether the process is there afterwards."""
    holds = False
    """Whether the process stays at the moment at which the fault meets it."""

    def begin(self, pid: int) -> None:
        """Do it to a process."""

    def end(self) -> None:
        """Undo it."""


class Kill(Fault):
    """`kill -9`."""

    name, what, survives = "kill", "SIGKILL", False

    def begin(self, pid: int) -> None:
        """See `Fault.begin`."""
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)


class Stop(Fault):
    """Every thread stands still; connections stay open."""

    name, what = "stop", "SIGSTOP for longer than every bound of the bus, then SIGCONT"

    def begin(self, pid: int) -> None:
        """See `Fault.begin`."""
        self._pid = pid
        os.kill(pid, SIGSTOP)

    def end(self) -> None:
        """See `Fault.end`."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, SIGCONT)


class Repeated(Fault):
    """Something that a thread does again and again until the end."""

    def begin(self, pid: int) -> None:
        """See `Fault.begin`."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pid,), name=self.name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """See `Fault.end`."""
        self._over.set()
        self._thread.join()

    def once(self, pid: int, over: threading.Event) -> None:
        """One turn; takes time."""

    def _run(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            while not self._over.is_set():
                self.once(pid, self._over)


class Cut(Repeated):
    """Every TCP connection of the process ends, at both ends, and so does each that it makes until the end."""

    name, what = "cut", "its TCP connections are closed, new ones at once, for longer than the bus's silence"

    def begin(self, pid: int) -> None:
        """See `Fault.begin`."""
        close_connections(pid)
        super().begin(pid)

    def once(self, pid: int, over: threading.Event) -> None:
        """See `Repeated.once`."""
        over.wait(LOOK_S)
        close_connections(pid)


class Slow(Repeated):
    """A machine that is too busy: the process runs a third of the time, and is never silent for long."""

    name, what, changes_nothing = "slow", "SIGSTOP and SIGCONT in turns, two thirds of the time stopped", True

    def once(self, pid: int, over: threading.Event) -> None:
        """See `Repeated.once`."""
        os.kill(pid, SIGSTOP)
        try:
            over.wait(SLOW_STOPPED_S)
        finally:
            os.kill(pid, SIGCONT)
        over.wait(SLOW_RUNNING_S)


class Stuck(Fault):
    """Its receiving thread does not go on; all others do, its heartbeats too."""

    name, holds = "stuck", True
    what = "its receiving thread waits for longer than weight_bus.deadline_s, heartbeats go on"


FAULTS: dict[str, Callable[[], Fault]] = {fault.name: fault for fault in (Kill, Stop, Cut, Slow, Stuck)}


def may_cut() -> bool:
    """Whether the kernel lets this process reach the sockets of its children."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as child:
        process = os.pidfd_open(child.pid)
        try:
            copy = LIBC.syscall(SYS_PIDFD_GETFD, process, 0, 0)
            if copy >= 0:
                os.close(copy)
            return bool(copy >= 0)
        finally:
            os.close(process)
            child.kill()


def close_connections(pid: int) -> int:
    """Shut down both directions of every TCP connection that a process has; how many there were.

    Raises:
        ProcessLookupError: it has ended.
        PermissionError: the kernel does not let this process reach that one's sockets.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_close(process, int(number)) for number in _sockets(pid))
    finally:
        os.close(process)


def _sockets(pid: int) -> Iterator[str]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                yield number


def _close(process: int, number: int) -> bool:
    copy = LIBC.syscall(SYS_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        error = ctypes.get_errno()
        if error == errno.EPERM:
            raise PermissionError(error, "may not reach into another process (pidfd_getfd)")
        return False  # closed meanwhile
    with socket.socket(fileno=copy) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens, or has no peer any more
            return False
    return True
