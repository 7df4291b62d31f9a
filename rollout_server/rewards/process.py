"""The pool's side of one reward process: starts it, asks it, kills it with all that it has started."""

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
    """The process timed out, died or sent garbage, and must be stopped; `seconds` is how long the request ran."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


class RewardProcess:
    """One worker at a time; after `stop` the next `ensure` starts a fresh one."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.name = name
        self.convention = ""
        """How the function is called (rewards/loading.py); known once it is loaded."""
        self._reward = reward
        self._timeout_s = reward.timeout_s
        self._worker: _Worker | None = None

    async def ensure(self) -> None:
        """Start the process, unless it runs and has not hung up.

        Raises:
            RewardError: it does not start, or cannot load the function.
        """
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
        """Send a request and hand every outcome to `deliver` with its index, as soon as it is there.

        `reward.timeout_s` runs from the last sign of progress.

        Raises:
            WorkerLost: the process must be stopped; some samples may have no outcome yet.
        """
        assert self._worker is not None
        worker, missing = self._worker, set(range(num_samples))
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                worker.writer.write(frame)
                await worker.writer.drain()
                while missing:
                    for index, outcome in read_verdicts(await worker.receive(), missing):
                        deliver(index, outcome)
                    limit.reschedule(loop.time() + self._timeout_s)
        except TimeoutError as error:
            raise WorkerLost(f"timed out after {self._reward.timeout_s:g} s", loop.time() - started) from error
        except ValueError as error:
            raise WorkerLost(f"the reward process sent garbage: {error}", loop.time() - started) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLost(await self._autopsy(worker), loop.time() - started) from error

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
            async with asyncio.timeout(START_TIMEOUT_S):
                worker.writer.write(pack({"function": function, "timeout_s": timeout_s, "limits": limits}))
                self.convention, is_async = read_answer(await worker.receive())
        except TimeoutError as error:
            raise RewardError(f"reward.function: {function!r} was not loaded within {START_TIMEOUT_S:g} s") from error
        except RewardError:
            raise
        except ValueError as error:
            raise RewardError(f"reward.function: {function!r} writes to the pool's socket: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = await self._autopsy(worker)
            raise RewardError(f"reward.function: {function!r} could not be loaded: {reason}") from error
        self._timeout_s = timeout_s + (ASYNC_GRACE_S if is_async else 0.0)

    async def _autopsy(self, worker: "_Worker") -> str:
        """How a process that hung up has ended, what it said last, and which limit it ran into."""
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
    """A running process with its streams; what it prints is logged up to a limit, and its end kept for messages.

    The prints are read for as long as any process holds the other end, so that printing blocks no grader for long.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        prints: tuple[asyncio.StreamReader, asyncio.BaseTransport],
    ) -> None:
        self.process = process
        """The supervisor, which ends the way the worker ends."""
        self.reader, self.writer = channel
        self._name = name
        self._tail = b""
        self._prints = prints[1]
        self._printing = asyncio.create_task(self._log(prints[0]))

    async def receive(self) -> Any:
        """The next message. Raises ValueError for a frame that is too long or no msgpack."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise ValueError(f"a message of {length} bytes, at most {MAX_REPLY_BYTES} are read")
        return unpack_reply(await self.reader.readexactly(length))

    async def end(self) -> None:
        """Kill the process with all that it has started; read what is left of its prints, for a moment."""
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
            for line in chunk.decode("utf-8", "replace").splitlines():
                num_lines += 1
                if num_lines > MAX_LOGGED_LINES:
                    log.warning("%s: printed more than %d lines; the rest is not logged", self._name, MAX_LOGGED_LINES)
                    break
                log.info("%s: %s", self._name, line[:500])


async def _start(name: str) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = _spawn(theirs.fileno())
    try:
        channel = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPLY_BYTES)
        prints = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(prints), process.stderr
        )
    except BaseException:
        ours.close()
        await _kill(process, name)
        raise
    return _Worker(name, process, channel, (prints, transport))


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
    """The environment of a reward process. A function that needs the key of a service reads it from a file.

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
    """Have the supervisor end the worker with all that it has started; end the supervisor itself if it cannot."""
    for kill in (process.terminate, process.kill):
        kill()  # a process that was reaped already gets no signal
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                log.error("%s: pid %d does not end %g s after a signal to do so", name, process.pid, KILL_TIMEOUT_S)
                break
            await asyncio.sleep(0.001)
