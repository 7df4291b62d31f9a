"""The pool's side of a reward process: starts, asks and kills it with its descendants."""

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
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from configs.data import Reward
from rollout_server.rewards import RewardError, RewardOutcome
from rollout_server.rewards.limits import EXIT_CODES, RESOURCES
from rollout_server.rewards.protocol import LENGTH, MAX_REPLY_BYTES, pack, read_answer, read_verdicts, unpack_reply

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
"""For the imports of the reward function; its calls have reward.timeout_s."""
KILL_TIMEOUT_S = 5.0
"""For the supervisor to end the worker and all its descendants."""
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MEMORY_SIGNS = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't start new thread")
"""In the last words of native code that found no memory."""
PACKAGE_ROOT = str(Path(__file__).parents[2])
SECRET_NAME = re.compile(
    r"(KEYS?|TOKENS?|COOKIES?|AUTH(_SOCK)?)(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|^(AWS|AZURE|WANDB)_",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""An address with a password in it, such as that of a proxy or a package index."""
DEFAULTS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""glibc reserves 64 MB of address space for each further arena, and reward.memory_bytes counts address space."""
LAST_PRINTS_S = 0.2
MAX_LOGGED_LINES = 200
TAIL_BYTES = 2000
CHUNK_BYTES = 65536
FLOOD_PAUSE_S = 0.002
"""Between two chunks of prints past the logged ones: a flood may take 32 MB/s of this process, not all of its time."""
Deliver = Callable[[int, RewardOutcome], None]


class WorkerLost(RuntimeError):
    """The process timed out, died or sent garbage, and must be stopped."""


class RewardProcess:
    """One worker at a time; after `stop` the next `ensure` starts a fresh one."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.name = name
        self.convention = ""
        """How the function is called (rewards/loading.py); known once it is loaded."""
        self._reward = reward
        self._grace_s = 0.0
        self._worker: _Worker | None = None

    async def ensure(self) -> None:
        """Start the process, unless it runs. Raises RewardError: it cannot load the function."""
        if self._worker is not None and not self._worker.reader.at_eof():
            return
        await self.stop()
        self._worker = await _start(self.name)
        try:
            await self._load(self._worker)
        except RewardError:
            await self.stop()
            raise

    async def judge(self, num_samples: int, frame: bytes, deliver: Deliver) -> None:
        """Send a request; hand each outcome to `deliver` with its index when it comes.

        `reward.timeout_s` runs from the last sign of progress. Raises WorkerLost: some samples may have no outcome.
        """
        assert self._worker is not None
        worker, missing = self._worker, set(range(num_samples))
        async with self._asking(worker, self._reward.timeout_s) as limit:
            worker.writer.write(frame)
            await worker.writer.drain()
            while missing:
                for index, outcome in read_verdicts(await worker.receive(), missing):
                    deliver(index, outcome)
                limit.reschedule(asyncio.get_running_loop().time() + self._reward.timeout_s + self._grace_s)

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        if self._worker is not None:
            await self._worker.end()
            self._worker.writer.close()
        self._worker = None  # only now: a `stop` that is cancelled while it waits leaves it to the next call

    async def _load(self, worker: "_Worker") -> None:
        function, timeout_s = self._reward.function, self._reward.timeout_s
        limits = {key: getattr(self._reward, key) for key in RESOURCES}
        try:
            async with self._asking(worker, START_TIMEOUT_S):
                worker.writer.write(pack({"function": function, "timeout_s": timeout_s, "limits": limits}))
                self.convention, is_async = read_answer(await worker.receive())
        except WorkerLost as lost:
            raise RewardError(f"reward.function: {function!r} could not be loaded: {lost}") from lost
        self._grace_s = ASYNC_GRACE_S if is_async else 0.0

    @contextlib.asynccontextmanager
    async def _asking(self, worker: "_Worker", timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Raises WorkerLost for whatever goes wrong with a process that is asked something."""
        try:
            async with asyncio.timeout(timeout_s + self._grace_s) as limit:
                yield limit
        except RewardError:
            raise
        except TimeoutError as error:
            raise WorkerLost(f"timed out after {timeout_s:g} s") from error
        except ValueError as error:
            raise WorkerLost(f"the reward process sent garbage: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLost(await self._autopsy(worker)) from error

    async def _autopsy(self, worker: "_Worker") -> str:
        """How a process that hung up has ended, its last output, and its limit."""
        # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
        await asyncio.sleep(0.01)
        await worker.end()
        code, last = worker.process.returncode, worker.last_line()
        for key, exit_code in EXIT_CODES.items():
            if code == exit_code:
                return f"the reward process needs more than reward.{key} = {getattr(self._reward, key)} allows"
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = f"; its last output: {last}" if last else ""
        hint = f"; reward.memory_bytes is {self._reward.memory_bytes}" if any(s in last for s in MEMORY_SIGNS) else ""
        return f"the reward process died ({how}){said}{hint}"


class _Worker:
    """A running process with its streams; its prints are logged up to a limit.

    The prints are read for as long as any process holds the other end, so that printing blocks no grader for long.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        """The supervisor, which ends the way the worker ends."""
        self._name = name
        self._tail = b""

    async def connect(self, channel: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=channel, limit=MAX_REPLY_BYTES)
        prints = asyncio.StreamReader()
        self._prints, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(prints), self.process.stderr
        )
        self._printing = asyncio.create_task(self._log(prints))

    async def receive(self) -> Any:
        """The next message. Raises ValueError for a frame that is too long or no msgpack."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise ValueError(f"a message of {length} bytes, at most {MAX_REPLY_BYTES} are read")
        return unpack_reply(await self.reader.readexactly(length))

    async def end(self) -> None:
        """Kill the process and its descendants; read its last prints for a moment."""
        await _kill(self.process, self._name)
        await asyncio.wait([self._printing], timeout=LAST_PRINTS_S)
        self._printing.cancel()
        self._prints.close()

    def last_line(self) -> str:
        """The last line printed, or an empty string."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    async def _log(self, prints: asyncio.StreamReader) -> None:
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


async def _start(name: str) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        worker = _Worker(name, _spawn(theirs.fileno()))
    try:
        await worker.connect(ours)
    except BaseException:
        ours.close()
        await _kill(worker.process, name)
        raise
    return worker


def _spawn(channel: int) -> subprocess.Popen[bytes]:
    """Start the supervisor (rewards/supervisor.py), which starts the worker, in a session of its own.

    Must be called from a thread that lives as long as the worker shall: the parent-death signal follows it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "rollout_server.rewards.worker", str(os.getpid())],
        stdin=channel,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=without_secrets(os.environ),
        start_new_session=True,
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a reward process; functions read the keys of services from files.

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
