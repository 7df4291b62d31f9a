"""The parts of a reward that ask other servers, on a thread with an event loop of its own.

Not in reward processes: code of the user runs there, and shall not see keys. Not on the loop that serves the engine:
hundreds of replies would be parsed there.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

import httpx

from configs.errors import SlipstreamError
from configs.rewards import Endpoint, RewardPart
from configs.schema import is_loopback
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample, added, load_of
from rollout_server.tasks.rewards.pool import RewardPool
from rollout_server.tasks.rewards.remote.questions import NoVerdict, question_of
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, sendable

T = TypeVar("T")
CLOSE_S = 5.0
MAX_REPLY_BYTES = 1024 * 1024
MAX_SHOWN_CHARS = 200
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs a line for each request


class Unanswered(SlipstreamError, RuntimeError, code="SLIP-REWARD-04"):
    """No reply, or one that is no JSON object; the message says what came, without the key."""


class _Again(RuntimeError):
    """A try that failed in a way that may pass."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Asked:
    """One such part: a limit of time for each try, retries where they help, so many requests at a time."""

    def __init__(self, part: RewardPart, *, is_alone: bool) -> None:
        """Raises RewardError: its key, its rubric or its template is not there."""
        assert isinstance(part.settings, Endpoint)
        self._part, self.settings = part, part.settings
        self._prefix = "" if is_alone else f"{part.label}/"
        self._key, self._question = _key_of(part.label, part.settings), question_of(part.settings)

    def connect(self) -> None:
        """Make the client, in the loop that uses it."""
        most = self.settings.concurrency
        self._slots = asyncio.Semaphore(most)
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            timeout=None,  # each try has a limit as a whole
            trust_env=not is_loopback(httpx.URL(self.settings.url).host),  # a proxy does not know this machine
        )

    async def outcome(self, sample: Sample) -> RewardOutcome:
        """What the part adds to the reward of a sample."""
        start, retries, metrics = time.monotonic(), 0, {"refused": 0.0, "unreadable": 0.0}
        try:
            reply, retries = await self._ask(self._question.request(sample))
            score, more = self._question.score(reply)
            metrics |= more
        except (Unanswered, ValueError) as problem:
            if not isinstance(problem, NoVerdict) or self.settings.otherwise is None:
                error = sendable(f"{self._part.label}: {problem}"[:MAX_ERROR_CHARS])
                return RewardOutcome(score=math.nan, error=error, seconds=time.monotonic() - start)
            score = self.settings.otherwise
            metrics[problem.kind] = 1.0
        seconds, metrics["retries"] = time.monotonic() - start, float(retries)
        named = {f"{self._prefix}{name}": value for name, value in metrics.items()}
        if self._prefix:
            named |= {self._part.label: score, f"{self._prefix}seconds": seconds}
        return RewardOutcome(score=self._part.weight * score, metrics=named, seconds=seconds)

    async def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The reply, and how many retries it took. Raises Unanswered: no further try, or none that would help."""
        async with self._slots:
            for number in range(self.settings.retries + 1):
                try:
                    return await self._once(self.settings.url + self._question.path, body), number
                except _Again as again:
                    if number == self.settings.retries:
                        raise Unanswered(f"{again} ({number + 1} tries)") from again
                    pause = again.pause_s if again.pause_s is not None else FIRST_PAUSE_S * 2**number
                await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _once(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        data = bytearray()
        try:
            async with asyncio.timeout(self.settings.timeout_s), self.client.stream("POST", url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_REPLY_BYTES:
                        raise Unanswered(f"{url} answered more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError as error:
            raise _Again(f"{url} gave no answer within {self.settings.timeout_s:g} s [slow]") from error
        except httpx.HTTPError as error:
            raise _Again(f"{url}: {type(error).__name__}: {self._shown(str(error))} [closed]") from error
        text = data.decode("utf-8", "replace")
        if (status := response.status_code) != 200:
            said = f"{url} answered {status}: {self._shown(text)}"
            raise _Again(said, _seconds(response.headers.get("retry-after"))) if status in RETRIED else Unanswered(said)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"{url} answered no JSON: {self._shown(text)}") from error
        if not isinstance(reply, dict):
            raise Unanswered(f"{url} answered no JSON object: {self._shown(text)}")
        return reply

    def _shown(self, text: str) -> str:
        """A part of what came; services repeat the key that they refuse."""
        return (text.replace(self._key, "***") if self._key else text)[:MAX_SHOWN_CHARS]


class RemoteRewards:
    """Judges by all parts of a run that ask other servers, and beside them by the pool of the others."""

    def __init__(self, parts: Sequence[RewardPart], pool: RewardPool | None, *, is_alone: bool) -> None:
        """`is_alone` where no other part is there, whose metrics these could be taken for. Raises RewardError."""
        self._asked, self._pool = [Asked(part, is_alone=is_alone) for part in parts], pool
        self._calls: dict[object, tuple[float, int]] = {}
        """When each was asked for, and its answers."""

    async def __aenter__(self) -> Self:
        if self._pool is not None:
            await self._pool.__aenter__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote rewards", daemon=True)
        self._thread.start()
        await self._there(self._connect())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pool is not None:
            await self._pool.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._there(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """The sum of all parts for each sample, in their order. Raises RewardError: closed."""
        if not self._thread.is_alive():
            raise RewardError("the remote rewards are not running")
        call = object()
        self._calls[call] = (time.monotonic(), len(samples))
        judges: list[Coroutine[Any, Any, list[RewardOutcome]]] = [self._remotely(call, samples)]
        judges += [] if self._pool is None else [self._pool.score(samples)]
        columns = await asyncio.gather(*judges)
        return [added(row) for row in zip(*columns, strict=True)]

    def gauges(self) -> dict[str, float]:
        """As `Rewards.gauges`, of the judge whose oldest answer waits longest; requests at a time stand for workers."""
        began = [at for at, count in self._calls.values() for _ in range(count)]
        own = load_of(began, time.monotonic(), sum(part.settings.concurrency for part in self._asked))
        pool = own if self._pool is None else self._pool.gauges()
        return max((own, pool), key=lambda found: found["reward_oldest_s"])

    async def _remotely(self, call: object, samples: Sequence[Sample]) -> list[RewardOutcome]:
        try:
            return await self._there(self._score(samples))
        finally:
            del self._calls[call]

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
            await part.client.aclose()

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        """Run in the loop of the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


def _key_of(label: str, settings: Endpoint) -> str | None:
    """The key of an endpoint, from the environment. Raises RewardError: the variable is not set."""
    if settings.key_variable is None:
        return None
    key = os.environ.get(settings.key_variable, "").strip()
    if not key:
        raise RewardError(
            f"reward.function: {label!r}: no environment variable {settings.key_variable} here (key_variable); set it"
            " where the rollout servers start"
        )
    return key


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After; None for a date or nothing."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
