"""The rollout server's shell: its socket, its clock, and the tasks that carry out what `leases` decides."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncDealer, ChannelError, Message, Pulse, WireError, load_keys
from rollout_server.engines.base import Engine, EngineError
from rollout_server.follower import WeightFollower
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.leases import EvaluationKey, HeldLeases, evaluation_key, request_id
from rollout_server.progress import LeaseKey, lease_key
from slipstream.runtime.hang import expired
from slipstream.runtime.lifeline import Cores
from slipstream.runtime.trace import ClockProbe, Part, Recorder, now_ns, to_ns
from slipstream.runtime.vitals.watch import Vitals
from weight_bus import Subscriber

log = logging.getLogger(__name__)

SETTLE_S = 0.1
"""An answer that ends is in no report for a moment: the engine has forgotten it, and the generator has not got it."""


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
        hello = m.Hello(
            role="rollout_server", name=name, pid=os.getpid(), host=socket.gethostname(), fingerprint=fingerprint
        )
        self.leases = HeldLeases(config, hello, self)
        self.tasks: asyncio.TaskGroup | None = None
        """Of what is worked on; set before the first message is handled."""
        self._evaluations: dict[EvaluationKey, asyncio.Task[None]] = {}
        self._unpin: list[int] = []
        """Versions whose evaluation has just been closed."""
        self._sending = asyncio.Lock()
        self._busy_s, self._tokens, self._beat_at, self._cores = 0.0, 0, time.monotonic(), Cores()

    async def join(self) -> None:
        """Send Hello, and the wish for leases."""
        self._probe.forget()
        self.leases.join(time.monotonic())
        await self.flush()

    async def flush(self) -> None:
        """Send what is to be said. In order, whoever says it: replay tells by it what was lost."""
        async with self._sending:
            while self.leases.outbox:
                await self.dealer.send(self.leases.outbox.pop(0))

    async def next_message(self) -> Message:
        """The next message of replay. Raises ChannelError when none that can be used came for too long."""
        limit = self.config.network.silent_after_s
        if self.leases.version is None and not self.dealer.run_id:
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
        """React to one message. Raises GoodbyeReceived on Goodbye, ChannelError when replay refuses this server."""
        self.tasks = tasks
        if isinstance(message, m.Teachers) and self.generator.teachers is not None:
            self.generator.teachers.listed(message, self.dealer.run_id)
        self.leases.hear(message, time.monotonic())
        while self._unpin:  # before an evaluation of the same version begins
            await self.engine.unpin(self._unpin.pop())
        await self.flush()

    async def _went_live(self, version: int, incarnation: int) -> None:
        self.recorder.at(version)
        self.leases.went_live(version, incarnation)
        await self.flush()

    async def _went_dark(self, reason: str) -> None:
        self.leases.went_dark(reason, time.monotonic())
        await self.flush()

    async def beat(self) -> None:
        """Heartbeats, lease renewals and resends, once per network.heartbeat_s."""
        while True:
            await asyncio.sleep(self.config.network.heartbeat_s)
            if self.follower.failure is not None:
                raise EngineError(f"the weight follower died: {self.follower.failure}") from self.follower.failure
            gauges = await self._gauges()
            self.leases.beat(time.monotonic(), gauges, self.generator, sampled=self._tokens)
            await self.flush()
            if self.recorder.on and self._probe.ask(time.time()):
                await self.dealer.send(m.StatusRequest(about="clock"))

    async def leave(self, serving: "asyncio.Future[bool]") -> None:
        """Hand unfinished answers back to replay and say Goodbye; replay's own then ends `serving`."""
        self.leases.tell(self.generator)
        await self.flush()
        done, _ = await asyncio.wait([serving], timeout=SETTLE_S)
        if done:
            return  # the run has ended as well, as by Ctrl-C
        leases, (answers, tokens) = len(self.leases.working), self.leases.hand_back(self.generator)
        what = "%s leaves by signal: %d answers with %d tokens of %d leases are handed back to replay"
        log.info(what, self.name, answers, tokens, leases)
        await self.flush()
        await asyncio.wait([serving])

    def pulse(self) -> Pulse:
        """Stands in for `beat` while the loop is held up, for as long as a lease lives; to be closed."""
        network, now = self.config.network, time.monotonic

        def alive() -> m.Heartbeat | None:
            is_held_up = 2 * network.heartbeat_s < now() - self._beat_at < self.config.replay.lease_s
            return self.leases.alive(now(), {}) if is_held_up else None

        keys = load_keys(network.keys)
        return Pulse(self.dealer.address, self.dealer.route, alive, network.heartbeat_s, keys=keys)

    async def _gauges(self) -> dict[str, float]:
        health = await self.engine.health()
        now = time.monotonic()
        elapsed = max(1e-6, now - self._beat_at)
        busy, tokens = health.busy_s - self._busy_s, health.generated_tokens - self._tokens
        self._busy_s, self._tokens, self._beat_at = health.busy_s, health.generated_tokens, now
        if self.leases.version is not None:
            teachers = self.generator.teachers
            scores = None if teachers is None else next((one for one, n in teachers.waiting.items() if n), None)
            idle = "waiting for leases" if scores is None else f"waiting for scores of teacher {scores!r}"
            serving = "generating" if health.running else idle
            self.leases.now_at("evaluating" if self.leases.evaluating else serving, now)
        gauges = {
            "idle_ratio": min(1.0, max(0.0, 1.0 - busy / elapsed)),
            "tokens_per_s": tokens / elapsed,
            "running": float(health.running),
            "waiting": float(health.waiting),
            "memory_gb": health.memory_bytes / 1e9,
            "cores": self._cores.take(),
            **self.generator.gauges(),
            **health.detail,
            **self.follower.gauges,
        }
        if self.vitals is None:
            return gauges
        self.vitals.show({f"rollout_server/{name}": value for name, value in gauges.items()})
        return gauges | self.vitals.gauges()

    # ---- Jobs ----

    def follow(self, address: str) -> None:
        self.follower.follow(address, self.dealer.run_id)

    def begin(self, lease: m.Lease) -> None:
        self._start(self._work(lease))

    def abort(self, key: LeaseKey) -> None:
        self.generator.abort(request_id(key))

    def evaluate(self, lease: m.EvaluationLease) -> None:
        which = evaluation_key(lease)
        self.engine.hold(lease.version)
        self._evaluations[which] = self._start(self._evaluate(lease, instead_of=self._evaluations.get(which)))

    def stop(self, part: EvaluationKey) -> None:
        self._evaluations.pop(part).cancel()

    def let_go(self, version: int) -> None:
        self._unpin.append(version)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self.tasks is not None
        return self.tasks.create_task(work)

    async def _work(self, lease: m.Lease) -> None:
        key, began, outcome = lease_key(lease), now_ns(), "failed"
        parts: list[Part] = []
        try:
            group = await self._group(lease, request_id(key))
        except LeaseFailed as failed:
            self.leases.give_up(key, failed.reason, failed.detail)
        else:
            outcome, done = f"{group.lengths.sum()} tokens", now_ns()
            sampled = min(done, began + to_ns(group.generate_s))
            parts = [("sample", began, sampled), ("score", sampled, done)]
            self.leases.finish(group)
        finally:
            name, args = f"group {lease.pass_}/{lease.index}", {"attempt": lease.attempt, "outcome": outcome}
            self.recorder.add("groups", name, began, now_ns(), at_once=True, parts=parts, **args)
        await self.flush()

    async def _group(self, lease: m.Lease, name: str) -> m.Group:
        """Generate the lease's group. A refused request fails the lease while the engine lives."""
        try:
            return await self.generator.group(lease, name)
        except EngineError as error:
            await self.engine.health()  # raises when the engine itself is dead
            raise LeaseFailed("engine_error", str(error)) from error

    async def _evaluate(self, lease: m.EvaluationLease, *, instead_of: asyncio.Task[None] | None) -> None:
        name = f"version {lease.version}, {len(lease.prompts)} prompts"
        if instead_of is not None:  # its requests have the same names
            instead_of.cancel()
            await asyncio.wait([instead_of])
        try:
            with self.recorder.span("evaluations", name, at_once=True):
                result = await self.generator.evaluation(lease)
        except (LeaseFailed, EngineError) as error:
            self.leases.failed_part(lease, error)
        else:
            self.leases.evaluated_part(result)
        self._evaluations.pop(evaluation_key(lease), None)
        await self.flush()
