"""Runs one program: the order in, what it printed and how it ended out. Blocks; nothing that it started is left."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.inside import LENGTH, NAMESPACES, READY
from rollout_server.tasks.sandbox.memory import bounded

PACKAGE_ROOT = str(Path(__file__).parents[3])
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
CHUNK = 65536
How = Literal["ended", "timed_out", "flooded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may take."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 1024**2
    """Address space of each of its processes."""
    total_bytes: int = 2 * 1024**3
    """Of all its processes and files together, where control groups are to be had (memory.py)."""
    file_bytes: int = 64 * 1024**2
    """Of a file, and isolated of all files together."""
    open_files: int = 64
    processes: int = 16
    """With their threads; counted where the program is isolated."""
    output_bytes: int = 1024 * 1024
    """Of stdout, and of stderr; a program that prints more is ended."""


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


@dataclass(slots=True)
class _Reading:
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)


def run(
    files: Mapping[str, str], arguments: Sequence[str], stdin: bytes, limits: Limits, *, isolated: bool = True
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
            body = json.dumps(order).encode()
            return _run(LENGTH.pack(len(body)) + body + stdin, limits)
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


def _run(given: bytes, limits: Limits) -> Ended:
    status, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", "rollout_server.tasks.sandbox.inside", str(os.getpid()), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"PYTHONPATH": PACKAGE_ROOT},
            pass_fds=[theirs],
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    reading = _Reading()
    try:
        how, seconds = _converse(process, status, given, limits, reading)
    finally:
        _end(process)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(status, CHUNK):
                reading.status += more
        os.close(status)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
    if not reading.status.startswith(READY):
        said = bytes(reading.status or reading.err[-500:]).decode("utf-8", "replace").strip()
        raise SandboxError(said or f"the program was not there after {START_S + limits.seconds:g} s")
    code = process.returncode if how == "ended" else None
    return Ended(how=how, code=code, out=bytes(reading.out), err=bytes(reading.err), seconds=seconds)


def _converse(
    process: "subprocess.Popen[bytes]", status: int, given: bytes, limits: Limits, reading: _Reading
) -> tuple[How, float]:
    """Feed and read until the program has ended, or is past a limit."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    into, view = process.stdin.fileno(), memoryview(given)
    sinks = {process.stdout.fileno(): reading.out, process.stderr.fileno(): reading.err, status: reading.status}
    start, deadline = time.monotonic(), time.monotonic() + START_S + limits.seconds
    with selectors.DefaultSelector() as waiting:
        os.set_blocking(into, False)
        waiting.register(into, selectors.EVENT_WRITE)
        for fd in sinks:
            os.set_blocking(fd, False)
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map().keys() - {into}:
            now = time.monotonic()
            if now > deadline:
                return "timed_out", now - start
            for key, _ in waiting.select(deadline - now):
                if key.fd == into:
                    view = _fed(into, view)
                    if not view:
                        waiting.unregister(into)
                        process.stdin.close()
                    continue
                more = os.read(key.fd, CHUNK)
                if not more:
                    waiting.unregister(key.fd)
                sinks[key.fd] += more
                if key.fd == status and more and reading.status.startswith(READY):
                    start, deadline = time.monotonic(), time.monotonic() + limits.seconds
                elif len(sinks[key.fd]) > limits.output_bytes:
                    return "flooded", time.monotonic() - start
        return "ended", time.monotonic() - start


def _fed(fd: int, view: memoryview) -> memoryview:
    """What is left to write; nothing where the program reads no more."""
    try:
        return view[os.write(fd, view[:CHUNK]) :]
    except BlockingIOError:
        return view
    except BrokenPipeError:
        return view[:0]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the supervisor end all that is left; end it if it does not."""
    try:
        process.wait(0 if process.poll() is not None else 0.2)
        return
    except subprocess.TimeoutExpired:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(KILL_S)
            return
        except subprocess.TimeoutExpired:
            continue
    raise SandboxError(f"process {process.pid} does not end {KILL_S:g} s after SIGKILL")
