"""Client of reward servers: asks again after a restart, gives up at a deadline.

A request stays with one reward server, and is repeated there, until that one was silent for too long. The first answer
counts; the answer to a request is whole, so an answer of the policy never has the scores of two processes.
"""

import asyncio
import itertools
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from configs.schema import Config, is_loopback
from replay.channel import AsyncDealer, Keys, Limits, WireError, load_keys
from replay.hang import expired
from replay.messages import Heartbeat, Hello, Refused
from rollout_server.reward_model.messages import FROM_REWARD, MAX_SAMPLES, READY, Score, Scores, fingerprint
from rollout_server.rewards import RewardError, Sample

log = logging.getLogger(__name__)

REPEAT_S = 2.0
"""A request without an answer is repeated this often to a reward server that lives; it scores none twice."""
HELLO_S = 1.0
UNANSWERED_HELLO_S = 5.0
"""To a reward server that does not answer: Hellos wait in the socket, and the first one after its restart is enough."""
TURN_S = 0.2
LISTEN_S = 5.0


@dataclass(slots=True)
class Line:
    """One reward server, as this end knows it."""

    address: str
    dealer: AsyncDealer
    heard: float = -math.inf
    activity: str = ""
    hello: float = -math.inf
    """When Hello was sent last."""

    def is_silent(self, now: float, after_s: float) -> bool:
        """Whether nothing was heard for so long."""
        return now - self.heard > after_s

    def said(self, now: float) -> str:
        """What is known of it, for a message."""
        if self.heard == -math.inf:
            return f"{self.address}: nothing was heard [silent]"
        ago = now - self.heard
        return f"{self.address}: last heard {ago:.1f} s ago, {self.activity} [{'slow' if ago < LISTEN_S else 'silent'}]"


@dataclass(slots=True)
class Asked:
    """A request that waits for its answer."""

    request: Score
    line: Line
    answer: asyncio.Future[Scores]
    sent: float = field(default_factory=time.monotonic)


class RewardClient:
    """Asks the reward servers of this node, or of other ones."""

    def __init__(self, config: Config, addresses: Sequence[str], name: str) -> None:
        """`addresses` are `tcp://host:port`, or `NODE=tcp://host:port` of a node whose key proves it."""
        self._config = config
        self._model, self._start_s = config.reward.model, config.rollout.wait_for_servers_s
        self._silent_after_s, self._limits = config.network.silent_after_s, Limits(config.network.max_message_bytes)
        self._addresses, self._name = addresses, name
        self._lines: list[Line] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._asked: dict[int, Asked] = {}
        self._numbers = itertools.count()
        self._refused = ""
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Connect, and wait for a reward server that has loaded its model.

        Raises:
            RewardError: none has within rollout.wait_for_servers_s, or one refuses.
            KeysError: the key of its node is missing.
        """
        for address in self._addresses:
            identity = f"{self._name}.{secrets.token_hex(4)}"
            node, _, place = address.rpartition("=")
            dealer = AsyncDealer(
                place, identity, FROM_REWARD, self._limits, keys=keys_towards(self._config, node, place)
            )
            self._lines.append(Line(place, dealer))
        calls = [*(self._listen(line) for line in self._lines), self._repeat()]
        self._tasks = [asyncio.create_task(call) for call in calls]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        try:
            async with asyncio.timeout(self._start_s):
                await self._ready.wait()
            self._check()
        except TimeoutError as error:
            said, key = "; ".join(line.said(time.monotonic()) for line in self._lines), "rollout.wait_for_servers_s"
            said += expired("a reward server", owed_by=("reward-0",), waited_s=self._start_s, key=key)
            await self.close()
            raise RewardError(
                f"{self._name!r} waited {self._start_s:g} s for a reward server (rollout.wait_for_servers_s): {said}"
            ) from error
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections; calls that still wait raise RewardError."""
        self._refused = self._refused or "the connection to the reward servers was closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._abandon()
        for line in self._lines:
            line.dealer.close()
        self._lines = []

    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, str]]:
        """(score, "") or (NaN, error) of each sample, in their order.

        A request that has no answer after reward.model.timeout_s is an error of its samples. Raises RewardError: the
        connection has ended, or a reward server refuses.
        """
        starts = range(0, len(samples), MAX_SAMPLES)
        parts = await asyncio.gather(*(self._ask(samples[start : start + MAX_SAMPLES]) for start in starts))
        return list(itertools.chain(*parts))

    async def _ask(self, samples: Sequence[Sample]) -> list[tuple[float, str]]:
        self._check()
        request = Score(
            number=next(self._numbers),
            prompts=[sample["prompt"] for sample in samples],
            completions=[sample["completion"] for sample in samples],
        )
        asked = Asked(request, self._best(time.monotonic()), asyncio.get_running_loop().create_future())
        self._asked[request.number] = asked
        try:
            async with asyncio.timeout(self._model.timeout_s):
                await asked.line.dealer.send(request)
                answer = await asked.answer
        except TimeoutError:
            waited = f"waited {self._model.timeout_s:g} s for the reward model (reward.model.timeout_s)"
            limit_s, key = self._model.timeout_s, "reward.model.timeout_s"
            said = expired("scores", owed_by=("a reward server",), waited_s=limit_s, key=key, ends=False)
            return [(math.nan, f"{waited}: {asked.line.said(time.monotonic())}{said}")] * len(samples)
        finally:
            del self._asked[request.number]
        return list(zip(answer.scores.tolist(), answer.errors, strict=True))

    async def _listen(self, line: Line) -> None:
        while True:
            try:
                envelope = await line.dealer.receive(LISTEN_S)
            except WireError as error:
                log.warning("a message of the reward server at %s is refused: %s [corrupt]", line.address, error)
                continue
            if envelope is None:
                continue
            line.heard = time.monotonic()
            match envelope.message:
                case Heartbeat(activity=activity):
                    line.activity = activity
                    if activity == READY:
                        self._ready.set()
                case Refused(reason=reason):
                    raise RewardError(f"the reward server at {line.address} refused {self._name!r}: {reason}")
                case Scores() as scores:
                    self._take(line, scores)

    def _take(self, line: Line, scores: Scores) -> None:
        asked = self._asked.get(scores.number)
        if asked is None or asked.answer.done():
            return  # asked twice and answered twice, or wanted no more
        problem = problem_of(scores, len(asked.request.completions))
        if problem is not None:
            log.warning("an answer of the reward server at %s is refused: %s [corrupt]", line.address, problem)
        else:
            asked.answer.set_result(scores)

    async def _repeat(self) -> None:
        """Send Hello, and requests that the reward server's last death may have lost."""
        while True:
            await asyncio.sleep(TURN_S)
            for line in self._lines:
                await self._greet(line, time.monotonic())
            for asked in list(self._asked.values()):
                now = time.monotonic()
                if now - asked.sent < REPEAT_S or asked.answer.done():
                    continue
                if asked.line.is_silent(now, self._silent_after_s):
                    asked.line = self._best(now)
                if asked.line.heard > asked.sent:  # else it would only pile up in the socket
                    asked.sent = now
                    await asked.line.dealer.send(asked.request)

    async def _greet(self, line: Line, now: float) -> None:
        if now - line.hello >= (HELLO_S if line.heard > line.hello else UNANSWERED_HELLO_S):
            line.hello = now
            hello = Hello(
                role="rollout_server",
                name=self._name,
                pid=os.getpid(),
                host=socket.gethostname(),
                fingerprint=fingerprint(self._model.path),
            )
            await line.dealer.send(hello)

    def _best(self, now: float) -> Line:
        """The reward server to ask: alive, ready, with the fewest requests of this client."""
        waiting = [asked.line for asked in self._asked.values()]
        return min(
            self._lines,
            key=lambda line: (
                line.is_silent(now, self._silent_after_s),
                line.activity != READY,
                sum(other is line for other in waiting),
            ),
        )

    def _check(self) -> None:
        if self._refused or not self._lines:
            raise RewardError(self._refused or "not connected to a reward server")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("reward model: %s", error)
            self._refused = self._refused or str(error)
            self._ready.set()
            self._abandon()

    def _abandon(self) -> None:
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(RewardError(self._refused))


def keys_towards(config: Config, node: str, address: str) -> Keys | None:
    """For a reward server of this node; none on the loopback interface. Raises KeysError."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    keys = None if is_loopback(host) else load_keys(config.network.keys)
    return keys if keys is None or node == config.shares[0].node else keys.towards(node)


def problem_of(scores: Scores, count: int) -> str | None:
    """What is wrong with the answer to a request of `count` samples, or None."""
    if scores.scores.size != count or len(scores.errors) != count:
        return f"{scores.scores.size} scores and {len(scores.errors)} errors for {count} answers"
    for score, error in zip(scores.scores.tolist(), scores.errors, strict=True):
        if math.isfinite(score) == bool(error):
            return f"score {score} with error {error!r}"
    return None
