"""The side that asks worker processes: started under a supervisor, read from, and killed with their descendants.

They get a socket as stdin and none of the secrets in the environment; what they print is logged up to a limit. Code of
the user shares their process and may have written their frames: whoever reads these checks them.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_server.tasks.workers.frames import pack, receive
from rollout_server.tasks.workers.supervisor import STACK
from slipstream.runtime.hang.processes import all_processes

log = logging.getLogger(__name__)
KILL_TIMEOUT_S = 5.0
"""For the supervisor to end the child and all its descendants."""
PACKAGE_ROOT = str(Path(__file__).parents[3])
SECRET_NAME = re.compile(
    r"(KEYS?|TOKENS?|COOKIES?|AUTH(_SOCK)?)\d*(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|^(AWS|AZURE|WANDB)_"
    r"|_(PASS|PWD|PAT)(_|$)|(^|_)(JWT|CREDS?|DSN|WEBHOOK)(_|$)",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(r"://[^/@\s]+@")
"""An address with a password or a token in it, such as that of a proxy or a package index."""
DEFAULTS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""glibc reserves 64 MB of address space for each further arena, and reward.memory_bytes counts address space."""
LAST_PRINTS_S = 0.2
READ_BYTES = 1024 * 1024
"""Read ahead of what is asked for."""
MAX_LOGGED_LINES = 200
STACK_S = 0.5
MAX_STACK_BYTES = 1 << 20
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
PACKAGES = (*{sys.prefix, sys.base_prefix, str(Path(os.__file__).parent)}, PACKAGE_ROOT + "/rollout_server/")
"""Where frames are not of code of the user."""
START_TIMEOUT_S = 120.0
"""For the imports of the user's code, whose calls have limits of their own."""
DYING_S = 0.2
"""From the end of a channel to the end of its process."""
LOST = (TimeoutError, asyncio.IncompleteReadError, ValueError, OSError)
"""What asking a process raises that is late, has ended, sends garbage or cannot be written to."""
TAIL_BYTES = 2000
CHUNK_BYTES = 65536
FLOOD_PAUSE_S = 0.002
"""Between two chunks of prints past the logged ones: a flood may take 32 MB/s of this process, not all of its time."""


class ChildProcess:
    """A running process with its streams; its prints are logged up to a limit.

    The prints are read for as long as any process holds the other end, so that printing blocks no grader for long.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        """The supervisor, which ends the way the child ends."""
        self._name = name
        self._tail = b""
        self._stack: bytes | None = None
        """What was printed since the child was asked for its stack."""
        self._answered = asyncio.Event()

    async def connect(self, channel: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=channel, limit=READ_BYTES)
        prints = asyncio.StreamReader()
        self._prints, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(prints), self.process.stderr
        )
        self._printing = asyncio.create_task(self._log(prints))

    async def end(self) -> None:
        """Kill the process and its descendants; read its last prints for a moment."""
        await _kill(self.process, self._name)
        await asyncio.wait([self._printing], timeout=LAST_PRINTS_S)
        self._printing.cancel()
        self._prints.close()

    async def place(self) -> str:
        """Where the child's main thread is, such as ` at rewards.py:12 in score`; empty where it does not answer.

        Code of the user comes before that of packages; the whole stack is in the log.
        """
        known = all_processes()
        children = [process for process in known.values() if process.parent == self.process.pid]
        if not children:
            return ""
        self._stack = b""
        self._answered.clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(min(children, key=lambda process: process.started).pid, STACK)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACK_S):
                await self._answered.wait()
        frames, self._stack = FRAME.findall(self._stack.decode("utf-8", "replace")), None
        own = [frame for frame in frames if not frame[0].startswith(PACKAGES)]
        return next((f" at {file}:{line} in {name}" for file, line, name in [*own, *frames]), "")

    def last_line(self) -> str:
        """The last line printed, or an empty string."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    async def _log(self, prints: asyncio.StreamReader) -> None:
        num_lines = 0
        while chunk := await prints.read(CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self._stack is not None:
                self._stack = (self._stack + chunk)[:MAX_STACK_BYTES]
                if b"\n" in self._stack.partition(b"File ")[2]:
                    self._answered.set()
            if num_lines > MAX_LOGGED_LINES:
                await asyncio.sleep(FLOOD_PAUSE_S)
                continue
            lines = chunk.decode("utf-8", "replace").splitlines()
            for line in lines[: MAX_LOGGED_LINES - num_lines]:
                log.info("%s: %s", self._name, line[:500])
            num_lines += len(lines)
            if num_lines > MAX_LOGGED_LINES:
                log.warning("%s: printed more than %d lines; the rest is not logged", self._name, MAX_LOGGED_LINES)


class Worker:
    """One process at a time; after `stop` the next `start` begins a fresh one."""

    def __init__(
        self, module: str, name: str, hidden: frozenset[str], max_bytes: int, limits: Mapping[str, Any]
    ) -> None:
        """`hidden` variables it does not get; longer frames, or ones past the limits of msgpack, are refused."""
        self.name, self._module, self._hidden = name, module, hidden
        self._max_bytes, self._limits = max_bytes, limits
        self.child: ChildProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not hung up."""
        return self.child is not None and not self.child.reader.at_eof()

    async def start(self, order: Mapping[str, Any]) -> Any:
        """Begin a fresh process with this order; its answer. Raises one of LOST; the process stays for `autopsy`."""
        await self.stop()
        self.child = await _started(self._module, self.name, self._hidden)
        async with asyncio.timeout(START_TIMEOUT_S):
            self.send(order)
            return await self.receive()

    def send(self, message: Any) -> None:
        """Write a frame; nothing where the process has gone."""
        if self.child is not None and not self.child.writer.is_closing():
            self.child.writer.write(pack(message))

    async def receive(self) -> Any:
        """The next frame. Raises ValueError: garbage; IncompleteReadError, OSError: the process has hung up."""
        assert self.child is not None
        return await receive(self.child.reader, self._max_bytes, self._limits)

    async def autopsy(self) -> tuple[int | None, bool, str]:
        """Of one that hung up: exit code or negative signal, whether another than us has killed it, its last line."""
        assert self.child is not None
        # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.child.process.wait, DYING_S)
        was_killed = self.child.process.poll() == -signal.SIGKILL
        await self.child.end()
        return self.child.process.returncode, was_killed, self.child.last_line()

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        if self.child is not None:
            await self.child.end()
            self.child.writer.close()
        self.child = None  # only now: a `stop` that is cancelled while it waits leaves it to the next call


async def _started(module: str, name: str, hidden: frozenset[str]) -> ChildProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        child = ChildProcess(name, _spawn(theirs.fileno(), hidden, module))
    try:
        await child.connect(ours)
    except BaseException:
        ours.close()
        await _kill(child.process, name)
        raise
    return child


def _spawn(channel: int, hidden: frozenset[str], module: str) -> subprocess.Popen[bytes]:
    """Start the supervisor, which starts the child, in a session of its own.

    Must be called from a thread that lives as long as the child shall: the parent-death signal follows it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rollout_server.tasks.workers.worker", module, str(os.getpid())],
        stdin=channel,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=without_secrets({name: value for name, value in os.environ.items() if name not in hidden}),
        start_new_session=True,
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child; functions read the keys of services from files.

    Example: OPENAI_API_KEY, HF_TOKEN, AWS_PROFILE, SSH_AUTH_SOCK and HTTP_PROXY=http://me:word@proxy are left out;
    PATH, HOME, TOKENIZERS_PARALLELISM and HTTP_PROXY=http://proxy stay.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not SECRET_NAME.search(name) and not SECRET_VALUE.search(value)
    }
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, environment.get("PYTHONPATH")]))
    return DEFAULTS | kept | {"PYTHONPATH": path}


async def _kill(process: subprocess.Popen[bytes], name: str) -> None:
    """Have the supervisor end all descendants; end the supervisor itself if it cannot."""
    for kill in (process.terminate, process.kill):
        kill()  # a process that was reaped already gets no signal
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                log.error("%s: pid %d does not end %g s after a signal to do so", name, process.pid, KILL_TIMEOUT_S)
                break
            await asyncio.sleep(0.001)
