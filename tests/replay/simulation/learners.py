"""Simulated learners: ranks that ask for batches, make weights of them, keep checkpoints, and are killed anywhere."""

import random
import zlib
from dataclasses import dataclass, field

from configs import Config
from replay import messages as m
from tests.replay.simulation.books import Books, checksum, expect
from tests.replay.simulation.network import Network
from tests.replay.simulation.servers import Policy


@dataclass(slots=True)
class Checkpoints:
    """On the disk: digest of each complete checkpoint, by version."""

    keep: int
    complete: dict[int, str] = field(default_factory=dict)

    def save(self, version: int, digest: str) -> list[int]:
        """Complete one; the versions that are kept."""
        self.complete[version] = digest
        while len(self.complete) > self.keep:
            del self.complete[min(self.complete)]
        return sorted(self.complete)


@dataclass(slots=True)
class Rank:
    identity: str
    welcome: m.Welcome | None = None
    batch: m.Batch | None = None
    proceed: bool = False


class SimulatedLearner:
    """One incarnation, all ranks of it. A state machine that `act` moves on and `hear` feeds."""

    def __init__(
        self,
        name: str,
        network: Network,
        books: Books,
        checkpoints: Checkpoints,
        rng: random.Random,
        config: Config,
        *,
        version: int,
        salted_at: int | None,
        rolls_back: bool,
        lowers_lag: float,
    ) -> None:
        """Start at a kept checkpoint, or at version 0; at step `salted_at` its weights become others than before.

        A step lowers the lag with probability `lowers_lag`.
        """
        self.name, self.network, self.books, self.checkpoints, self.rng = name, network, books, checkpoints, rng
        self.salted_at, self.evaluate_every = salted_at, config.evaluation.every_steps
        self.checkpoint_every = config.checkpoint.every_steps
        self.rolls_back, self.lowers_lag, self.async_lag = rolls_back, lowers_lag, config.replay.async_lag
        self.version, self.dead = version, False
        self.digest = checkpoints.complete.get(version, "start")
        if salted_at == version:
            self.digest = f"{self.digest}+{name}"
        self.started_with = (version, self.digest)
        self.ranks = [Rank(f"learner-{rank}.{name}") for rank in range(books.num_ranks)]
        self.incarnation = 0
        self.published: Policy | None = None
        self.withheld = False
        self.said: dict[str, m.Message] = {}
        self.todo: list[str] = ["join"]
        """What rank 0 does next, in order."""
        for rank in self.ranks:
            network.connect(rank.identity)

    @property
    def identities(self) -> list[str]:
        return [rank.identity for rank in self.ranks]

    def hear(self, identity: str, message: m.Message) -> None:
        number = self.identities.index(identity)
        rank = self.ranks[number]
        match message:
            case m.Welcome():
                rank.welcome = rank.welcome or message
            case m.Sent() if rank.batch is None and message.step == self.version + 1:
                self._hello(number)
            case m.Refused(code="hello"):
                self._hello(number)
                if number == 0:
                    for said in list(self.said.values()):
                        self._send(0, said)
            case m.Refused():
                self.dead = True
            case m.Batch() if message.step == self.version + 1 and rank.batch is None:
                self.books.part(message)
                rank.batch = message
                self._take(number)
            case m.Proceed() if rank.batch is not None and message.step == rank.batch.step:
                missing = [other.identity for other in self.ranks if other.batch is None]
                expect(not missing, f"rank {number} proceeds with step {message.step}, {missing} have no part")
                rank.proceed = True
            case m.EvaluationResult() if number == 0:
                self.books.evaluated(message)
            case m.EvaluationClosed():
                self.said.pop(f"evaluate {message.version}", None)
            case m.Cursor() if self.todo[:1] == ["cursor"] and message.step == self.version:
                expect(message.state["version"] == self.version, "the cursor is of another version")
                self.todo[0] = "save"

    def listens(self, identity: str) -> bool:
        """Whether this rank reads what comes; one that waits for its fellows in a collective does not."""
        return not self.ranks[self.identities.index(identity)].proceed

    def act(self) -> None:
        """One move; what has not been answered is asked again."""
        if not self.todo:
            self._train()
            return
        match self.todo[0]:
            case "join":
                self._join()
            case "commit":
                self._say("committed", m.Committed(step=self.version, digest=self.digest))
                self.todo.pop(0)
            case "publish":
                self._publish()
                self.todo.pop(0)
            case "lower":
                self._say("lower", m.LowerLag(step=self.version, async_lag=self.async_lag))
                self.todo.pop(0)
            case "cursor":
                self._send(0, m.CursorRequest(step=self.version))
            case "save":
                kept = self.checkpoints.save(self.version, self.digest)
                self._say("checkpointed", m.Checkpointed(step=self.version, kept=kept))
                self.todo.pop(0)

    def kill(self) -> None:
        self.dead = True
        for identity in self.identities:
            self.network.close(identity)

    def _join(self) -> None:
        for number in self.rng.sample(range(len(self.ranks)), len(self.ranks)):
            if self.ranks[number].welcome is None:
                self._hello(number)
        first = self.ranks[0].welcome
        if first is not None and all(rank.welcome is not None for rank in self.ranks):
            self.incarnation = first.incarnation
            self.withheld = first.resumes_until > self.version
            self.todo = ["publish"]

    def _hello(self, number: int) -> None:
        version, digest = self.started_with
        bus_address = f"bus-{self.name}" if number == 0 else None
        place = {"rank": number, "world_size": len(self.ranks), "incarnation": self.incarnation}
        hello = m.Hello(
            role="learner", name=f"learner-{number}", pid=1, host="h",
            digest=digest, version=version, bus_address=bus_address, rolls_back=self.rolls_back, **place,
        )  # fmt: skip
        self._send(number, hello)

    def _publish(self) -> None:
        if self.evaluate_every and self.version % self.evaluate_every == 0:
            self._say(f"evaluate {self.version}", m.Evaluate(version=self.version))
        if self.withheld:
            return
        self._say("published", m.Published(version=self.version, digest=self.digest))
        self.published = Policy(self.incarnation, self.version, self.digest, f"bus-{self.name}")

    def _train(self) -> None:
        if not all(rank.proceed for rank in self.ranks):
            for number in [number for number, rank in enumerate(self.ranks) if not rank.proceed]:
                self._take(number)
            return
        parts = [rank.batch for rank in self.ranks if rank.batch is not None]
        self.books.batch(parts)
        first = parts[0]
        self.digest = self._next_digest(parts)
        self.version = first.step
        self.withheld = not first.publish and self.digest == first.expected_digest
        self.books.commits(first.step, self.digest, first.group_ids)
        for rank in self.ranks:
            rank.batch, rank.proceed = None, False
        self.todo = ["commit", "publish"]
        if self.async_lag and self.rng.random() < self.lowers_lag:
            self.async_lag = self.rng.randrange(self.async_lag)
            self.todo.append("lower")
        if first.checkpoint or (self.checkpoint_every and first.step % self.checkpoint_every == 0):
            self.todo.append("cursor")

    def _next_digest(self, parts: list[m.Batch]) -> str:
        value = zlib.crc32(self.digest.encode())
        for part in parts:
            value = zlib.crc32(checksum(part).to_bytes(4, "little"), value)
        salt = f"+{self.name}" if self.salted_at == parts[0].step else ""
        return f"{value:08x}{salt}"

    def _take(self, number: int) -> None:
        if number == 0 and "committed" in self.said:
            self._say("committed", self.said["committed"])
        have = self.ranks[number].batch is not None
        self._send(number, m.Take(step=self.version + 1, rank=number, have=have))

    def _say(self, what: str, message: m.Message) -> None:
        self.said[what] = message
        self._send(0, message)

    def _send(self, number: int, message: m.Message) -> None:
        self.network.send(self.identities[number], message)
