"""The pool's side of one reward process: starts it, asks it, kills it with all that it has started."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from configs.data import Reward
from rollout_server.rewards.base import RewardError, RewardOutcome
from rollout_server.rewards.framing import LENGTH, MAX_REPLY_BYTES, pack, unpack
from rollout_server.rewards.verdicts import read_verdicts

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
"""For the imports of the reward function; its calls have reward.timeout_s."""
KILL_TIMEOUT_S = 5.0
OUTPUT_TIMEOUT_S = 0.2
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MAX_LOGGED_LINES = 200
TAIL_BYTES = 2000
PACKAGE_ROOT = str(Path(__file__).parents[2])
Deliver = Callable[[int, RewardOutcome], None]


class WorkerLost(RuntimeError):
    """The process timed out, died or sent garbage, and must be stopped; `seconds` is how long the request ran."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class _Worker:
    """A running process with its streams."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: "_Output"


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
        self._worker = await _connect(self.name)
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
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                worker.writer.write(frame)
                await worker.writer.drain()
                while missing:
                    for index, outcome in read_verdicts(await _receive(worker.reader), missing):
                        deliver(index, outcome)
                    limit.reschedule(loop.time() + self._timeout_s)
        except TimeoutError as error:
            seconds = time.monotonic() - started
            raise WorkerLost(f"timed out after {self._reward.timeout_s:g} s", seconds) from error
        except ValueError as error:
            raise WorkerLost(f"the reward process sent garbage: {error}", time.monotonic() - started) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLost(await _autopsy(worker, self.name), time.monotonic() - started) from error

    async def stop(self) -> None:
        """Kill the process and everything in its process group, and reap it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await _kill(worker.process, self.name)
            await worker.output.close()
            worker.writer.close()

    async def _load(self, worker: _Worker) -> None:
        function, timeout_s = self._reward.function, self._reward.timeout_s
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                worker.writer.write(pack({"function": function, "timeout_s": timeout_s}))
                answer = await _receive(worker.reader)
        except TimeoutError as error:
            raise RewardError(f"reward.function: {function!r} was not loaded within {START_TIMEOUT_S:g} s") from error
        except ValueError as error:
            raise RewardError(f"reward.function: {function!r} writes to the pool's socket: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = await _autopsy(worker, self.name)
            raise RewardError(f"reward.function: {function!r} could not be loaded: {reason}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("convention"), str):
            refused = answer.get("error") if isinstance(answer, dict) else None
            raise RewardError(str(refused or f"reward.function: {function!r}: the process sent {str(answer)[:60]!r}"))
        self.convention = answer["convention"]
        self._timeout_s = timeout_s + (ASYNC_GRACE_S if answer.get("is_async") else 0.0)


class _Output:
    """What a process prints: logged up to a limit, and its end kept for error messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tail = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def open(self, pipe: IO[bytes]) -> None:
        """Start to read."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._task = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Read what is left, for a moment: a process that escaped from its group may hold the pipe open."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=OUTPUT_TIMEOUT_S)
            self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    def last_line(self) -> str:
        """The last line printed, or an empty string."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        num_lines = 0
        while chunk := await reader.read(65536):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            for line in chunk.decode("utf-8", "replace").splitlines():
                num_lines += 1
                if num_lines <= MAX_LOGGED_LINES:
                    log.info("%s: %s", self._name, line[:500])
                elif num_lines == MAX_LOGGED_LINES + 1:
                    log.warning("%s: printed %d lines; what follows is not logged", self._name, MAX_LOGGED_LINES)


async def _connect(name: str) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = _spawn(theirs)
    output = _Output(name)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPLY_BYTES)
        assert process.stderr is not None
        await output.open(process.stderr)
    except BaseException:
        ours.close()
        await _kill(process, name)
        raise
    return _Worker(process, reader, writer, output)


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker in a session of its own, so that all it starts can be killed with it.

    Must be called from a thread that lives as long as the worker shall: the parent-death signal follows it.
    """
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "rollout_server.rewards.worker", str(os.getpid())],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )


async def _kill(process: subprocess.Popen[bytes], name: str) -> None:
    if process.returncode is None:
        # Not reaped yet, so neither the pid nor the group can belong to anybody else.
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            log.error("%s: pid %d does not end %g s after SIGKILL", name, process.pid, KILL_TIMEOUT_S)
            return
        await asyncio.sleep(0.001)


async def _autopsy(worker: _Worker, name: str) -> str:
    """How a process that hung up has ended, and what it said last."""
    # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
    await asyncio.sleep(0.01)
    await _kill(worker.process, name)
    await worker.output.close()
    code, last = worker.process.returncode, worker.output.last_line()
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return f"the reward process died ({how})" + (f"; its last output: {last}" if last else "")


async def _receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises ValueError for a frame that is too long or no msgpack."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_REPLY_BYTES:
        raise ValueError(f"a message of {length} bytes, at most {MAX_REPLY_BYTES} are read")
    return unpack(await reader.readexactly(length))
