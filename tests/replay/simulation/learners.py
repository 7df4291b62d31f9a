"""Learners whose ranks are real Dialogs: they ask for batches, make weights of them, keep checkpoints, are killed."""

import random
import zlib
from dataclasses import dataclass, field

from configs import Config
from learner.dialog import Dialog, RunEnded
from replay import messages as m
from replay.channel import ChannelError
from tests.replay.simulation.books import Books, checksum, expect
from tests.replay.simulation.bus import Policy, SimulatedBus
from tests.replay.simulation.network import Network


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
    dialog: Dialog
    welcome: m.Welcome | None = None
    batch: m.Batch | None = None
    proceed: bool = False


class SimulatedLearner:
    """One incarnation, all ranks of it: `act` moves it on, `hear` feeds it."""

    def __init__(
        self,
        name: str,
        network: Network,
        bus: SimulatedBus,
        books: Books,
        checkpoints: Checkpoints,
        rng: random.Random,
        config: Config,
        now: float,
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
        self.lowers_lag, self.async_lag = lowers_lag, config.replay.async_lag
        self.version, self.dead = version, False
        self.digest = checkpoints.complete.get(version, "start")
        if salted_at == version:
            self.digest = f"{self.digest}+{name}"
        numbers = range(books.num_ranks)
        config = config.model_copy(update={"network": config.network.model_copy(update={"silent_after_s": 1e6})})
        self.ranks = [Rank(f"learner-{number}.{name}", Dialog(config, number, now)) for number in numbers]
        self.bus = bus
        self.withheld = False
        self.todo: list[str] = []
        """What rank 0 does next, in order."""
        for number, rank in enumerate(self.ranks):
            network.connect(rank.identity)
            hello = m.Hello(
                role="learner", name=f"learner-{number}", pid=1, host="h", rank=number, world_size=len(self.ranks),
                digest=self.digest, version=version, bus_address=None if number else "bus",
                rolls_back=rolls_back,
            )  # fmt: skip
            rank.dialog.ask(hello, m.Welcome, "Welcome", now)

    @property
    def identities(self) -> list[str]:
        return [rank.identity for rank in self.ranks]

    @property
    def incarnation(self) -> int:
        return self.ranks[0].dialog.incarnation

    def hear(self, identity: str, message: m.Message, now: float) -> None:
        rank = self.ranks[self.identities.index(identity)]
        try:
            rank.dialog.hear(message, now)
        except (ChannelError, RunEnded):
            self.dead = True
            return
        if isinstance(message, m.EvaluationResult):
            self.books.evaluated(message)
        answer, rank.dialog.answer = rank.dialog.answer, None
        match answer:
            case m.Welcome():
                self._welcomed(rank, answer, now)
            case m.Batch():
                self.books.part(answer)
                rank.batch = answer
                rank.dialog.take(answer.step, now, have=True)
            case m.Proceed():
                missing = [other.identity for other in self.ranks if other.batch is None]
                expect(not missing, f"{identity} proceeds with step {answer.step}, {missing} have no part")
                rank.proceed = True
            case m.Cursor():
                expect(answer.state["version"] == self.version, "the cursor is of another version")
                kept = self.checkpoints.save(self.version, self.digest)
                rank.dialog.announce(m.Checkpointed(step=self.version, kept=kept))
                self._ask_for_batches(now)
        self._flush(rank)

    def listens(self, identity: str) -> bool:
        """Whether this rank reads what comes; one that waits for its fellows in a collective does not."""
        return not self.ranks[self.identities.index(identity)].proceed

    def act(self, now: float) -> None:
        """One move; what has not been answered is asked again."""
        if self.todo:
            self._do(self.todo.pop(0), now)
        elif all(rank.proceed for rank in self.ranks):
            self._train(now)
        for rank in self.rng.sample(self.ranks, len(self.ranks)):
            rank.dialog.advance(now)
            expect(rank.dialog.overdue(now) is None, f"{rank.identity} gives up: {rank.dialog.overdue(now)}")
            self._flush(rank)

    def kill(self) -> None:
        self.dead = True
        for identity in self.identities:
            self.network.close(identity)

    def _welcomed(self, rank: Rank, welcome: m.Welcome, now: float) -> None:
        rank.welcome = welcome
        if all(each.welcome is not None for each in self.ranks):
            assert self.ranks[0].welcome is not None
            self.withheld = self.ranks[0].welcome.resumes_until > self.version
            for each in self.ranks:  # they agree on it
                each.dialog.incarnation = self.incarnation
            self.todo = ["publish", "train"]

    def _do(self, what: str, now: float) -> None:
        first = self.ranks[0].dialog
        match what:
            case "commit":
                first.announce(m.Committed(step=self.version, digest=self.digest))
            case "publish":
                self._publish()
            case "lower":
                first.announce(m.LowerLag(step=self.version, async_lag=self.async_lag))
            case "checkpoint":
                first.ask(m.CursorRequest(step=self.version), m.Cursor, "the cursor", now)
            case "train":
                self._ask_for_batches(now)

    def _ask_for_batches(self, now: float) -> None:
        for rank in self.ranks:
            rank.dialog.take(self.version + 1, now)

    def _publish(self) -> None:
        first = self.ranks[0].dialog
        evaluate = bool(self.evaluate_every and self.version % self.evaluate_every == 0)
        if evaluate:
            first.announce(m.Evaluate(version=self.version))
        if self.withheld:
            return
        first.announce(m.Published(version=self.version, digest=self.digest))
        policy = Policy(self.incarnation, self.version, self.digest)
        self.bus.publish(policy, self.books.policy(self.digest), evaluate=evaluate)

    def _train(self, now: float) -> None:
        parts = [rank.batch for rank in self.ranks if rank.batch is not None]
        self.books.batch(parts)
        first = parts[0]
        self.digest = self._next_digest(parts)
        self.version = first.step
        self.withheld = not first.publish and self.digest == first.expected_digest
        self.books.commits(first.step, self.digest, first.group_ids)
        for rank in self.ranks:
            rank.batch, rank.proceed = None, False
            rank.dialog.wait(now)
        self.todo = ["commit", "publish"]
        if self.async_lag and self.rng.random() < self.lowers_lag:
            self.async_lag = self.rng.randrange(self.async_lag)
            self.todo.append("lower")
        is_due = first.checkpoint or (self.checkpoint_every and first.step % self.checkpoint_every == 0)
        self.todo.append("checkpoint" if is_due else "train")

    def _next_digest(self, parts: list[m.Batch]) -> str:
        value = zlib.crc32(self.digest.encode())
        for part in parts:
            value = zlib.crc32(checksum(part).to_bytes(4, "little"), value)
        salt = f"+{self.name}" if self.salted_at == parts[0].step else ""
        return f"{value:08x}{salt}"

    def _flush(self, rank: Rank) -> None:
        for message in rank.dialog.outbox:
            self.network.send(rank.identity, message)
        rank.dialog.outbox.clear()
