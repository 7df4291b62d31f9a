"""The rollout server's state and what it does with each message of replay."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncDealer, ChannelError, Message, WireError
from rollout_server.engines.base import Engine, EngineError
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.progress import LeaseKey, ProgressReports
from rollout_server.weights import WeightFollower
from weight_bus import Subscriber

log = logging.getLogger(__name__)

WELCOME_BEATS = 2.0
"""Heartbeats after which a Hello that got no Welcome, or none with the bus's address, is said again."""
RESEND_S = 5.0
"""A group that was not acked for this long is sent again; replay deduplicates."""


class RunEnded(Exception):
    """Replay said Goodbye. `failed` tells how the run ended."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


def policies_of(versions: m.Int32, served: Sequence[tuple[int, int]]) -> list[list[int]]:
    """[incarnation, version] of each policy that may have sampled one of these tokens.

    Args:
        versions: of the tokens.
        served: policies that were live from the lease on, in order; what a prefix brings is of the first one's line.
    """
    found = set(np.unique(versions).tolist())
    known = [policy for policy in served if policy[1] in found]
    incarnation = served[0][0] if served else 0
    known += [(incarnation, version) for version in found - {version for _, version in known}]
    return [list(policy) for policy in sorted(set(known))]


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
    ) -> None:
        self.config = config
        self.generator = generator
        self.engine: Engine = generator.engine
        self.dealer = dealer
        self.name = name
        self.fingerprint = fingerprint
        self.follower = WeightFollower(
            config,
            self.engine,
            name,
            on_live=self._went_live,
            on_quarantine=self._went_dark,
            subscriber=subscriber,
        )
        self.version: int | None = None
        """Version that is live and proven; None while no lease may be asked for."""
        self.incarnation = 0
        """Of the learner that made it."""
        self.served: list[tuple[int, int]] = []
        """(incarnation, version) of every policy that went live here, in order."""
        self._hello_at, self._waits_for_welcome = 0.0, False
        """When Hello was said last, and whether no Welcome with the bus's address has come since."""
        self.evaluated: dict[tuple[int, bool], m.EvaluationResult] = {}
        """Results of evaluations that are not closed yet, by version and mode; a restarted replay gets them again."""
        self.working: dict[LeaseKey, asyncio.Task[None]] = {}
        self.unacked: dict[LeaseKey, tuple[m.Group, float]] = {}
        self.evaluating: dict[tuple[int, bool], asyncio.Task[None]] = {}
        self.reports = ProgressReports(config.rollout.group_size, partial_rollouts=config.replay.partial_rollouts)
        self.started = time.monotonic()
        self.activity, self.activity_since = "joining", self.started
        self._busy_s, self._tokens, self._beat_at = 0.0, 0, self.started

    @property
    def capacity(self) -> int:
        """Leases to hold: what the engine decodes at once and a quarter more, so that it never runs dry."""
        return max(1, -(-5 * self.config.rollout.max_running // (4 * self.config.rollout.group_size)))

    async def join(self) -> None:
        """Say Hello (again)."""
        self.reports.begin_again()
        self._hello_at, self._waits_for_welcome = time.monotonic(), True
        await self.dealer.send(
            m.Hello(
                role="rollout_server",
                name=self.name,
                pid=os.getpid(),
                host=socket.gethostname(),
                fingerprint=self.fingerprint,
            )
        )
        if self.version is not None:
            await self._ask()
        for key, (group, _) in list(self.unacked.items()):
            self.unacked[key] = (group, time.monotonic())
            await self.dealer.send(group)
        for result in list(self.evaluated.values()):
            await self.dealer.send(result)

    async def next_message(self) -> Message:
        """The next message of replay. Raises ChannelError when replay is silent for too long."""
        limit = self.config.network.silent_after_s
        if self.version is None and not self.dealer.run_id:
            limit = self.config.rollout.wait_for_servers_s  # replay may not be up yet
        while True:
            try:
                envelope = await self.dealer.receive(limit)
                break
            except WireError as error:
                log.warning("a message of replay is refused: %s [corrupt]", error)
        if envelope is None:
            raise ChannelError(
                f"{self.name!r} waited {limit:g} s for replay at {self.dealer.address}: nothing came", "silent"
            )
        return envelope.message

    # ---- messages --------------------------------------------------------------------------------------

    async def handle(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """React to one message. Raises RunEnded on Goodbye, ChannelError when replay refuses this server."""
        match message:
            case m.Welcome():
                if message.bus_address is not None:
                    self._waits_for_welcome = False
                    self.follower.follow(message.bus_address, self.dealer.run_id)
                else:
                    self._now("waiting for the learner")
            case m.Lease():
                key = (message.pass_, message.index, message.attempt)
                if key not in self.working and key not in self.unacked:  # else it was said twice
                    self.reports.leased(message)
                    self.working[key] = tasks.create_task(self._work(message, key))
            case m.Cancel():
                self._cancel((message.pass_, message.index, message.attempt))
            case m.Ack():
                self._acked(message)
            case m.EvaluationLease():
                which = (message.version, message.greedy)
                if which not in self.evaluating:
                    self.evaluating[which] = tasks.create_task(self._evaluate(message))
                    self.evaluating[which].add_done_callback(lambda _: self.evaluating.pop(which, None))
            case m.EvaluationClosed():
                self.evaluated = {key: result for key, result in self.evaluated.items() if key[0] != message.version}
                await self.engine.unpin(message.version)
            case m.Refused():
                await self._refused(message)
            case m.Goodbye():
                raise RunEnded(message.reason, message.failed)

    async def _refused(self, message: m.Refused) -> None:
        if not message.reason.startswith("say Hello"):
            raise ChannelError(f"replay refused {self.name!r}: {message.reason}", "closed")
        await self.join()

    def _cancel(self, key: LeaseKey) -> None:
        if key in self.working:
            self.generator.abort(_request_id(key))

    def _acked(self, ack: m.Ack) -> None:
        self.unacked.pop((ack.pass_, ack.index, ack.attempt), None)
        if ack.status == "rejected":
            log.error("group (%d, %d) was rejected: %s", ack.pass_, ack.index, ack.reason)

    # ---- work ------------------------------------------------------------------------------------------

    async def _work(self, lease: m.Lease, key: LeaseKey) -> None:
        first = max(0, len(self.served) - 1)
        try:
            group = await self._group(lease, key)
            group = replace(group, policies=policies_of(group.versions, self.served[first:]))
        except LeaseFailed as failed:
            await self.dealer.send(
                m.Cancel(
                    pass_=lease.pass_,
                    index=lease.index,
                    attempt=lease.attempt,
                    reason=failed.reason,
                    detail=failed.detail,
                )
            )
        else:
            self.unacked[key] = (group, time.monotonic())
            await self.dealer.send(group)
        finally:
            self.working.pop(key, None)

    async def _group(self, lease: m.Lease, key: LeaseKey) -> m.Group:
        """The lease's group. A request that the engine refuses is the lease's failure while the engine lives."""
        try:
            return await self.generator.group(lease, _request_id(key))
        except EngineError as error:
            await self.engine.health()  # raises when the engine itself is dead
            raise LeaseFailed("engine_error", str(error)) from error

    async def _evaluate(self, lease: m.EvaluationLease) -> None:
        try:
            result = await self.generator.evaluation(lease)
        except (LeaseFailed, EngineError) as error:
            log.error("evaluation of version %d failed: %s", lease.version, error)
            failed = m.EvaluationFailed(version=lease.version, greedy=lease.greedy, reason=str(error))
            await self.dealer.send(failed)
            return
        self.evaluated[lease.version, lease.greedy] = result
        await self.dealer.send(result)

    async def _ask(self) -> None:
        if self.version is not None:
            await self.dealer.send(self._request(self.capacity, self.version))

    def _request(self, capacity: int, version: int) -> m.LeaseRequest:
        return m.LeaseRequest(capacity=capacity, version=version, incarnation=self.incarnation)

    async def _went_live(self, version: int, incarnation: int) -> None:
        self.version, self.incarnation = version, incarnation
        self.served.append((incarnation, version))
        await self._ask()

    async def _went_dark(self, reason: str) -> None:
        """A quarantined engine takes no lease until a refill has been proven."""
        held, self.version = self.version, None
        self._now(f"quarantined: {reason}")
        if held is not None:
            await self.dealer.send(self._request(0, held))

    # ---- heartbeat -------------------------------------------------------------------------------------

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
            await self._repeat(now)
            running = self.generator.running_tokens()
            if self.working:
                working = [(key, _request_id(key)) for key in self.working]
                await self.dealer.send(self.reports.renew(working, running, self.generator))
            for key, (group, sent) in list(self.unacked.items()):
                if now - sent > RESEND_S:
                    self.unacked[key] = (group, now)
                    await self.dealer.send(group)

    async def _repeat(self, now: float) -> None:
        """Say again what replay must know: any message may be lost when a process or a connection dies."""
        if self._waits_for_welcome and now - self._hello_at > WELCOME_BEATS * self.config.network.heartbeat_s:
            await self.join()
        else:
            await self._ask()

    async def _gauges(self) -> dict[str, float]:
        health = await self.engine.health()
        now = time.monotonic()
        elapsed = max(1e-6, now - self._beat_at)
        busy, tokens = health.busy_s - self._busy_s, health.generated_tokens - self._tokens
        self._busy_s, self._tokens, self._beat_at = health.busy_s, health.generated_tokens, now
        if self.version is not None:
            if self.evaluating:
                self._now("evaluating")
            else:
                self._now("generating" if health.running else "waiting for leases")
        return {
            "idle_ratio": min(1.0, max(0.0, 1.0 - busy / elapsed)),
            "tokens_per_s": tokens / elapsed,
            "running": float(health.running),
            "waiting": float(health.waiting),
            "memory_gb": health.memory_bytes / 1e9,
            **health.detail,
            **self.follower.gauges,
        }

    def _now(self, activity: str) -> None:
        if activity != self.activity:
            self.activity, self.activity_since = activity, time.monotonic()


def _request_id(key: LeaseKey) -> str:
    return f"{key[0]}/{key[1]}/{key[2]}"
