"""Stands between pool and worker, so that nothing that reward code starts outlives it.

It waits for the end of the worker, for SIGTERM from the pool, or for SIGTERM from the kernel when the pool's process
is gone; then it ends every descendant, and itself by the worker's signal or exit code.

A process that leaves its group and session and lets its parents end would be handed to init. As a child subreaper
this process gets it instead, and can find it. No code of the user runs here.
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from slipstream.runtime.processes import all_processes, descendants

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
KILL_S = 4.0
"""The pool waits for longer than this (process.KILL_TIMEOUT_S) before it kills the supervisor itself."""
ROUND_S = 0.001
STACK = signal.SIGUSR1
"""Asks a worker for the stack of its main thread."""
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def supervise(pool: int) -> None:
    """Fork. Only the child returns: in a session of its own, as the worker.

    `pool` is the pid of the process whose thread started this one. Raises OSError: the kernel refused.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _die_with(pool, signal.SIGTERM)
    _control(PR_SET_CHILD_SUBREAPER, 1)
    # No memory images of a crash on disk, and no way to more rights: whatever is started stays ours to kill.
    limit(resource.RLIMIT_CORE, 0)
    _control(PR_SET_NO_NEW_PRIVS, 1)
    supervisor, worker = os.getpid(), os.fork()
    if worker:
        _watch(worker)
    os.setsid()
    _die_with(supervisor, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    faulthandler.register(STACK)  # to stderr, which the pool reads


def let_go_of_stdin() -> None:
    """Put nothing in the place of fd 0, which held the channel."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def limit(kind: int, wanted: int) -> int:
    """Set a limit of this process for good: raising it again needs privileges. What it is, where less is allowed."""
    hardest = resource.getrlimit(kind)[1]
    possible = wanted if hardest == resource.RLIM_INFINITY else min(wanted, hardest)
    resource.setrlimit(kind, (possible, possible))
    return possible


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _die_with(parent: int, how: signal.Signals) -> None:
    """Get a signal when the thread that started this process ends; leave once it has."""
    _control(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)


def _watch(worker: int) -> NoReturn:
    """Wait for the worker's end or SIGTERM; end all that is left, then alike."""
    let_go_of_stdin()  # only the worker may hold the channel: its end is how the pool learns of a death
    while signal.sigwaitinfo(WATCHED).si_signo == signal.SIGCHLD and not _has_ended(worker):
        pass
    # Not reaped yet, so neither the pid nor the group can belong to anybody else.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    status = _end_descendants(worker)
    end_as(status)


def end_as(status: int) -> NoReturn:
    """End by the signal or exit code of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _has_ended(worker: int) -> bool:
    """Reap what was handed over to this process, but not the worker."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == worker:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _end_descendants(worker: int) -> int:
    """Kill until no child is left, and return the worker's wait status."""
    status, deadline = signal.SIGKILL.value, time.monotonic() + KILL_S
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    status = ended[1]
        except ChildProcessError:
            return status
        # each round may bring the orphans of the one before
        left = [child.pid for child in descendants([os.getpid()], all_processes())]
        if time.monotonic() > deadline:
            named = ", ".join(map(str, left[:8]))
            sys.stderr.write(f"{len(left)} processes do not end {KILL_S:g} s after SIGKILL: {named}\n")
            return status
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)
