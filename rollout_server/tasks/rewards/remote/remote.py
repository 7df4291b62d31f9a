"""The parts of a reward that ask other servers, on a thread with an event loop of its own.

Not in reward processes: code of the user runs there, and shall not see keys. Not on the loop that serves the engine:
hundreds of replies would be parsed there.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from configs.rewards import Endpoint, Judge, RemoteModel, RewardPart
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample, added, load_of
from rollout_server.tasks.rewards.judging import sendable
from rollout_server.tasks.rewards.remote import judge, scoring
from rollout_server.tasks.rewards.remote.asker import Asker, Unanswered, key_of
from rollout_server.tasks.rewards.remote.judge import NoVerdict

T = TypeVar("T")
CLOSE_S = 5.0
COUNTED = ("refused", "unreadable")


class Asked:
    """One such part: makes requests of samples and scores of replies."""

    def __init__(self, part: RewardPart, *, is_alone: bool) -> None:
        """Raises RewardError: its key, its rubric or its template is not there."""
        assert isinstance(part.settings, Endpoint)
        self._part, self._settings = part, part.settings
        self._prefix = "" if is_alone else f"{part.label}/"
        self._asker: Asker | None = None
        key_of(part.label, part.settings)
        self._rubric = judge.rubric_of(part.settings) if isinstance(part.settings, Judge) else ""
        self._template = scoring.template_of(part.settings) if isinstance(part.settings, RemoteModel) else None

    @property
    def concurrency(self) -> int:
        """Requests under way at a time."""
        return self._settings.concurrency

    def connect(self) -> None:
        """Make the client, in the loop that uses it."""
        self._asker = Asker(self._part.label, self._settings)

    async def close(self) -> None:
        """End its connections."""
        if self._asker is not None:
            await self._asker.close()

    async def outcome(self, sample: Sample) -> RewardOutcome:
        """What the part adds to the reward of a sample."""
        assert self._asker is not None
        start, retries = time.monotonic(), 0
        metrics = {name: 0.0 for name in COUNTED}
        try:
            path, body = self._request(sample)
            reply, retries = await self._asker.ask(path, body)
            score, more = self._score(reply)
            metrics |= more
        except NoVerdict as problem:
            if self._settings.otherwise is None:
                return self._failed(str(problem), start)
            score = self._settings.otherwise
            metrics[problem.kind] = 1.0
        except (Unanswered, ValueError) as problem:
            return self._failed(str(problem), start)
        seconds = time.monotonic() - start
        named = {f"{self._prefix}{name}": value for name, value in (metrics | {"retries": float(retries)}).items()}
        if self._prefix:
            named |= {self._part.label: score, f"{self._prefix}seconds": seconds}
        return RewardOutcome(score=self._part.weight * score, metrics=named, seconds=seconds)

    def _request(self, sample: Sample) -> tuple[str, dict[str, object]]:
        if isinstance(self._settings, Judge):
            return "/chat/completions", judge.request_of(sample, self._settings, self._rubric)
        assert isinstance(self._settings, RemoteModel)
        return scoring.PATHS[self._settings.api], scoring.request_of(sample, self._settings, self._template)

    def _score(self, reply: dict[str, object]) -> tuple[float, dict[str, float]]:
        if isinstance(self._settings, Judge):
            score, grade = judge.grade_of(reply, self._settings)
            return score, {"grade": grade}
        assert isinstance(self._settings, RemoteModel)
        return scoring.score_of(reply, self._settings), {}

    def _failed(self, reason: str, start: float) -> RewardOutcome:
        return RewardOutcome(
            score=math.nan, error=sendable(f"{self._part.label}: {reason}"[:2000]), seconds=time.monotonic() - start
        )


class RemoteRewards:
    """All parts of a run that ask other servers."""

    def __init__(self, parts: Sequence[RewardPart], *, is_alone: bool) -> None:
        """`is_alone` where no other part is there, whose metrics these could be taken for. Raises RewardError."""
        self._asked = [Asked(part, is_alone=is_alone) for part in parts]
        self._calls: dict[object, tuple[float, int]] = {}
        """When each was asked for, and its answers."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote rewards", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await self._there(self._connect())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._there(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """The sum of the parts for each sample, in their order. Raises RewardError: closed."""
        if not self._thread.is_alive():
            raise RewardError("the remote rewards are not running")
        call = object()
        self._calls[call] = (time.monotonic(), len(samples))
        try:
            return await self._there(self._score(samples))
        finally:
            del self._calls[call]

    def gauges(self) -> dict[str, float]:
        """As `Rewards.gauges`; requests under way at most stand for workers."""
        began = [at for at, count in self._calls.values() for _ in range(count)]
        return load_of(began, time.monotonic(), sum(part.concurrency for part in self._asked))

    async def _score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        columns = [await asyncio.gather(*(part.outcome(s) for s in samples)) for part in self._asked]
        return [added(row) for row in zip(*columns, strict=True)]

    async def _connect(self) -> None:
        for part in self._asked:
            part.connect()

    async def _close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for part in self._asked:
            await part.close()

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        """Run in the loop of the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
