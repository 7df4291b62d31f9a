"""Processes by role, found by their parents and command lines; what can be done to one from outside, by its pid."""

import ctypes
import errno
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from stat import S_ISSOCK

import psutil

from slipstream.runtime.processes import of

ROLES = {"replay": r" replay\.main ", "learner": r" learner\.train ", "teacher": r" rollout_server\.teacher "}
"""What the command line of a role matches."""
LIBC = ctypes.CDLL(None, use_errno=True)
SYS_PIDFD_GETFD = 438
CUT_EVERY_S = 0.02
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.2, 0.1  # two thirds of the time stopped, never for as long as a heartbeat
GONE = (FileNotFoundError, ProcessLookupError)  # what the kernel says of a process that has ended


def below(root: int) -> dict[int, str]:
    """Command line by pid of all living descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        return commands(psutil.Process(root).children(recursive=True))
    return {}


def commands(processes: Iterable[psutil.Process]) -> dict[int, str]:
    """Command line by pid, a space behind each word, of those that live, the eldest first: pids begin anew."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found.append((process.create_time(), process.pid, "".join(f"{word} " for word in process.cmdline())))
    return {pid: command for _, pid, command in sorted(found)}


def of_role(root: int, role: str) -> list[int]:
    """Pids of replay, or of the learner ranks in the order of their start, below the launcher."""
    return [pid for pid, command in below(root).items() if re.search(ROLES[role], command)]


def send(pid: int, sig: signal.Signals) -> bool:
    """Send a signal to a process that was found before; False when it has ended since."""
    with suppress(ProcessLookupError):
        os.kill(pid, sig)
        return True
    return False


def state(pid: int) -> str:
    """One letter, as ps prints it; empty when there is no such process."""
    found = of(pid)
    return found.state if found is not None else ""


@contextmanager
def killed(pid: int) -> Iterator[None]:
    """Like all faults below, it lasts as long as its context."""
    send(pid, signal.SIGKILL)
    yield


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, then SIGCONT: every thread stands still, connections stay open."""
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def slowed(pid: int) -> AbstractContextManager[None]:
    """SIGSTOP and SIGCONT in turns, as on a machine that is too busy: the process is never silent for long."""

    def turn() -> None:
        with stopped(pid):
            time.sleep(SLOW_STOPPED_S)

    return _repeated(turn, SLOW_RUNNING_S)


def cut_off(pid: int) -> AbstractContextManager[None]:
    """Every TCP connection of the process ends, at both ends, and so does each that it makes meanwhile."""
    close_connections(pid)
    return _repeated(partial(close_connections, pid), CUT_EVERY_S)


@contextmanager
def _repeated(turn: Callable[[], object], pause_s: float) -> Iterator[None]:
    """A thread that does something again and again while the process is there."""
    over = threading.Event()

    def run() -> None:
        with suppress(*GONE):
            turn()
            while not over.wait(pause_s):
                turn()

    thread = threading.Thread(target=run, name="fault", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@cache
def may_cut() -> bool:
    """Whether the kernel lets this process reach the sockets of its children."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as child:
        try:
            close_connections(child.pid)
        except PermissionError:
            return False
        finally:
            child.kill()
    return True


def close_connections(pid: int) -> int:
    """Shut down both directions of every TCP connection of a process; how many there were.

    Raises ProcessLookupError where it has ended, PermissionError where the kernel keeps its sockets from this process.
    """
    closed, process = 0, os.pidfd_open(pid)
    try:
        for entry in Path("/proc", str(pid), "fd").iterdir():
            copy = LIBC.syscall(SYS_PIDFD_GETFD, process, int(entry.name), 0)
            if copy < 0 and ctypes.get_errno() == errno.EPERM:
                raise PermissionError(errno.EPERM, f"may not reach into process {pid} (pidfd_getfd)")
            if copy >= 0 and S_ISSOCK(os.fstat(copy).st_mode):
                closed += _close(copy)
            elif copy >= 0:  # a number below 0: closed meanwhile
                os.close(copy)
    finally:
        os.close(process)
    return closed


def _close(copy: int) -> bool:
    with socket.socket(fileno=copy) as connection, suppress(OSError):  # it listens, or has no peer any more
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def free_port() -> int:
    """Below the ports that the kernel gives out by itself: nothing else takes it before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port
