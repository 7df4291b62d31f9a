"""Runs one program: the order in, what it printed and how it ended out. Blocks; nothing that it started is left."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.inside import NAMESPACES, READY
from rollout_server.tasks.sandbox.memory import bounded, held_below

PACKAGE_ROOT = str(Path(__file__).parents[3])
INSIDE = "rollout_server.tasks.sandbox.inside"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
START_S = 10.0
"""For the namespaces and the interpreter, which a busy machine may take long for; the program's time comes on top."""
KILL_S = 5.0
POLL_MS = 20
MEMORY_S = 0.1
"""Between two looks at the memory of all processes, where no control group bounds it."""
CHUNK = 65536
How = Literal["ended", "timed_out", "flooded", "ran_out_of_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """What a program may take."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 1024**2
    """Address space of each of its processes."""
    total_bytes: int = 2 * 1024**3
    """Of all its processes together; of its files as well where control groups are to be had (memory.py)."""
    file_bytes: int = 64 * 1024**2
    """Of a file, and isolated of all files together."""
    open_files: int = 64
    processes: int = 16
    """With their threads; counted where the program is isolated."""
    output_bytes: int = 1024 * 1024
    """Of stdout, and of stderr, which are files; a program that prints more is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program went."""

    how: How
    code: int | None
    """Exit code, or the negative number of a signal; None where it was ended from here."""
    out: bytes
    err: bytes
    seconds: float
    """From its start on, the setup not included where that can be told."""


def run(
    files: Mapping[str, str], arguments: Sequence[str], stdin: bytes, limits: ResourceLimits, *, isolated: bool = True
) -> Ended:
    """Run `python arguments...` in a fresh folder with these files, and nothing else of the caller's.

    Not isolated it has a process group, an environment, limits and a folder of its own, and nothing more.
    Raises SandboxError: it could not be started so.
    """
    folder = tempfile.mkdtemp(prefix="slipstream-box-")
    try:
        with bounded(os.path.basename(folder), limits.total_bytes, limits.processes + 2) as group:
            order = {
                "namespaces": list(NAMESPACES) if isolated else [],
                "folder": folder,
                "visible": visible_paths() if isolated else [],
                "files": dict(files),
                "argv": [sys.executable, "-I", *arguments],
                "environment": ENVIRONMENT | {"HOME": "/box" if isolated else folder},
                "limits": asdict(limits),
                "group": group,
            }
            return _run(json.dumps(order).encode(), stdin, limits, is_bounded=bool(group))
    except OSError as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def visible_paths() -> list[str]:
    """What a program may read of this machine: the interpreter with its packages, and the system's libraries."""
    found: list[str] = []
    for path in (*SYSTEM, sys.base_prefix, sys.prefix):
        path = os.path.abspath(path)
        inside = any(path == other or path.startswith(f"{other}/") for other in found)
        if path != "/" and not inside and os.path.lexists(path):
            found.append(path)
    return found


def _run(order: bytes, stdin: bytes, limits: ResourceLimits, *, is_bounded: bool) -> Ended:
    status, theirs = os.pipe()
    with os.fdopen(status, "rb", 0), contextlib.ExitStack() as open_files:
        told, into, out, err = (open_files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        for file, given in ((told, order), (into, stdin)):
            file.write(given)
            file.seek(0)
        fds = [told.fileno(), theirs]
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-m", INSIDE, str(os.getpid()), *map(str, fds)],
                stdin=into,
                stdout=out,
                stderr=err,
                env=ENVIRONMENT | {"PYTHONPATH": PACKAGE_ROOT},
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        try:
            printed = (out.fileno(), err.fileno())
            how, seconds, ready = _watched(process, status, printed, limits, is_bounded=is_bounded)
        finally:
            _end(process)
        said = [os.pread(fd, limits.output_bytes, 0) for fd in printed]
        if not ready.startswith(READY):
            reason = bytes(ready or said[1][-500:]).decode("utf-8", "replace").strip()
            raise SandboxError(reason or f"the program was not there after {START_S + limits.seconds:g} s")
    code = process.returncode if how == "ended" else None
    return Ended(how=how, code=code, out=said[0], err=said[1], seconds=seconds)


def _watched(
    process: "subprocess.Popen[bytes]",
    status: int,
    printed: Sequence[int],
    limits: ResourceLimits,
    *,
    is_bounded: bool,
) -> tuple[How, float, bytes]:
    """(how, seconds, what it said of its start) of a program that has ended, or is past a limit."""
    start, waiting, said = time.monotonic(), select.poll(), b""
    deadline, ending = start + START_S + limits.seconds, os.pidfd_open(process.pid)
    next_look = float("inf") if is_bounded else start
    for fd in (ending, status):
        waiting.register(fd, select.POLLIN)
    try:
        while True:
            ready = dict(waiting.poll(POLL_MS))
            if status in ready:
                more = os.read(status, CHUNK)
                said += more
                if not more or said.startswith(READY):  # nothing else comes
                    waiting.unregister(status)
                    start = time.monotonic()
                    deadline = start + limits.seconds
            now = time.monotonic()
            if any(os.fstat(fd).st_size > limits.output_bytes for fd in printed):
                return "flooded", now - start, said
            if ending in ready:
                return "ended", now - start, said
            if now > deadline:
                return "timed_out", now - start, said
            if now >= next_look:
                if held_below(process.pid, limits.total_bytes) > limits.total_bytes:
                    return "ran_out_of_memory", now - start, said
                next_look = now + MEMORY_S
    finally:
        os.close(ending)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the supervisor end all that is left; end it if it does not."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S if number else 0.0)
            return
    raise SandboxError(f"process {process.pid} does not end {KILL_S:g} s after SIGKILL")
