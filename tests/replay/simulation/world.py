"""Drives a whole simulated run: peers act and die, messages travel, replay crashes and returns, the disk fills up."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from configs import Config
from replay.channel import Message
from replay.data import PromptSource
from replay.service import Service
from replay.state.apply import boot_fields
from replay.state.leases import SlotState
from replay.state.snapshot import snapshot_of
from tests.replay.simulation.books import Books, Violation, as_group, expect
from tests.replay.simulation.bus import SimulatedBus
from tests.replay.simulation.journal import SimulatedJournal
from tests.replay.simulation.learners import Checkpoints, SimulatedLearner
from tests.replay.simulation.network import Network
from tests.replay.simulation.servers import SimulatedServer

NOT_JOURNALED = (
    "corrupt", "duplicate", "peers_", "renewals_", "servers_lost", "learner_ranks", "journal_full", "tokens_masked",
    "groups_rejected", "leases_resent", "flat_groups_kept", "partial", "superseded", "checkpoints",
)  # fmt: skip
"""Counters that a crash may set back: they are of the process, or are written with the next snapshot."""
BACK_WITHIN = 2000
"""Moves without faults within which ten more steps must be made."""


Faults = Mapping[str, float]
"""Probability of each kind of fault at every move, 0 for those that are missing.

`stall`: nothing happens for longer than a lease lasts; `noise`: messages that are lost, doubled or swapped, each;
`salted`: learners that are not deterministic; `rolls_back`: that take back the steps after their checkpoint;
`lowers_lag`: steps that lower the lag.
"""


class World:
    def __init__(self, config: Config, seed: int, faults: Faults, *, num_rows: int = 9, num_servers: int = 2) -> None:
        self.config, self.seed, self.faults = config, seed, Counter(faults)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.rows = rows(num_rows)
        self.network, self.bus = Network(self.rng, self.faults["noise"]), Network(self.rng, 0.0)
        self.books = Books(
            config.replay.async_lag, config.replay.on_stale, config.num_learner_ranks, config.trajectories_per_step
        )
        self.counts = self.books.counts
        self.checkpoints = Checkpoints(keep=config.checkpoint.keep)
        self.settled = 0
        self.admitted: set[tuple[int, int]] = set()
        self.trace: deque[str] = deque(maxlen=60)
        self.names = itertools.count()
        self.service = self._serve(SimulatedJournal())
        self.servers: dict[str, SimulatedServer] = {}
        for _ in range(num_servers):
            self.add_server()
        self.learner = self.new_learner()
        self.full_until = 0.0

    def run(self, moves: int) -> None:
        """Faults for `moves` moves, then ten more steps without any, then the closing of the books."""
        for _ in range(moves):
            self.move()
        self.faults, self.network.noise, self.full_until = Counter(), 0.0, 0.0
        goal = max(self.books.line, default=0) + 10
        for _ in range(BACK_WITHIN):
            self.move(brisk=True)
            if self.books.version >= goal:
                break
        else:
            raise Violation(f"no ten more steps after the faults: {self.books.version} of {goal}; {self.stuck()}")
        self.close()

    def move(self, *, brisk: bool = False) -> None:
        rng, faults = self.rng, self.faults
        self.now += rng.random() * (0.3 if rng.random() >= faults["stall"] else 3 * self.config.replay.lease_s)
        self._disk()
        if rng.random() < faults["server_kill"]:
            self.kill_a_server()
        if self.learner.dead or rng.random() < faults["learner_kill"]:
            self.learner = self.new_learner()
        if rng.random() < faults["replay_crash"]:
            self.crash()
        for server in list(self.servers.values()):
            if brisk or rng.random() < 0.4:
                server.act(self.now, brisk=brisk)
        if self.servers and rng.random() < faults["lease_failure"]:
            reason = rng.choice(["engine_error", "reward_error", "aborted", "prompt_too_long"])
            rng.choice(list(self.servers.values())).fail_a_lease(reason)
        if brisk or rng.random() < 0.7:
            self.learner.act(self.now)
            self.learner.bus.act()
        self.carry(rng.choice([1, 4, 12]) if not brisk else 50)
        if rng.random() < 0.2:
            self.attempt(partial(self.service.tick, self.now))
        self.hear()

    def carry(self, count: int) -> None:
        """Some of what peers have sent reaches replay, many messages at once or one by one."""
        for _ in range(count):
            waiting = self.network.waiting()
            if not waiting:
                break
            identity = self.rng.choice(waiting)
            message = self.network.connections[identity].to_replay.popleft()
            self.attempt(partial(self.service.receive, identity, message, self.now), at_once=False)
        self.attempt(partial(self.service.advance, self.now))

    def hear(self) -> None:
        """Some of what replay and the publisher have said reaches their peers."""
        for identity, connection in self.bus.connections.items():
            while connection.to_replay and self.rng.random() < 0.85:
                self.learner.bus.hear(identity, connection.to_replay.popleft())
            while connection.from_replay and self.rng.random() < 0.85:
                self.servers[identity].hear_bus(connection.from_replay.popleft(), self.now)
        for identity, connection in self.network.connections.items():
            while connection.from_replay and self.rng.random() < 0.85:
                server = self.servers.get(identity)
                if server is None and not (identity in self.learner.identities and self.learner.listens(identity)):
                    break
                message = connection.from_replay.popleft()
                if server is not None:
                    server.hear(message, self.now)
                else:
                    self.learner.hear(identity, message, self.now)

    def attempt(self, action: Callable[[], None], *, at_once: bool = True) -> None:
        """Have replay do something and say what follows, as far as the journal has it."""
        action()
        if at_once or self.rng.random() < 0.2:
            self._say_what_is_written()
        self._check_admission()
        expect(self.service.ended is None, f"the run ended: {self.service.ended}")

    def crash(self) -> None:
        """kill -9 of replay between two messages, and its start from what the journal has."""
        self.counts["crashes"] += 1
        old = self.service
        everything, journal = _journal(old).crash(None), _journal(old).crash(self.rng)
        self._compare(old, self._restored(everything, from_start=False), "its newest snapshot")
        if not everything.released:
            self._compare(old, self._restored(everything.crash(None), from_start=True), "its beginning")
        self.network.replay_crashed()
        self.service = self._restored(journal, from_start=False)
        self.service.journal.append("boot", boot_fields(self.config, self.service.run.source.state(), 1))
        self._settle()
        self.say(f"replay restarts with {journal.flushed} of {len(everything.records)} records")

    def kill_a_server(self) -> None:
        """kill -9 of a rollout server; another one takes its place."""
        self.counts["servers_killed"] += 1
        identity = self.rng.choice(list(self.servers))
        del self.servers[identity]
        self.network.close(identity)
        del self.bus.connections[identity]
        self.add_server()

    def add_server(self) -> None:
        identity = f"rollout-{next(self.names)}"
        self.servers[identity] = SimulatedServer(
            identity, self.network, self.bus, self.books, self.rng, self.config, self.now, faults=self.faults["bus"]
        )

    def new_learner(self) -> SimulatedLearner:
        """The first learner, or one in the place of another that is killed."""
        if self.books.initial or hasattr(self, "learner"):
            self.counts["learner_restarts"] += 1
            self.learner.kill()
            self.bus.replay_crashed()
        kept = sorted(self.checkpoints.complete)
        version = self.rng.choice(kept) if kept else 0
        for newer in [v for v in kept if v > version]:
            del self.checkpoints.complete[newer]
        salted_at = version + self.rng.randint(0, 5) if self.rng.random() < self.faults["salted"] else None
        bus = SimulatedBus(self.bus, self.rng, self.faults["bus"])
        learner = SimulatedLearner(
            f"{next(self.names)}", self.network, bus, self.books, self.checkpoints, self.rng, self.config, self.now,
            version=version, salted_at=salted_at, lowers_lag=self.faults["lowers_lag"],
            rolls_back=bool(self.books.line) and self.rng.random() < self.faults["rolls_back"],
        )  # fmt: skip
        self.say(f"learner {learner.name} starts at version {version}, salted at {salted_at}")
        return learner

    def _disk(self) -> None:
        if self.rng.random() < self.faults["disk_full"]:
            self.full_until = self.now + self.rng.random() * 5
            self.counts["disk_full"] += 1
        _journal(self.service).full = self.now < self.full_until

    def _check_admission(self) -> None:
        """Counted anew, not as the buffer counts; a learner that goes back may put more in flight than are admitted."""
        buffer = self.service.buffer
        if buffer.slots.keys() - self.admitted:
            self.admitted |= buffer.slots.keys()
            taken = sum(len(made.groups) for step, made in buffer.line.steps.items() if step > buffer.version)
            in_flight = len(buffer.slots) + taken
            bound = (self.books.async_lag + 1) * self.config.rollout.groups_per_step
            expect(in_flight <= bound, f"{in_flight} groups in flight, the bound is {bound}")

    def _say_what_is_written(self) -> None:
        """As replay/serve.py does: nothing leaves before the journal has it, which takes its time."""
        service = self.service
        while outbox := service.sayable(self.now):
            self._settle()
            self._send(outbox)
        journal, rng = _journal(service), self.rng
        journal.write(rng.choice([journal.submitted, rng.randint(journal.flushed, journal.submitted)]))
        journal.sync(rng.choice([journal.flushed, rng.randint(journal.synced, journal.flushed)]))
        if outbox := service.sayable(self.now):
            self._settle()
            self._send(outbox)

    def _send(self, outbox: list[tuple[str, Message]]) -> None:
        for identity, message in outbox:
            if not self.network.answer(identity, message) and self.service.peers.get(identity) is not None:
                self.service.unreachable(identity, self.now)

    def _settle(self) -> None:
        history = _journal(self.service).history
        for record in history[self.settled :]:
            self.books.settle(record)
        self.settled = len(history)

    def _serve(self, journal: SimulatedJournal) -> Service:
        source = PromptSource(self.rows, shuffle=True, seed=self.seed)
        journal.lazy = True
        return Service(self.config, source, {"": self.rows[:2]}, self.now, journal=journal)

    def _restored(self, journal: SimulatedJournal, *, from_start: bool) -> Service:
        service = self._serve(journal)
        records = journal.records if from_start else journal.records[journal.newest_snapshot() :]
        service.restore(list(records), self.now)
        return service

    def _compare(self, old: Service, new: Service, origin: str) -> None:
        """A restored service is the one that died, but for what only a process has."""
        found = comparable(new)
        for key, value in comparable(old).items():
            expect(found[key] == value, f"restored from {origin}: {key} is {found[key]!r} and was {value!r}")

    def close(self) -> None:
        buffer, counters = self.service.buffer, self.service.counters
        ahead = {taken.group_id for step, made in buffer.line.steps.items() if step > max(self.books.line, default=0)
                 for taken in made.groups}  # fmt: skip
        self.books.order(PromptSource(self.rows, shuffle=True, seed=self.seed), set(buffer.slots) | ahead)
        dropped = sum(n for key, n in counters.items() if key.startswith("dropped/"))
        expect(dropped == len(self.books.dropped), f"{dropped} drops counted, {len(self.books.dropped)} were made")
        self.counts["dropped"] += dropped
        self._check_accepted()

    def _check_accepted(self) -> None:
        """An acknowledged group is trained, dropped, superseded or still there."""
        waiting = {g for g, slot in self.service.buffer.slots.items() if slot.state is not SlotState.BUFFERED}
        last: dict[tuple[int, int], str] = {}
        for record in _journal(self.service).history:
            if record.kind in ("group", "stale") or record.fields.get("reason") == "diverged":
                last[as_group(record.fields["group"])] = record.kind
            for group in record.fields.get("superseded", ()):
                last[as_group(group)] = record.kind
        for group, attempt in self.books.accepted:
            lost = group in waiting and last.get(group) == "group"
            expect(not lost, f"{group} (attempt {attempt}) was acknowledged, and is sampled anew without a reason")

    def stuck(self) -> str:
        service = self.service
        slots = [(s.group_id, s.state.value, s.min_version, s.attempt, s.server) for s in service.buffer.slots.values()]
        peers = [(p.name, p.incarnation, p.version, p.capacity) for p in service.peers.by_identity.values()]
        lost, takes = service.run.policies.lost, service.batching.takes
        return f"lost {lost}, takes {takes}, {slots}, {peers}, {self.learner.bus.published}"

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now:.1f} {text}")


def _journal(service: Service) -> SimulatedJournal:
    assert isinstance(service.journal, SimulatedJournal)
    return service.journal


def comparable(service: Service) -> dict[str, Any]:
    """The state that must survive a crash."""
    state = snapshot_of(service.run)
    evaluations = state["evaluations"]
    evaluations["open"] = [[version, parts] for version, parts, *_ in evaluations["open"]]
    state["counters"] = {k: n for k, n in state["counters"].items() if n and not k.startswith(NOT_JOURNALED)}
    return state


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "ground_truth": str(i), "data_source": "t", "extra_info": {}, "columns": {}}
        for i in range(count)
    ]
