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
from slipstream.runtime.processes import all_processes

log = logging.getLogger(__name__)
KILL_TIMEOUT_S = 5.0
"""For the supervisor to end the child and all its descendants."""
WORKER = "rollout_server.tasks.workers.worker"
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
STACK_S, STACK_LOOKS = 0.5, 10
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
PACKAGES = (*{sys.prefix, sys.base_prefix, str(Path(os.__file__).parent)}, PACKAGE_ROOT + "/rollout_server/")
"""Where frames are not of code of the user."""
START_TIMEOUT_S = 120.0
"""For the imports of the user's code, whose calls have limits of their own."""
DYING_S = 0.2
"""From the end of a channel to the end of its process."""
LOST = (TimeoutError, asyncio.IncompleteReadError, ValueError, OSError)
"""What asking a process raises that is late, has ended, sends garbage or cannot be written to."""
TAIL_BYTES = 16384
CHUNK_BYTES = 65536
FLOOD_PAUSE_S = 0.002
"""Between two chunks of prints past the logged ones: a flood may take 32 MB/s of this process, not all of its time."""


class Prints:
    """What a process prints: logged up to a limit, and the last of it kept.

    It is read for as long as any process holds the other end, so that printing blocks no grader for long.
    """

    def __init__(self, name: str) -> None:
        self._name, self._tail = name, b""

    async def open(self, stream: Any) -> None:
        """Begin to read."""
        prints = asyncio.StreamReader()
        self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(prints), stream
        )
        self._reading = asyncio.create_task(self._read(prints))

    async def close(self) -> None:
        """Read the last ones for a moment."""
        await asyncio.wait([self._reading], timeout=LAST_PRINTS_S)
        self._reading.cancel()
        self._pipe.close()

    def last_line(self) -> str:
        """The last line printed, or an empty string."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    async def stack_of(self, pid: int) -> list[tuple[str, str, str]]:
        """(file, line, function) of the frames of a process's main thread; none where it does not answer."""
        self._tail = b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK)
        for _ in range(STACK_LOOKS):
            await asyncio.sleep(STACK_S / STACK_LOOKS)
            if frames := FRAME.findall(self._tail.decode("utf-8", "replace")):
                return frames
        return []

    async def _read(self, prints: asyncio.StreamReader) -> None:
        num_lines = 0
        while chunk := await prints.read(CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
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
        self, module: str, name: str, hidden: frozenset[str] | None, max_bytes: int, limits: Mapping[str, Any]
    ) -> None:
        """It does not get `hidden` variables, nor secrets, which code of ours (None) gets.

        Longer frames, or ones past the limits of msgpack, are refused.
        """
        self.name, self._module, self._hidden = name, module, hidden
        self._max_bytes, self._limits = max_bytes, limits
        self.process: subprocess.Popen[bytes] | None = None
        """The supervisor, which ends the way the worker ends."""
        self._prints = Prints(name)

    @property
    def is_running(self) -> bool:
        """Whether it has not hung up."""
        return self.process is not None and not self._reader.at_eof()

    async def start(self, order: Mapping[str, Any]) -> Any:
        """Begin a fresh process with this order; its answer. Raises one of LOST; the process stays for `autopsy`."""
        await self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            process, self._prints = _spawn(theirs.fileno(), self._hidden, self._module), Prints(self.name)
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=READ_BYTES)
            await self._prints.open(process.stderr)
        except BaseException:
            ours.close()
            await kill(process, self.name)
            raise
        self.process = process
        async with asyncio.timeout(START_TIMEOUT_S):
            self.send(order)
            return await self.receive()

    def send(self, message: Any) -> None:
        """Write a frame; nothing where the process has gone."""
        if self.process is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def receive(self) -> Any:
        """The next frame. Raises ValueError: garbage; IncompleteReadError, OSError: the process has hung up."""
        return await receive(self._reader, self._max_bytes, self._limits)

    def last_line(self) -> str:
        """The last line that it has printed, or an empty string."""
        return self._prints.last_line()

    async def place(self) -> str:
        """Where its main thread is, such as ` at rewards.py:12 in score`; empty where it does not answer.

        Code of the user comes before that of packages; the whole stack is in the log.
        """
        children = [one for one in all_processes().values() if self.process and one.parent == self.process.pid]
        if not children:
            return ""
        frames = await self._prints.stack_of(min(children, key=lambda child: child.started).pid)
        own = [frame for frame in frames if not frame[0].startswith(PACKAGES)]
        return next((f" at {file}:{line} in {name}" for file, line, name in [*own, *frames]), "")

    async def autopsy(self) -> tuple[int | None, bool, str]:
        """Of one that hung up: exit code or negative signal, whether another than us has killed it, its last line."""
        if (process := self.process) is None:  # stopped meanwhile
            return None, False, self.last_line()
        # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, DYING_S)
        was_killed = process.poll() == -signal.SIGKILL
        await self.kill()
        return process.returncode, was_killed, self.last_line()

    async def kill(self) -> None:
        """End the process and its descendants; the last of its prints stays."""
        if self.process is not None:
            await kill(self.process, self.name)
            await self._prints.close()

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        if self.process is not None:
            await self.kill()
            self._writer.close()
        self.process = None  # only now: a `stop` that is cancelled while it waits leaves it to the next call


def _spawn(channel: int, hidden: frozenset[str] | None, module: str) -> subprocess.Popen[bytes]:
    """Start the supervisor, which starts the worker, in a session of its own.

    Must be called from a thread that lives as long as the worker shall: the parent-death signal follows it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER, module, str(os.getpid())],
        stdin=channel,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=without_secrets(os.environ, hidden),
        start_new_session=True,
    )


def without_secrets(environment: Mapping[str, str], hidden: frozenset[str] | None = frozenset()) -> dict[str, str]:
    """The environment of a child; functions read the keys of services from files.

    Example: OPENAI_API_KEY, HF_TOKEN, AWS_PROFILE, SSH_AUTH_SOCK and HTTP_PROXY=http://me:word@proxy are left out;
    PATH, HOME, TOKENIZERS_PARALLELISM and HTTP_PROXY=http://proxy stay. `hidden` is as of Worker.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if hidden is None or not (name in hidden or SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, environment.get("PYTHONPATH")]))
    return DEFAULTS | kept | {"PYTHONPATH": path}


async def kill(process: subprocess.Popen[bytes], name: str) -> None:
    """Have the supervisor end all descendants; end the supervisor itself if it cannot."""
    for signalled in (process.terminate, process.kill):
        signalled()  # a process that was reaped already gets no signal
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                log.error("%s: pid %d does not end %g s after a signal to do so", name, process.pid, KILL_TIMEOUT_S)
                break
            await asyncio.sleep(0.001)
