"""The rollout server's state and what it does with each message of replay."""

import asyncio
import logging
import os
import socket
import time
from functools import partial

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncDealer, ChannelError, Message, WireError
from replay.hang import expired
from replay.lifeline import Cores
from replay.trace import ClockProbe, Recorder
from replay.vitals.watch import Vitals
from rollout_server.engines.base import Engine, EngineError
from rollout_server.follower import WeightFollower
from rollout_server.generate import Generator
from rollout_server.leases import Leases
from weight_bus import Subscriber

log = logging.getLogger(__name__)

WELCOME_BEATS = 2.0
"""Heartbeats after which Hello is repeated without a Welcome that names the bus's address."""


class RunEnded(Exception):
    """Replay said Goodbye. `failed` tells how the run ended."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


class RolloutServer:
    """One engine and its leases."""

    def __init__(
        self,
        config: Config,
        generator: Generator,
        dealer: AsyncDealer,
        *,
        name: str,
        fingerprint: dict[str, str],
        subscriber: type[Subscriber] = Subscriber,
        vitals: Vitals | None = None,
    ) -> None:
        self.config = config
        self.vitals = vitals
        self.generator = generator
        self.engine: Engine = generator.engine
        self.dealer = dealer
        self.name = name
        self.fingerprint = fingerprint
        lag = config.replay.async_lag
        self.recorder = Recorder(config.run_dir, name, "rollout_server", config.tracking.versions(behind=1 + lag))
        self.recorder.at(-1)
        self._probe = ClockProbe()
        self.follower = WeightFollower(
            config,
            self.engine,
            name,
            on_live=self._went_live,
            on_quarantine=self._went_dark,
            subscriber=subscriber,
            recorder=self.recorder,
        )
        self.version: int | None = None
        """Version that is live and proven; None while no lease may be asked for."""
        self.incarnation = 0
        """Of the learner that made it."""
        self._hello_at: float | None = None
        """When Hello was sent last; None once a Welcome with the bus's address has come."""
        self.leases = Leases(config, generator, dealer, self.recorder)
        now = time.monotonic()
        self.activity, self.activity_since = "joining", now
        self._busy_s, self._tokens, self._beat_at, self._cores = 0.0, 0, now, Cores()

    @property
    def capacity(self) -> int:
        """Leases to hold."""
        return self.config.lease_capacity

    async def join(self) -> None:
        """Send Hello, and what replay may have lost."""
        self.leases.begin_again()
        self._probe.forget()
        self._hello_at = time.monotonic()
        await self.dealer.send(
            m.Hello(
                role="rollout_server",
                name=self.name,
                pid=os.getpid(),
                host=socket.gethostname(),
                fingerprint=self.fingerprint,
            )
        )
        await self._ask(self.version, self.capacity)
        await self.leases.send_again()

    async def next_message(self) -> Message:
        """The next message of replay. Raises ChannelError when none that can be used came for too long."""
        limit = self.config.network.silent_after_s
        if self.version is None and not self.dealer.run_id:
            limit = self.config.rollout.wait_for_servers_s  # replay may not be up yet
        until, came = time.monotonic() + limit, "nothing came"
        while True:
            try:
                envelope = await self.dealer.receive(max(0.0, until - time.monotonic()))
            except WireError as error:
                # It is no sign of this run's replay: the next run's may be at its address, and answers all with these.
                log.warning("a message of replay is refused: %s [corrupt]", error)
                envelope, came = None, f"what came was refused, the last: {error}"
            if envelope is None:
                if time.monotonic() < until:
                    continue
                key = "network.silent_after_s" if self.dealer.run_id else "rollout.wait_for_servers_s"
                what = partial(expired, "a message of replay", owed_by=("replay",), waited_s=limit, key=key)
                waited = f"{self.name!r} waited {limit:g} s for replay at {self.dealer.address} ({key})"
                raise ChannelError(f"{waited}: {came}{await asyncio.to_thread(what)}", "silent")
            if not isinstance(envelope.message, m.Status):
                return envelope.message
            until, came = time.monotonic() + limit, "nothing came"
            if self._probe.answer(float(envelope.message.state.get("unix_s", 0.0)), time.time()):
                self.recorder.clock(self._probe.ahead_s, self._probe.error_s)

    async def handle(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """React to one message. Raises RunEnded on Goodbye, ChannelError when replay refuses this server."""
        match message:
            case m.Welcome():
                if message.bus_address is not None:
                    self._hello_at = None
                    self.follower.follow(message.bus_address, self.dealer.run_id)
                else:
                    self._now("waiting for the learner")
            case m.Lease():
                self.leases.take(message, tasks)
            case m.Cancel():
                self.leases.cancel(message)
            case m.Ack():
                self.leases.acked(message)
            case m.EvaluationLease():
                self.leases.evaluate(message, tasks)
            case m.EvaluationClosed():
                await self.leases.close_evaluation(message.version)
            case m.Refused() if message.reason.startswith("say Hello"):
                await self.join()
            case m.Refused():
                raise ChannelError(f"replay refused {self.name!r}: {message.reason}", "closed")
            case m.Goodbye():
                raise RunEnded(message.reason, message.failed)

    async def _ask(self, version: int | None, capacity: int) -> None:
        """Ask for so many leases, if there is a version to start them with."""
        if version is not None:
            await self.dealer.send(m.LeaseRequest(capacity=capacity, version=version, incarnation=self.incarnation))

    async def _went_live(self, version: int, incarnation: int) -> None:
        self.version, self.incarnation = version, incarnation
        self.recorder.at(version)
        self.leases.served.append((incarnation, version))
        await self._ask(version, self.capacity)

    async def _went_dark(self, reason: str) -> None:
        """A quarantined engine takes no lease until a refill has been proven."""
        held, self.version = self.version, None
        self._now(f"quarantined: {reason}")
        await self._ask(held, 0)

    async def beat(self) -> None:
        """Heartbeats, lease renewals and resends, once per network.heartbeat_s."""
        while True:
            await asyncio.sleep(self.config.network.heartbeat_s)
            if self.follower.failure is not None:
                raise EngineError(f"the weight follower died: {self.follower.failure}") from self.follower.failure
            gauges = await self._gauges()
            now = time.monotonic()
            await self.dealer.send(
                m.Heartbeat(activity=self.activity, since_s=now - self.activity_since, gauges=gauges)
            )
            # The current state again: any message may be lost with a process or a connection.
            if self._hello_at is not None and now - self._hello_at > WELCOME_BEATS * self.config.network.heartbeat_s:
                await self.join()
            else:
                await self._ask(self.version, self.capacity)
            await self.leases.renew(now, sampled=self._tokens)
            if self.recorder.on and self._probe.ask(time.time()):
                await self.dealer.send(m.StatusRequest())

    async def _gauges(self) -> dict[str, float]:
        health = await self.engine.health()
        now = time.monotonic()
        elapsed = max(1e-6, now - self._beat_at)
        busy, tokens = health.busy_s - self._busy_s, health.generated_tokens - self._tokens
        self._busy_s, self._tokens, self._beat_at = health.busy_s, health.generated_tokens, now
        if self.version is not None:
            serving = "generating" if health.running else "waiting for leases"
            self._now("evaluating" if self.leases.evaluating else serving)
        gauges = {
            "idle_ratio": min(1.0, max(0.0, 1.0 - busy / elapsed)),
            "tokens_per_s": tokens / elapsed,
            "running": float(health.running),
            "waiting": float(health.waiting),
            "memory_gb": health.memory_bytes / 1e9,
            "cores": self._cores.take(),
            **health.detail,
            **self.follower.gauges,
        }
        if self.vitals is None:
            return gauges
        self.vitals.show({f"rollout_server/{name}": value for name, value in gauges.items()})
        return gauges | self.vitals.gauges()

    def _now(self, activity: str) -> None:
        if activity != self.activity:
            self.activity, self.activity_since = activity, time.monotonic()
