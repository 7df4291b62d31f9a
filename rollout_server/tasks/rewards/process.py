"""The pool's side of a reward process: starts it, asks it, and kills it with its descendants.

Code of the user shares that process and may have written its replies (rewards/worker.py has them): they are checked.
"""

import asyncio
import itertools
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from configs.errors import SlipstreamError
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample
from rollout_server.tasks.rewards.limits import EXIT_CODES
from rollout_server.tasks.rewards.loading import Convention
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, MAX_METRICS, is_number, metrics_of, shown
from rollout_server.tasks.workers.process import LOST, START_TIMEOUT_S, Worker

log = logging.getLogger(__name__)
WORKER = "rollout_server.tasks.rewards.worker"
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


class WorkerLost(SlipstreamError, RuntimeError, code="SLIP-REWARD-03"):
    """The process timed out, died or sent garbage, and must be stopped."""


@dataclass(slots=True, eq=False)
class Call:
    """Samples that a function judges in one call, and where their outcomes go."""

    samples: list[Sample]
    outcomes: list[asyncio.Future[RewardOutcome]]
    """Cancelled with the one that asked for them."""
    is_alone: bool = False
    """It is in a process by itself: beside others, it could fail them again."""
    since: float = 0.0
    """When its time began to run."""

    def parts(self) -> "list[Call]":
        """A call for each sample that still waits."""
        pairs = zip(self.samples, self.outcomes, strict=True)
        return [Call([sample], [outcome], is_alone=True) for sample, outcome in pairs if not outcome.done()]


class RewardProcess:
    """One worker at a time; a fresh one follows one that was lost."""

    def __init__(
        self,
        name: str,
        order: dict[str, Any],
        hidden: frozenset[str] | None,
        record: Callable[[Call, list[RewardOutcome]], None],
        again: Callable[[list[Call]], None],
    ) -> None:
        """`order` is the worker's first message (rewards/worker.py), `hidden` what Worker takes.

        `record` gets the outcomes of a call; `again` calls to be judged once more, when this may be given others.
        """
        self.name, self._order, self._record, self._again = name, order, record, again
        self.convention, self.is_async = "", False
        """How the function is called (rewards/loading.py); known once it is loaded."""
        self._worker = Worker(WORKER, name, hidden, MAX_REPLY_BYTES, REPLY_LIMITS)
        self._is_loaded = self._is_starting = False
        self._calls: dict[int, Call] = {}
        """Those in it by their numbers, the oldest first."""
        self._numbers, self._has_calls = itertools.count(), asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        """Of time, while it judges."""

    @property
    def load(self) -> float:
        """Calls in it; infinite where it takes none."""
        is_closed = self._is_starting or any(call.is_alone for call in self._calls.values())
        return math.inf if is_closed else len(self._calls)

    def give(self, call: Call) -> None:
        """Have it judged."""
        self._calls[number := next(self._numbers)] = call
        self._has_calls.set()
        if self._limit is not None:
            self._send(number, call)

    async def run(self) -> None:
        """Judge what it is given, for as long as the pool is open."""
        while True:
            try:
                await self.start()
                await self._judge()
            except (RewardError, WorkerLost) as error:
                log.warning("%s: %s; it is started anew", self.name, error)
                calls = [part for call in self._calls.values() for part in call.parts()]
                rests = isinstance(error, RewardError) or not self._calls
                self._calls, self._is_starting = {}, True
                await self.stop()
                if len(calls) == 1 or isinstance(error, RewardError):
                    for call in calls:
                        self._record(call, [RewardOutcome(score=math.nan, error=str(error), seconds=0.0)])
                    calls = []
                self._is_starting = not rests
                self._has_calls.clear()
                self._again(calls)
                if rests:  # until it is asked for
                    await self._has_calls.wait()
                self._is_starting = True

    async def start(self) -> None:
        """Start the process, unless it runs. Raises RewardError: it cannot load the function."""
        if self._is_loaded:
            return
        try:
            self.convention, self.is_async = read_answer(await self._worker.start(self._order))
        except RewardError:
            await self.stop()
            raise
        except LOST as error:
            why = await self._why(error, START_TIMEOUT_S)
            await self.stop()
            specs = ", ".join(part[1] for part in self._order["parts"])
            raise RewardError(f"reward.function: {specs!r} could not be loaded: {why}") from error
        self._is_loaded = True

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        self._is_loaded = False
        await self._worker.stop()

    async def _judge(self) -> None:
        """Hand replies on as they come; the oldest call has reward.timeout_s. Raises WorkerLost."""
        self._is_starting = False
        try:
            async with asyncio.timeout(None) as self._limit:
                for number, call in self._calls.items():
                    self._send(number, call)
                self._again([])
                while True:
                    number, outcomes = read_reply(await self._worker.receive(), self._calls)
                    call = self._calls.pop(number)
                    if not self.is_async and self._calls:  # the next one is begun only now
                        next(iter(self._calls.values())).since = asyncio.get_running_loop().time()
                    self._set_limit()
                    self._record(call, outcomes)
        except LOST as error:
            self._limit = None
            raise WorkerLost(await self._why(error, self._order["timeout_s"])) from error
        finally:
            self._limit = None

    def _send(self, number: int, call: Call) -> None:
        self._worker.send([number, call.samples])
        call.since = asyncio.get_running_loop().time()
        self._set_limit()

    def _set_limit(self) -> None:
        oldest = next(iter(self._calls.values()), None)
        grace_s = ASYNC_GRACE_S if self.is_async else 0.0
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None if oldest is None else oldest.since + self._order["timeout_s"] + grace_s)

    async def _why(self, error: BaseException, timeout_s: float) -> str:
        """What has happened to a process that is lost: where it is, how it has ended, its last output and its limit."""
        if isinstance(error, TimeoutError):
            return f"timed out after {timeout_s:g} s{await self._worker.place()}"
        if isinstance(error, ValueError):
            return f"the reward process sent garbage: {error}"
        code, was_killed, last = await self._worker.autopsy()
        memory = self._order["limits"].get("memory_bytes", 0)
        for key, exit_code in EXIT_CODES.items():
            if code == exit_code:
                return f"the reward process needs more than reward.{key} = {self._order['limits'][key]} allows"
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = f"; its last output: {last}" if last else ""
        hint = f"; reward.memory_bytes is {memory}" if any(sign in last for sign in MEMORY_SIGNS) else ""
        return f"the reward process died ({how}){KILLED if was_killed else ''}{said}{hint}"


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


def read_reply(reply: Any, asked: dict[int, Call]) -> tuple[int, list[RewardOutcome]]:
    """The number of a call, and the outcomes of its samples. Raises ValueError: none of those that were asked for."""
    match reply:
        case [int(number), list(verdicts)] if type(number) is int and number in asked:
            if len(verdicts) == len(asked[number].samples):
                return number, list(map(_outcome, verdicts))
    raise ValueError(f"{shown(reply)} is no list of verdicts that was asked for")


def _outcome(verdict: Any) -> RewardOutcome:
    if not isinstance(verdict, list) or len(verdict) != 4:
        raise ValueError(f"expected a verdict, found {shown(verdict)}")
    score, metrics, error, seconds = verdict
    if not is_number(seconds) or seconds < 0:
        raise ValueError(f"seconds {shown(seconds)}")
    metrics = metrics_of(metrics)
    if isinstance(error, str) and score is None:
        return RewardOutcome(score=math.nan, error=error[:MAX_ERROR_CHARS], seconds=seconds)
    if error is not None or type(score) is not float or not is_number(score):
        raise ValueError(f"score {shown(score)} with error {shown(error)}")
    return RewardOutcome(score=score, metrics=metrics, seconds=seconds)
