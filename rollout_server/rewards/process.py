"""The pool's side of a reward process: starts, asks and kills it with its descendants."""

import asyncio
import contextlib
import logging
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

from configs.data import Reward
from configs.errors import SlipstreamError
from configs.rewards import Endpoint
from rollout_server.children.frames import pack, receive
from rollout_server.children.process import ChildProcess, start
from rollout_server.rewards import RewardError, RewardOutcome
from rollout_server.rewards.limits import EXIT_CODES, RESOURCES
from rollout_server.rewards.protocol import MAX_REPLY_BYTES, REPLY_LIMITS, read_answer, read_verdicts

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
"""For the imports of the reward function; its calls have reward.timeout_s."""
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MEMORY_SIGNS = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't start new thread")
"""In the last words of native code that found no memory."""
KILLED = (
    ", as the kernel ends processes where a machine or a cgroup is out of memory: see `dmesg`, lower reward.workers or"
    " reward.memory_bytes, or give the machine more"
)
DYING_S = 0.2
"""From the end of a channel to the end of its process."""
WORKER = "rollout_server.rewards.worker"
Deliver = Callable[[int, RewardOutcome], None]


class WorkerLost(
    SlipstreamError,
    RuntimeError,
    code="SLIP-REWARD-03",
    cause="The reward function did not return within reward.timeout_s, used more memory than it may, or ended its"
    " process.",
    mend="Look at the line of code that the message names; give the function a deadline of its own, or raise"
    " reward.timeout_s or reward.memory_bytes.",
):
    """The process timed out, died or sent garbage, and must be stopped."""


class RewardProcess:
    """One worker at a time; after `stop` the next `ensure` starts a fresh one."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.name = name
        self.convention = ""
        """How the function is called (rewards/loading.py); known once it is loaded."""
        self.judges_at_once = False
        """Whether the samples of a request are judged side by side; known once it is loaded."""
        self._reward = reward
        self._grace_s = 0.0
        self._worker: ChildProcess | None = None

    async def ensure(self) -> None:
        """Start the process, unless it runs. Raises RewardError: it cannot load the function."""
        if self._worker is not None and not self._worker.reader.at_eof():
            return
        await self.stop()
        self._worker = await start(WORKER, self.name, key_variables(self._reward))
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
                for index, outcome in read_verdicts(
                    await receive(worker.reader, MAX_REPLY_BYTES, REPLY_LIMITS), missing
                ):
                    deliver(index, outcome)
                limit.reschedule(asyncio.get_running_loop().time() + self._reward.timeout_s + self._grace_s)

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        if self._worker is not None:
            await self._worker.end()
            self._worker.writer.close()
        self._worker = None  # only now: a `stop` that is cancelled while it waits leaves it to the next call

    async def _load(self, worker: ChildProcess) -> None:
        timeout_s, parts = self._reward.timeout_s, order_of(self._reward)
        limits = {key: getattr(self._reward, key) for key in RESOURCES}
        try:
            async with self._asking(worker, START_TIMEOUT_S):
                worker.writer.write(pack({"parts": parts, "timeout_s": timeout_s, "limits": limits}))
                reply = await receive(worker.reader, MAX_REPLY_BYTES, REPLY_LIMITS)
                self.convention, is_async = read_answer(reply)
        except WorkerLost as lost:
            raise RewardError(f"reward.function: {self._reward.shown!r} could not be loaded: {lost}") from lost
        self._grace_s = ASYNC_GRACE_S if is_async else 0.0
        self.judges_at_once = is_async and self.convention != "trl"

    @contextlib.asynccontextmanager
    async def _asking(self, worker: ChildProcess, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Raises WorkerLost for whatever goes wrong with a process that is asked something."""
        try:
            async with asyncio.timeout(timeout_s + self._grace_s) as limit:
                yield limit
        except RewardError:
            raise
        except TimeoutError as error:
            raise WorkerLost(f"timed out after {timeout_s:g} s{await worker.place()}") from error
        except ValueError as error:
            raise WorkerLost(f"the reward process sent garbage: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLost(await self._autopsy(worker)) from error

    async def _autopsy(self, worker: ChildProcess) -> str:
        """How a process that hung up has ended, its last output, and its limit."""
        # Dying takes a moment from the hang-up on; a process that only hung up is useless and is ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(worker.process.wait, DYING_S)
        was_killed = worker.process.poll() == -signal.SIGKILL
        await worker.end()
        code, last = worker.process.returncode, worker.last_line()
        for key, exit_code in EXIT_CODES.items():
            if code == exit_code:
                return f"the reward process needs more than reward.{key} = {getattr(self._reward, key)} allows"
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = f"; its last output: {last}" if last else ""
        hint = f"; reward.memory_bytes is {self._reward.memory_bytes}" if any(s in last for s in MEMORY_SIGNS) else ""
        return f"the reward process died ({how}){KILLED if was_killed else ''}{said}{hint}"


def order_of(reward: Reward) -> list[tuple[str, str, float, dict[str, Any]]]:
    """What reward processes judge by, as they are told (rewards/weighted.py): all parts but those of remote models.

    A part that stands alone has no label: its metrics keep their names.
    """
    local = [part for part in reward.parts if not isinstance(part.settings, Endpoint)]
    is_alone = len(reward.parts) == 1
    return [("" if is_alone else part.label, part.spec, part.weight, part.options) for part in local]


def key_variables(reward: Reward) -> frozenset[str]:
    """Environment variables that hold keys of endpoints, whatever they are called."""
    endpoints = [part.settings for part in reward.parts if isinstance(part.settings, Endpoint)]
    return frozenset(one.key_variable for one in endpoints if one.key_variable)
