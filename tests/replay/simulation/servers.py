"""Rollout servers with the real HeldLeases over a simulated engine, which generates token by token."""

import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from configs import Config
from replay import messages as m
from rollout_server.engines.base import EngineError, Partial
from rollout_server.leases import EvaluationKey, HeldLeases, evaluation_key, request_id
from rollout_server.progress import LeaseKey, lease_key, prefixes_of
from tests.replay.simulation.books import Books
from tests.replay.simulation.bus import NOBODY, SimulatedIntake
from tests.replay.simulation.network import Network
from tests.replay.simulation.samples import make_group, make_result
from weight_bus.messages import Heartbeat, Join
from weight_bus.subscription import EngineCallbacks, Subscription

FLAT = 0.2
"""Share of groups without a difference in reward."""
MAX_TOKENS = 6


@dataclass(slots=True)
class Running:
    """The answers of a lease, which are all alike."""

    versions: list[int] = field(default_factory=list)
    policies: list[int] = field(default_factory=list)
    """Of each token: the version that it claims, and the number of its policy, which is the token itself."""


class SimulatedServer:
    """An engine under HeldLeases and a Subscription; it is `Jobs` and `Working` of rollout_server/leases.py."""

    def __init__(
        self,
        identity: str,
        network: Network,
        bus: Network,
        books: Books,
        rng: random.Random,
        config: Config,
        now: float,
        *,
        faults: float,
    ) -> None:
        """`faults`: of each update, on the wire and in the engine."""
        self.identity, self.network, self.bus, self.books, self.rng = identity, network, bus, books, rng
        self.n, self.config, self.faults = config.rollout.group_size, config, faults
        self.subscription: Subscription | None = None
        self.weights = NOBODY
        """In the engine, whatever it is taken for."""
        self.policy: tuple[int, int] | None = None
        """(incarnation, version) that the engine serves; None while it stands still."""
        self.held: dict[int, int] = {}
        """Weights by version, for evaluations."""
        self.running: dict[LeaseKey, Running] = {}
        self.evaluations: list[m.EvaluationLease] = []
        hello = m.Hello(role="rollout_server", name=identity, pid=1, host="h")
        self.leases = HeldLeases(config, hello, self)
        network.connect(identity)
        bus.connect(identity)
        self.leases.join(now)
        self._flush()

    def hear(self, message: m.Message, now: float) -> None:
        if isinstance(message, m.Lease):
            self.books.lease(message)
        if isinstance(message, m.Ack):
            self.books.ack(message)
        self.leases.hear(message, now)
        self._flush()

    def hear_bus(self, message: m.Message, now: float) -> None:
        """Receive, load and prove as the publisher says."""
        if self.subscription is not None:
            self.subscription.watch(now, heard=True, entered=now)
            self.subscription.hear(message)
            self._apply(now)

    def _apply(self, now: float) -> None:
        assert self.subscription is not None
        quarantine = partial(self._quarantine, now)
        self.subscription.apply(EngineCallbacks(self._load, self._activate, quarantine, self._busy), now)
        self._flush()

    def _busy(self) -> tuple[float, str] | None:
        """As an engine whose evaluations keep updates out."""
        self.books.counts["busy"] += bool(self.evaluations)
        return (self.config.evaluation.deadline_s, "evaluates") if self.evaluations else None

    def act(self, now: float, *, brisk: bool = False) -> None:
        """Do one thing, chosen at random; `brisk` works through whatever there is."""
        move = self.rng.random()
        if self.subscription is not None:
            self.subscription.advance(now)
            if self.subscription.admitted:
                self.bus.send(self.identity, Heartbeat(session=self.subscription.session))
            self._apply(now)
        self._generate()
        if self.running and (brisk or move > 0.4):
            self._finish(self.rng.choice(list(self.running)))
        if brisk or move < 0.5:
            self.leases.beat(now, {}, self, sampled=0)
        if self.evaluations and (brisk or move > 0.7):
            self._evaluate(self.evaluations.pop(0))
        self._flush()

    def fail_a_lease(self, reason: str) -> None:
        if self.running:
            self._give_up(self.rng.choice(list(self.running)), reason)
            self._flush()

    def follow(self, address: str) -> None:
        if self.subscription is None:
            join = Join(session="", name=self.identity, instance=self.identity, pid=1, host="h")
            intake = SimulatedIntake(self.rng, self.faults)
            bus = self.config.weight_bus
            self.subscription = Subscription(address, join, bus, intake, lambda what, waited_s: "", 0.0)

    def begin(self, lease: m.Lease) -> None:
        """Go on from what another server has told of this prompt, where that is whole."""
        running = self.running[lease_key(lease)] = Running()
        prefixes = prefixes_of(lease, self.n)
        if prefixes is not None and len({prefix.token_ids.size for prefix in prefixes}) == 1:
            self.books.counts["prefixes"] += 1
            running.versions, running.policies = prefixes[0].versions.tolist(), prefixes[0].token_ids.tolist()

    def abort(self, key: LeaseKey) -> None:
        self._give_up(key, "aborted")

    def evaluate(self, lease: m.EvaluationLease) -> None:
        self.stop(evaluation_key(lease))
        self.evaluations.append(lease)

    def stop(self, part: EvaluationKey) -> None:
        self.evaluations = [lease for lease in self.evaluations if evaluation_key(lease) != part]

    def let_go(self, version: int) -> None:
        pass  # as the weights of earlier versions are kept, what is of a lost one would be noticed

    def running_tokens(self) -> Mapping[str, int]:
        return {request_id(key): len(running.versions) for key, running in self.running.items()}

    def queued(self) -> Container[str]:
        return ()

    def progress(self, name: str, since: Sequence[int]) -> Sequence[Partial]:
        running = next(running for key, running in self.running.items() if request_id(key) == name)
        whole = Partial(
            token_ids=np.array(running.policies, np.int32),
            logprobs=np.full(len(running.versions), -1.0, np.float32),
            versions=np.array(running.versions, np.int32),
        )
        return [whole.since(first) for first in since]

    def _load(self, version: int, _: Any) -> Mapping[str, int]:
        """The engine stands still from here until the version is proven."""
        assert self.subscription is not None
        (loading,) = self.subscription._intake.begun.digests.tolist()  # type: ignore[attr-defined]
        self.policy, self.weights = None, NOBODY if self.rng.random() < self.faults else loading
        return {"w": self.weights}

    def _activate(self, version: int, evaluate: bool) -> None:
        """Another incarnation's policy takes the place of all from its version on."""
        assert self.subscription is not None
        incarnation = self.subscription.incarnation
        if self.leases.incarnation != incarnation:
            self.held = {v: weights for v, weights in self.held.items() if v < version}
        self.policy, self.held[version] = (incarnation, version), self.weights
        self.leases.went_live(version, incarnation)

    def _quarantine(self, now: float, version: int, reason: str) -> None:
        self.leases.went_dark(reason, now)

    def _generate(self) -> None:
        """Every running answer gets another token of the present policy."""
        if self.policy is None:
            return
        for running in self.running.values():
            if len(running.versions) < MAX_TOKENS:
                running.versions.append(self.policy[1])
                running.policies.append(self.weights)

    def _finish(self, key: LeaseKey) -> None:
        if not self.running[key].versions:
            return
        running = self.running.pop(key)
        flat, length = self.rng.random() < FLAT, len(running.versions)
        # after a divergence a version may be lower than the one before; such a group is refused, and not sent
        ordered = sorted(zip(running.versions, running.policies, strict=True), key=lambda token: token[0])
        versions, policies = np.array(ordered * self.n, dtype=np.int32).T.copy()
        group = make_group(
            [length] * self.n,
            pass_=key[0],
            index=key[1],
            attempt=key[2],
            prompt_ids=np.array([1], dtype=np.int32),
            token_ids=policies,
            logprobs=np.full(self.n * length, -self.rng.random(), dtype=np.float32),
            versions=versions,
            rewards=np.array([0.0 if flat else 1.0] + [0.0] * (self.n - 1), dtype=np.float32),
        )
        self.leases.finish(group)

    def _evaluate(self, lease: m.EvaluationLease) -> None:
        weights = self.held.get(lease.version)
        if weights is None:
            self.leases.failed_part(lease, EngineError("not held"))
            return
        result = make_result(lease.version, greedy=lease.greedy, n=len(lease.prompts), reward=weights)
        self.leases.evaluated_part(replace(result, asked=lease.asked))

    def _give_up(self, key: LeaseKey, reason: str) -> None:
        del self.running[key]
        self.leases.give_up(key, reason, "")

    def _flush(self) -> None:
        for message in self.leases.outbox:
            self.network.send(self.identity, message)
        self.leases.outbox.clear()
        for message in self.subscription.outbox if self.subscription is not None else ():
            self.bus.send(self.identity, message)
        if self.subscription is not None:
            self.subscription.outbox.clear()
