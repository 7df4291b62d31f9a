"""The pool's side of one reward process: starts it, asks it, kills it with all that it has started."""

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.data import Reward
from rollout_server.rewards.base import RewardError, RewardOutcome
from rollout_server.rewards.framing import LENGTH, MAX_REPLY_BYTES, pack, unpack_reply
from rollout_server.rewards.limits import EXIT_CODES, RESOURCES
from rollout_server.rewards.output import Output
from rollout_server.rewards.spawning import spawn
from rollout_server.rewards.verdicts import read_answer, read_verdicts

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
"""For the imports of the reward function; its calls have reward.timeout_s."""
KILL_TIMEOUT_S = 5.0
"""For the supervisor to end the worker and all its descendants."""
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MEMORY_SIGNS = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't start new thread")
"""In the last words of native code that found no memory."""
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
    """The supervisor, which ends the way the worker ends."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: Output


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
            raise WorkerLost(await self._autopsy(worker), time.monotonic() - started) from error

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        worker = self._worker
        if worker is not None:
            await _kill(worker.process, self.name)
            await worker.output.close()
            worker.writer.close()
        self._worker = None  # only now: who is cancelled while he waits leaves it to the next call

    async def _load(self, worker: _Worker) -> None:
        function, timeout_s = self._reward.function, self._reward.timeout_s
        limits = {key: getattr(self._reward, key) for key in RESOURCES}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                worker.writer.write(pack({"function": function, "timeout_s": timeout_s, "limits": limits}))
                answer = read_answer(await _receive(worker.reader))
        except TimeoutError as error:
            raise RewardError(f"reward.function: {function!r} was not loaded within {START_TIMEOUT_S:g} s") from error
        except ValueError as error:
            raise RewardError(f"reward.function: {function!r} writes to the pool's socket: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = await self._autopsy(worker)
            raise RewardError(f"reward.function: {function!r} could not be loaded: {reason}") from error
        if answer.error is not None:
            raise RewardError(answer.error)
        self.convention = answer.convention
        self._timeout_s = timeout_s + (ASYNC_GRACE_S if answer.is_async else 0.0)

    async def _autopsy(self, worker: _Worker) -> str:
        """How a process that hung up has ended, what it said last, and which limit it ran into."""
        # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
        await asyncio.sleep(0.01)
        await _kill(worker.process, self.name)
        await worker.output.close()
        code, last = worker.process.returncode, worker.output.last_line()
        for key, exit_code in EXIT_CODES.items():
            if code == exit_code:
                return f"the reward process needs more than reward.{key} = {getattr(self._reward, key)} allows"
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = f"; its last output: {last}" if last else ""
        hint = f"; reward.memory_bytes is {self._reward.memory_bytes}" if any(s in last for s in MEMORY_SIGNS) else ""
        return f"the reward process died ({how}){said}{hint}"


async def _connect(name: str) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs)
    output = Output(name)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPLY_BYTES)
        assert process.stderr is not None
        await output.open(process.stderr)
    except BaseException:
        ours.close()
        await _kill(process, name)
        raise
    return _Worker(process, reader, writer, output)


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


async def _receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises ValueError for a frame that is too long or no msgpack."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_REPLY_BYTES:
        raise ValueError(f"a message of {length} bytes, at most {MAX_REPLY_BYTES} are read")
    return unpack_reply(await reader.readexactly(length))
