"""Simulated rollout servers: they lease, generate token by token, resend what is not acked, and outlive replay."""

import random
from dataclasses import dataclass, field, replace

import numpy as np

from configs import Config
from replay import messages as m
from tests.replay.simulation.books import Books
from tests.replay.simulation.network import Network
from tests.replay.simulation.samples import make_group, make_result

Key = tuple[int, int, int]
FLAT = 0.2
"""Share of groups without a difference in reward."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights on the bus."""

    incarnation: int
    version: int
    digest: str
    address: str
    """Of the bus that brings them."""


@dataclass(slots=True)
class Running:
    """A lease that is worked on."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(version, policy) of each token so far, the same for all its answers."""
    sampled: set[tuple[int, int]] = field(default_factory=set)
    """(incarnation, version) of its policies."""
    told: int = 0
    """Tokens of each answer that replay has been told (replay.partial_rollouts)."""


class SimulatedServer:
    def __init__(self, identity: str, network: Network, books: Books, rng: random.Random, config: Config) -> None:
        self.identity, self.network, self.books, self.rng = identity, network, books, rng
        self.n, self.partial_rollouts = config.rollout.group_size, config.replay.partial_rollouts
        self.address: str | None = None
        """Of the bus that it follows."""
        self.incarnation = 0
        self.policy: Policy | None = None
        self.held: dict[int, Policy] = {}
        """Policies by version, for evaluations."""
        self.running: dict[Key, Running] = {}
        self.unacked: dict[Key, m.Group] = {}
        self.evaluations: list[m.EvaluationLease] = []
        self.evaluated: dict[tuple[int, bool], m.EvaluationResult] = {}
        network.connect(identity)
        self.join()

    def join(self) -> None:
        self._say(m.Hello(role="rollout_server", name=self.identity, pid=1, host="h"))
        self._ask()
        for running in self.running.values():
            running.told = 0
        for message in [*self.unacked.values(), *self.evaluated.values()]:
            self._say(message)

    def hear(self, message: m.Message) -> None:
        match message:
            case m.Welcome():
                if message.bus_address is not None:
                    self.address, self.incarnation = message.bus_address, message.incarnation
            case m.Lease():
                self.books.lease(message)
                self.running[message.pass_, message.index, message.attempt] = self._begun(message)
            case m.Cancel():
                key = (message.pass_, message.index, message.attempt)
                if self.running.pop(key, None) is not None:
                    self._give_up(key, "aborted")
            case m.Ack():
                self.books.ack(message)
                self.unacked.pop((message.pass_, message.index, message.attempt), None)
            case m.EvaluationLease():
                self.evaluations.append(message)
            case m.EvaluationClosed():
                self.evaluated = {k: result for k, result in self.evaluated.items() if k[0] != message.version}
            case m.Refused():
                if message.reason.startswith("say Hello"):
                    self.join()

    def act(self, published: Policy | None, *, brisk: bool = False) -> None:
        """Do one thing, chosen at random; `brisk` works through whatever there is."""
        move = self.rng.random()
        if published is not None and self._may_take(published) and (brisk or move < 0.3):
            self._go_live(published)
        self._generate()
        if self.running and (brisk or move > 0.4):
            self._finish(self.rng.choice(list(self.running)))
        if brisk or move < 0.5:
            self.beat()
        if self.evaluations and (brisk or move > 0.7):
            self._evaluate(self.evaluations.pop(0))

    def beat(self) -> None:
        """Heartbeat, renewals and resends; the standing wish for leases may have been lost as well."""
        self._say(m.Heartbeat())
        self._ask()
        if self.running:
            self._say(self._renewal())
        for group in self.unacked.values():
            self._say(group)

    def _begun(self, lease: m.Lease) -> Running:
        """Go on from what another server has told of this prompt, where that is whole."""
        if len(set(lease.prefix_lengths.tolist())) != 1:
            return Running()
        length = int(lease.prefix_lengths[0])
        self.books.counts["prefixes"] += 1
        versions, policies = lease.prefix_versions[:length].tolist(), lease.prefix_token_ids[:length].tolist()
        incarnation = self.policy.incarnation if self.policy is not None else 0
        sampled = {(incarnation, version) for version in versions}
        return Running(list(zip(versions, policies, strict=True)), sampled, length)

    def _renewal(self) -> m.Renew:
        leases = [[*key, len(running.tokens)] for key, running in self.running.items()]
        if not self.partial_rollouts:
            return m.Renew(leases=leases)
        progress: list[list[int]] = []
        tokens: list[tuple[int, int]] = []
        for position, running in enumerate(self.running.values()):
            new = running.tokens[running.told :]
            progress += [[position, answer, running.told, len(new), 0] for answer in range(self.n if new else 0)]
            tokens += new * self.n
            running.told += len(new)
        versions, policies = np.array(tokens, dtype=np.int32).reshape(-1, 2).T.copy()
        logprobs = np.full(len(tokens), -1.0, dtype=np.float32)
        return m.Renew(leases=leases, progress=progress, token_ids=policies, logprobs=logprobs, versions=versions)

    def fail_a_lease(self, reason: str) -> None:
        if self.running:
            key = self.rng.choice(list(self.running))
            del self.running[key]
            self._give_up(key, reason)

    def _may_take(self, published: Policy) -> bool:
        return published.address == self.address and published != self.policy

    def _go_live(self, policy: Policy) -> None:
        """Another incarnation's policy takes the place of all from its version on, and of what was evaluated."""
        if self.policy is not None and self.policy.incarnation != policy.incarnation:
            self.held = {v: p for v, p in self.held.items() if v < policy.version}
            self.evaluated = {k: result for k, result in self.evaluated.items() if k[0] < policy.version}
        self.policy, self.held[policy.version] = policy, policy
        self._ask()

    def _generate(self) -> None:
        """Every running answer gets another token of the present policy."""
        if self.policy is None:
            return
        for running in self.running.values():
            if len(running.tokens) < 6:
                running.tokens.append((self.policy.version, self.books.policy(self.policy.digest)))
                running.sampled.add((self.policy.incarnation, self.policy.version))

    def _finish(self, key: Key) -> None:
        if not self.running[key].tokens:
            return
        running = self.running.pop(key)
        flat, length = self.rng.random() < FLAT, len(running.tokens)
        # after a divergence a version may be lower than the one before; such a group is refused, and not sent
        ordered = sorted(running.tokens, key=lambda token: token[0])
        versions, policies = np.array(ordered * self.n, dtype=np.int32).T.copy()
        self.unacked[key] = make_group(
            [length] * self.n,
            pass_=key[0],
            index=key[1],
            attempt=key[2],
            prompt_ids=np.array([1], dtype=np.int32),
            token_ids=policies,
            logprobs=np.full(self.n * length, -self.rng.random(), dtype=np.float32),
            versions=versions,
            rewards=np.array([0.0 if flat else 1.0] + [0.0] * (self.n - 1), dtype=np.float32),
            policies=[list(policy) for policy in sorted(running.sampled)],
        )
        self._say(self.unacked[key])

    def _evaluate(self, lease: m.EvaluationLease) -> None:
        policy = self.held.get(lease.version)
        if policy is None:
            self._say(m.EvaluationFailed(version=lease.version, greedy=lease.greedy, reason="not held"))
            return
        reward = self.books.policy(policy.digest)
        result = make_result(lease.version, greedy=lease.greedy, n=len(lease.prompts), reward=reward)
        result = replace(result, asked=lease.asked)
        self.evaluated[lease.version, lease.greedy] = result
        self._say(result)

    def _ask(self) -> None:
        if self.policy is not None:
            policy = self.policy
            self._say(m.LeaseRequest(capacity=3, version=policy.version, incarnation=policy.incarnation))

    def _give_up(self, key: Key, reason: str) -> None:
        self._say(m.Cancel(pass_=key[0], index=key[1], attempt=key[2], reason=reason))

    def _say(self, message: m.Message) -> None:
        self.network.send(self.identity, message)
