"""The process of a teacher: an engine, a socket for rollout servers, and a place among replay's peers.

consumes     Score (rollout servers); weight versions where it is refreshed (weight bus)
produces     Scores, Refusal (rollout servers); Hello, Heartbeat (replay)
waits for    replay for at most network.silent_after_s; the engine
unblocked by rollout_server/teachers/scores.py (the next group), replay/serve.py (Welcome, Goodbye)
"""

import asyncio
import logging
import os
import socket
import time
from functools import partial

import numpy as np

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncDealer, AsyncRouter, ChannelError, PeerRefused, WireError
from rollout_server.engines.base import Engine, EngineError, first_error
from rollout_server.follower import WeightFollower
from rollout_server.leases import WELCOME_BEATS, GoodbyeReceived
from rollout_server.teachers.messages import Refusal, Score, Scores
from slipstream.runtime.hang import expired
from slipstream.runtime.lifeline import BoundedLog, Cores
from slipstream.runtime.vitals.watch import Vitals

log = logging.getLogger(__name__)

LOOK_S = 1.0
AGAIN_S = 0.05


class TeacherProcess:
    """Scores what rollout servers send, with what its engine holds."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        dealer: AsyncDealer,
        router: AsyncRouter,
        *,
        teacher: str,
        name: str,
        fingerprint: dict[str, str],
        address: str,
        vitals: Vitals | None = None,
    ) -> None:
        """`config` is as the engine has it; `name` is the process's, `teacher` one of `teachers`; `address` is where
        rollout servers find it."""
        self.config, self.engine, self.dealer, self.router = config, engine, dealer, router
        self.teacher, self.name, self.fingerprint, self.address = teacher, name, fingerprint, address
        self.follower: WeightFollower | None = None
        if config.teachers[teacher].is_refreshed:
            self.follower = WeightFollower(config, engine, name, on_live=self._refreshed, on_quarantine=self._dark)
        self._bus: str | None = None
        self.version, self.digest = 0, ""
        """Of the weights that are live; without a digest, none have been proven."""
        self._vitals, self._bounded, self._cores = vitals, BoundedLog(log), Cores()
        self._running: set[tuple[str, int]] = set()
        """(server, number) of each request that is being scored: one that comes again is answered once."""
        self.scored_tokens, self._told, self._busy_s, self._beat_at = 0, 0, 0.0, time.monotonic()
        self._welcome, self._joined_at = False, 0.0

    async def serve(self) -> bool:
        """Score until replay says Goodbye; True when the run ended well.

        Raises:
            ChannelError: replay is silent or refused this teacher.
            EngineError: the engine died.
        """
        await self.join()
        ended: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                tasks.create_task(self._listen(tasks))
                await self._hear()
        except* GoodbyeReceived as group:
            ended = first_error(group)
        finally:
            if self.follower is not None:
                await asyncio.to_thread(self.follower.stop)  # its thread may wait for this loop
        log.info("replay said goodbye: %s", ended)
        return isinstance(ended, GoodbyeReceived) and not ended.failed

    async def went_live(self, version: int, digest: str) -> None:
        """The engine serves these weights, which were proven; none where the digest is empty."""
        self.version, self.digest = version, digest
        if self._welcome:
            await self.join()

    async def _refreshed(self, version: int, _: int) -> None:
        assert self.follower is not None
        log.info("%s scores with version %d, digest %s", self.name, version, self.follower.digest)
        await self.went_live(version, self.follower.digest)

    async def _dark(self, _: str) -> None:
        await self.went_live(self.version, "")

    async def join(self) -> None:
        """Say Hello: where this teacher is, and what it holds."""
        self._joined_at = time.monotonic()
        await self.dealer.send(
            m.Hello(
                role="teacher",
                name=self.name,
                pid=os.getpid(),
                host=socket.gethostname(),
                fingerprint=self.fingerprint,
                version=self.version,
                digest=self.digest,
                teacher=self.teacher,
                address=self.address,
                bus_address=self._bus,
            )
        )

    async def leave(self) -> None:
        """Say Goodbye: rollout servers ask other processes from now on."""
        await self.dealer.send(m.Goodbye(reason="stopped by signal"))

    async def _hear(self) -> None:
        """React to replay. Raises GoodbyeReceived, ChannelError."""
        limit, key = self.config.rollout.wait_for_servers_s, "rollout.wait_for_servers_s"  # replay may not be up yet
        until = time.monotonic() + limit
        while True:
            try:
                envelope = await self.dealer.receive(max(0.0, until - time.monotonic()))
            except WireError as error:
                self._bounded.warning("replay", "a message of replay is refused: %s [corrupt]", error)
                continue
            if envelope is None:
                what = partial(expired, "a message of replay", owed_by=("replay",), waited_s=limit, key=key)
                waited = f"{self.name!r} waited {limit:g} s for replay at {self.dealer.address} ({key}): nothing came"
                raise ChannelError(f"{waited}{await asyncio.to_thread(what)}", "silent")
            limit, key = self.config.network.silent_after_s, "network.silent_after_s"
            until = time.monotonic() + limit
            match envelope.message:
                case m.Welcome(bus_address=bus):
                    self._welcome, self.router.run_id = True, self.dealer.run_id
                    if self.follower is not None and bus not in (None, self._bus):
                        self._bus = bus
                        self.follower.follow(bus, self.dealer.run_id)
                        await self.join()
                case m.Refused(code="hello", reason=reason):
                    log.info("replay wants another Hello: %s", reason)
                    await self.join()
                case m.Refused(code="peer", reason=reason):
                    raise PeerRefused(f"replay refused {self.name!r}: {reason}", "closed")
                case m.Refused(reason=reason):
                    raise ChannelError(f"replay refused {self.name!r}: {reason}", "closed")
                case m.Goodbye(reason=reason, failed=failed):
                    raise GoodbyeReceived(reason, failed)

    async def _beat(self) -> None:
        """Heartbeats once per network.heartbeat_s, and Hello again where no Welcome has come."""
        every_s = self.config.network.heartbeat_s
        while True:
            await asyncio.sleep(every_s)
            if self.follower is not None and self.follower.failure is not None:
                raise EngineError(f"the weight follower died: {self.follower.failure}") from self.follower.failure
            if not self._welcome and time.monotonic() - self._joined_at > WELCOME_BEATS * every_s:
                await self.join()
            activity = f"scoring {len(self._running)} requests" if self._running else "waiting for requests"
            activity = activity if self.digest else "waiting for weights of the learner"
            await self.dealer.send(m.Heartbeat(activity=activity, gauges=await self._gauges()))

    async def _gauges(self) -> dict[str, float]:
        health = await self.engine.health()
        now = time.monotonic()
        elapsed = max(1e-6, now - self._beat_at)
        busy, tokens = health.busy_s - self._busy_s, self.scored_tokens - self._told
        self._busy_s, self._told, self._beat_at = health.busy_s, self.scored_tokens, now
        gauges = {
            "idle_ratio": min(1.0, max(0.0, 1.0 - busy / elapsed)),
            "scored_tokens_per_s": tokens / elapsed,
            "running": float(len(self._running)),
            "memory_gb": health.memory_bytes / 1e9,
            "cores": self._cores.take(),
            **({} if self.follower is None else self.follower.gauges),
        }
        if self._vitals is None:
            return gauges
        self._vitals.show({f"teacher/{name}": value for name, value in gauges.items()})
        return gauges | self._vitals.gauges()

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        """Take requests of rollout servers; each is a task."""
        while True:
            await self.router.wait(LOOK_S)
            if not self.router.run_id:  # replay's Welcome is on its way; servers may have heard of this teacher before
                await asyncio.sleep(AGAIN_S)
                continue
            while (came := await self.router.receive()) is not None:
                identity, envelope = came
                if isinstance(envelope, WireError):
                    self._bounded.warning("servers", "a message of %r is refused: %s", identity, envelope)
                elif isinstance(envelope.message, Score):
                    which = (identity, envelope.message.number)
                    if which not in self._running:
                        self._running.add(which)
                        tasks.create_task(self._answer(identity, envelope.message))

    async def _answer(self, identity: str, asked: Score) -> None:
        """Raises EngineError: the engine is dead."""
        try:
            answer = await self._scored(asked)
        except EngineError as error:
            await self.engine.health()  # raises when the engine itself is dead
            answer = Refusal(number=asked.number, reason=str(error))
        finally:
            self._running.discard((identity, asked.number))
        if isinstance(answer, Refusal):
            self._bounded.warning("refused", "%s asks in vain: %s", identity, answer.reason)
        await self.router.send(identity, answer)  # where it has gone, nobody waits

    async def _scored(self, asked: Score) -> Scores | Refusal:
        if (problem := self._problem(asked)) is not None:
            return Refusal(number=asked.number, reason=problem)
        starts = np.cumsum(asked.lengths)[:-1]
        while True:
            version, digest = self.version, self.digest
            scored = await self.engine.score(
                np.split(asked.token_ids, starts), asked.firsts.tolist(), temperature=asked.temperature, top=asked.top
            )
            if scored.version == version == self.version:
                break
            await asyncio.sleep(AGAIN_S)  # an update came meanwhile
        self.scored_tokens += scored.logprobs.size
        return Scores(
            number=asked.number,
            version=version,
            digest=digest,
            logprobs=scored.logprobs,
            ids=scored.ids,
            top=scored.top,
        )

    def _problem(self, asked: Score) -> str | None:
        """Why this cannot be scored here, with the key of the configuration."""
        if not self.digest:
            return f"{self.name!r} waits for weights that are proven"
        if asked.teacher != self.teacher:
            return f"this is teacher {self.teacher!r}, and {asked.teacher!r} is asked for"
        if asked.tokenizer != (own := self.fingerprint["tokenizer"]):
            return f"its tokenizer is {own}, that of the rollout server {asked.tokenizer}: ids mean other texts there"
        if asked.temperature != (own_t := self.config.rollout.temperature):
            return f"rollout.temperature is {own_t:g} here, and scores at {asked.temperature:g} are asked for"
        whole = asked.lengths.size and asked.firsts.size == asked.lengths.size and asked.lengths.min() > 0
        if not whole or int(asked.lengths.sum(dtype=np.int64)) != asked.token_ids.size or not 0 <= asked.top <= 1024:
            return (
                f"a request of {asked.lengths.size} sequences with {asked.token_ids.size} tokens is not whole [corrupt]"
            )
        return None
