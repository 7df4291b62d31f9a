"""The pool's side of a reward process: starts, asks and kills it with its descendants."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from configs.data import Reward
from configs.errors import SlipstreamError
from configs.rewards import Endpoint
from rollout_server.tasks.rewards import RewardError, RewardOutcome
from rollout_server.tasks.rewards.limits import EXIT_CODES, RESOURCES
from rollout_server.tasks.rewards.protocol import MAX_REPLY_BYTES, REPLY_LIMITS, read_answer, read_verdicts
from rollout_server.tasks.workers.process import START_TIMEOUT_S, Worker

log = logging.getLogger(__name__)
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MEMORY_SIGNS = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't start new thread")
"""In the last words of native code that found no memory."""
KILLED = (
    ", as the kernel ends processes where a machine or a cgroup is out of memory: see `dmesg`, lower reward.workers or"
    " reward.memory_bytes, or give the machine more"
)
WORKER = "rollout_server.tasks.rewards.worker"
Deliver = Callable[[int, RewardOutcome], None]


class WorkerLost(SlipstreamError, RuntimeError, code="SLIP-REWARD-03"):
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
        self._worker = Worker(WORKER, name, key_variables(reward), MAX_REPLY_BYTES, REPLY_LIMITS)

    async def ensure(self) -> None:
        """Start the process, unless it runs. Raises RewardError: it cannot load the function."""
        if self._worker.is_running:
            return
        reward, self._grace_s = self._reward, 0.0
        limits = {key: getattr(reward, key) for key in RESOURCES}
        try:
            async with self._asking(START_TIMEOUT_S):
                order = {"parts": order_of(reward), "timeout_s": reward.timeout_s, "limits": limits}
                self.convention, is_async = read_answer(await self._worker.start(order))
        except WorkerLost as lost:
            await self.stop()
            raise RewardError(f"reward.function: {reward.shown!r} could not be loaded: {lost}") from lost
        except RewardError:
            await self.stop()
            raise
        self._grace_s = ASYNC_GRACE_S if is_async else 0.0
        self.judges_at_once = is_async and self.convention != "trl"

    async def judge(self, num_samples: int, frame: bytes, deliver: Deliver) -> None:
        """Send a request; hand each outcome to `deliver` with its index when it comes.

        `reward.timeout_s` runs from the last sign of progress. Raises WorkerLost: some samples may have no outcome.
        """
        assert self._worker.child is not None
        writer, missing, timeout_s = self._worker.child.writer, set(range(num_samples)), self._reward.timeout_s
        async with self._asking(timeout_s) as limit:
            writer.write(frame)
            await writer.drain()
            while missing:
                for index, outcome in read_verdicts(await self._worker.receive(), missing):
                    deliver(index, outcome)
                limit.reschedule(asyncio.get_running_loop().time() + timeout_s + self._grace_s)

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        await self._worker.stop()

    @contextlib.asynccontextmanager
    async def _asking(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Raises WorkerLost for whatever goes wrong with a process that is asked something."""
        try:
            async with asyncio.timeout(timeout_s + self._grace_s) as limit:
                yield limit
        except RewardError:
            raise
        except TimeoutError as error:
            child = self._worker.child
            place = "" if child is None else await child.place()
            raise WorkerLost(f"timed out after {timeout_s:g} s{place}") from error
        except ValueError as error:
            raise WorkerLost(f"the reward process sent garbage: {error}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLost(await self._why_it_died()) from error

    async def _why_it_died(self) -> str:
        """How a process that hung up has ended, its last output, and its limit."""
        code, was_killed, last = await self._worker.autopsy()
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
