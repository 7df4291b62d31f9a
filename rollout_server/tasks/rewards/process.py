"""The pool's side of a reward process: starts, asks and kills it with its descendants.

Code of the user shares that process and may have written its replies (rewards/worker.py has them): they are checked.
"""

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

from configs.data import Reward
from configs.errors import SlipstreamError
from configs.rewards import Endpoint
from rollout_server.tasks.rewards import RewardError, RewardOutcome
from rollout_server.tasks.rewards.limits import EXIT_CODES, RESOURCES
from rollout_server.tasks.rewards.loading import Convention
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, MAX_METRICS, is_number, metrics_of, shown
from rollout_server.tasks.workers.process import START_TIMEOUT_S, Worker

log = logging.getLogger(__name__)
ASYNC_GRACE_S = 1.0
"""The worker itself cancels asynchronous calls at the timeout; the pool kills it this much later."""
MAX_REPLY_BYTES = 1024 * 1024
REPLY_LIMITS = {
    "max_array_len": 1024,
    "max_map_len": MAX_METRICS,
    "max_str_len": 4 * MAX_ERROR_CHARS,
    "max_bin_len": 0,
    "max_ext_len": 0,
}
"""A reply that announces more in any place is refused before memory is taken for it. msgpack itself goes 1024 deep, on
a stack of its own; what is deeper than a verdict is then refused by its type, without looking into it."""
MEMORY_SIGNS = ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't start new thread")
"""In the last words of native code that found no memory."""
KILLED = (
    ", as the kernel ends processes where a machine or a cgroup is out of memory: see `dmesg`, lower reward.workers or"
    " reward.memory_bytes, or give the machine more"
)
Deliver = Callable[[int, RewardOutcome], None]


class WorkerLost(SlipstreamError, RuntimeError, code="SLIP-REWARD-03"):
    """The process timed out, died or sent garbage, and must be stopped."""


class RewardProcess:
    """One worker at a time; after `stop` the next `ensure` starts a fresh one."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.name = name
        self.convention = ""
        """How the function is called (rewards/loading.py); known once it is loaded, like the next two."""
        self.judges_at_once = False
        """Whether the samples of a request are judged side by side."""
        self._grace_s = 0.0
        self._reward = reward
        self._worker = Worker(
            "rollout_server.tasks.rewards.worker", name, key_variables(reward), MAX_REPLY_BYTES, REPLY_LIMITS
        )

    async def ensure(self) -> None:
        """Start the process, unless it runs. Raises RewardError: it cannot load the function."""
        if self._worker.is_running:
            return
        reward, self._grace_s = self._reward, 0.0
        limits = {key: getattr(reward, key) for key in RESOURCES}
        order = {"parts": order_of(reward), "timeout_s": reward.timeout_s, "limits": limits}
        try:
            async with self._asking(START_TIMEOUT_S):
                self.convention, is_async = read_answer(await self._worker.start(order))
        except (WorkerLost, RewardError) as error:
            await self.stop()
            if isinstance(error, RewardError):
                raise
            raise RewardError(f"reward.function: {reward.shown!r} could not be loaded: {error}") from error
        self._grace_s = ASYNC_GRACE_S if is_async else 0.0
        self.judges_at_once = is_async and self.convention != "trl"

    async def judge(self, num_samples: int, frame: bytes, deliver: Deliver) -> None:
        """Send a request; hand each outcome to `deliver` with its index when it comes.

        `reward.timeout_s` runs from the last sign of progress. Raises WorkerLost: some samples may have no outcome.
        """
        missing, timeout_s = set(range(num_samples)), self._reward.timeout_s
        async with self._asking(timeout_s) as limit:
            await self._worker.write(frame)
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
            raise WorkerLost(f"timed out after {timeout_s:g} s{await self._worker.place()}") from error
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
    """What reward processes judge by, as they are told: all parts but those of remote models.

    A part that stands alone has no label: its metrics keep their names.
    """
    local = [part for part in reward.parts if not isinstance(part.settings, Endpoint)]
    is_alone = len(reward.parts) == 1
    return [("" if is_alone else part.label, part.spec, part.weight, part.options) for part in local]


def key_variables(reward: Reward) -> frozenset[str]:
    """Environment variables that hold keys of endpoints, whatever they are called."""
    endpoints = [part.settings for part in reward.parts if isinstance(part.settings, Endpoint)]
    return frozenset(one.key_variable for one in endpoints if one.key_variable)


def read_answer(reply: Any) -> tuple[str, bool]:
    """From the decoded first reply: the loaded function's convention, and whether it is asynchronous.

    Raises:
        RewardError: the worker found no function; the message is its own.
        ValueError: the reply is neither a known convention nor an error.
    """
    match reply:
        case {"error": str(error)} if len(reply) == 1:
            raise RewardError(error)
        case {"convention": str(convention), "is_async": bool(is_async)} if convention in get_args(Convention):
            return convention, is_async
    raise ValueError(f"expected a convention or an error, found {shown(reply)}")


def read_verdicts(reply: Any, missing: set[int]) -> list[tuple[int, RewardOutcome]]:
    """The outcomes in a decoded reply; their indices are removed from `missing`.

    Raises ValueError: the reply is not a list of verdicts on samples that still miss one.
    """
    if not isinstance(reply, list) or not reply:
        raise ValueError(f"expected verdicts, found {shown(reply)}")
    outcomes = []
    for entry in reply:
        if not isinstance(entry, list) or len(entry) != 5:
            raise ValueError(f"expected a verdict, found {shown(entry)}")
        index = entry[0]
        if type(index) is not int or index not in missing:
            raise ValueError(f"a verdict on sample {shown(index)}, which was not asked for")
        missing.remove(index)
        outcomes.append((index, _outcome(*entry[1:])))
    return outcomes


def _outcome(score: Any, metrics: Any, error: Any, seconds: Any) -> RewardOutcome:
    if not is_number(seconds) or seconds < 0:
        raise ValueError(f"seconds {shown(seconds)}")
    metrics = metrics_of(metrics)
    if isinstance(error, str) and score is None:
        return RewardOutcome(score=math.nan, error=error[:MAX_ERROR_CHARS], seconds=seconds)
    if error is not None or type(score) is not float or not is_number(score):
        raise ValueError(f"score {shown(score)} with error {shown(error)}")
    return RewardOutcome(score=score, metrics=metrics, seconds=seconds)
