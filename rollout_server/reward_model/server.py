"""A reward server's state: requests that wait, and answers for whoever asks again."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from replay.channel import AsyncRouter, Message, WireError
from replay.lifeline import BoundedLog
from replay.messages import Heartbeat, Hello, Refused
from rollout_server.reward_model.messages import MAX_SAMPLES, READY, Score, Scores, fingerprint

log = logging.getLogger(__name__)

LOOK_S = 1.0
ROUND_SAMPLES = 2 * MAX_SAMPLES
"""Answers that are scored together: so many may wait behind others of their round."""
GONE_S = 15.0
"""A request that was not repeated for this long is wanted no more: its sender repeats it every few seconds."""
MAX_ANSWERED = 1024
"""Answers that are kept for requests that come again."""

Key = tuple[str, int]


class Model(Protocol):
    """Scores (prompt, answer) pairs (scorer.py)."""

    def score(self, samples: Sequence[tuple[Any, str]]) -> list[tuple[float, str]]:
        """(score, "") or (NaN, error) of each, in their order."""


@dataclass(slots=True)
class Waiting:
    """A request that has no answer yet."""

    request: Score
    heard: float
    """When it came last."""


class RewardServer:
    """Answers Hello at once, and requests in the order in which they came."""

    def __init__(self, router: AsyncRouter, load: Callable[[], Model], path: str) -> None:
        """`load` makes the model, in the thread that it is used in from then on."""
        self._router, self._load, self._path = router, load, path
        self._activity, self._since = "loading the reward model", time.monotonic()
        self._waiting: dict[Key, Waiting] = {}
        self._answered: OrderedDict[Key, Scores] = OrderedDict()
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._bounded = BoundedLog(log)

    async def serve(self) -> None:
        """Serve until cancelled. Raises RewardError: the model cannot be loaded."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._score())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # neither ends without an error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _receive(self) -> None:
        while True:
            await self._router.wait(LOOK_S)
            while (arrived := await self._router.receive()) is not None:
                identity, envelope = arrived
                if isinstance(envelope, WireError):
                    self._bounded.warning("refused", "message of %s refused: %s [corrupt]", identity, envelope)
                else:
                    await self._handle(identity, envelope.message)

    async def _handle(self, identity: str, message: Message) -> None:
        match message:
            case Hello():
                await self._router.send(identity, self._answer_to(message))
            case Score():
                key, now = (identity, message.number), time.monotonic()
                if key in self._answered:
                    await self._router.send(identity, self._answered[key])
                elif key in self._waiting:
                    self._waiting[key].heard = now
                elif problem := problem_of(message):
                    await self._answer(key, [(math.nan, problem)] * len(message.completions))
                else:
                    self._waiting[key] = Waiting(message, now)
                    self._news.set()

    def _answer_to(self, hello: Hello) -> Heartbeat | Refused:
        expected = fingerprint(self._path)
        if hello.fingerprint != expected:
            return Refused(reason=f"this reward server has {expected}, {hello.name!r} asks for {hello.fingerprint}")
        gauges = {"waiting": float(len(self._waiting))}
        return Heartbeat(activity=self._activity, since_s=time.monotonic() - self._since, gauges=gauges)

    async def _score(self) -> None:
        model = await self._beside(self._load)
        self._activity, self._since = READY, time.monotonic()
        log.info("the reward model is loaded")
        while True:
            keys = self._next_round(time.monotonic())
            if not keys:
                self._news.clear()
                await self._news.wait()
                continue
            requests = [self._waiting[key].request for key in keys]
            samples = [pair for r in requests for pair in zip(r.prompts, r.completions, strict=True)]
            judged = await self._beside(partial(model.score, samples))
            for key, request in zip(keys, requests, strict=True):
                count = len(request.completions)
                await self._answer(key, judged[:count])
                judged = judged[count:]

    def _next_round(self, now: float) -> list[Key]:
        """The requests to score next: the oldest ones that are still wanted."""
        for key in [key for key, waiting in self._waiting.items() if now - waiting.heard > GONE_S]:
            del self._waiting[key]
        keys: list[Key] = []
        count = 0
        for key, waiting in self._waiting.items():
            count += len(waiting.request.completions)
            if keys and count > ROUND_SAMPLES:
                break
            keys.append(key)
        return keys

    async def _answer(self, key: Key, judged: Sequence[tuple[float, str]]) -> None:
        """Keep the answer to a request, and send it."""
        self._waiting.pop(key, None)
        scores = np.array([score for score, _ in judged], dtype=np.float32)
        self._answered[key] = Scores(number=key[1], errors=[error for _, error in judged], scores=scores)
        if len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        await self._router.send(key[0], self._answered[key])  # a sender that is away asks again

    async def _beside(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def problem_of(message: Score) -> str | None:
    """What is wrong with a request, or None."""
    if not 1 <= len(message.completions) <= MAX_SAMPLES or len(message.prompts) != len(message.completions):
        return f"{len(message.prompts)} prompts and {len(message.completions)} answers, 1 to {MAX_SAMPLES} of each go"
    for prompt in message.prompts:
        is_chat = isinstance(prompt, list) and bool(prompt)
        if not isinstance(prompt, str) and not (is_chat and all(map(is_turn, prompt))):
            return f"a prompt is {str(prompt)[:80]!r}, neither text nor chat messages of role and content"
    return None


def is_turn(turn: Any) -> bool:
    """Whether this is a chat message of text."""
    return isinstance(turn, dict) and all(type(turn.get(key)) is str for key in ("role", "content"))
