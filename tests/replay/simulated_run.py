"""A whole run around the pure replay service: simulated rollout servers and learner, a simulated clock."""

import random
from dataclasses import dataclass, field

import numpy as np

from configs import Config
from replay import messages as m
from replay.prompts import PromptSource
from replay.service import Service


def config(**overrides):
    tree = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"group_size": 2, "groups_per_step": 4, "max_new_tokens": 8},
        "replay": {"async_lag": 1, "lease_s": 10, "max_attempts": 3},
        "placement": {"device": "cpu", "split": "1:2"},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def rows(count):
    return [
        {"prompt": f"p{i}", "ground_truth": str(i), "data_source": "t", "extra_info": {}, "columns": {}}
        for i in range(count)
    ]


def group_message(lease, versions, *, reward=1.0, n=2):
    """A group of n trajectories whose tokens carry `versions` (one list for all)."""
    length = len(versions)
    return m.Group(
        pass_=lease.pass_,
        index=lease.index,
        attempt=lease.attempt,
        finish_reasons=["stop"] * n,
        texts=["x"] * n,
        reward_metrics={},
        generate_s=0.1,
        data_source="t",
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        lengths=np.full(n, length, dtype=np.int32),
        token_ids=np.full(n * length, 5, dtype=np.int32),
        loss_mask=np.ones(n * length, dtype=np.uint8),
        logprobs=np.full(n * length, -1.0, dtype=np.float32),
        versions=np.array(versions * n, dtype=np.int32),
        rewards=np.array([reward] + [0.0] * (n - 1), dtype=np.float32),
    )


@dataclass
class Server:
    identity: str
    version: int = -1
    leases: list = field(default_factory=list)
    started: dict = field(default_factory=dict)
    alive: bool = True


class SimulatedRun:
    """Drives the service with random orders of events; keeps its own books, independent of replay's."""

    def __init__(self, cfg, seed, num_rows=30, num_servers=2):
        self.config, self.rng, self.now = cfg, random.Random(seed), 0.0
        source = PromptSource(rows(num_rows), shuffle=True, seed=seed)
        self.service = Service(cfg, source, rows(3) if cfg.data.eval else [], self.now)
        self.servers = {}
        self.version = 0
        self.trained = []
        self.admitted = []
        self.batches = {}
        self.max_lag_trained = 0
        self.max_in_flight = 0
        self.dropped_tokens = 0
        for rank in range(cfg.num_learner_ranks):
            self.service.handle(
                f"learner-{rank}", m.Hello(role="learner", name=f"learner-{rank}", pid=1, host="h", rank=rank), self.now
            )
        for i in range(num_servers):
            self.join(f"rollout-{i}")
        self.deliver()

    def join(self, identity):
        self.servers[identity] = Server(identity)
        self.service.handle(identity, m.Hello(role="rollout_server", name=identity, pid=1, host="h"), self.now)
        self.update_weights(self.servers[identity])

    def update_weights(self, server):
        server.version = self.version
        self.service.handle(server.identity, m.LeaseRequest(capacity=3, version=server.version), self.now)

    def deliver(self):
        """Carry replay's answers to the simulated peers."""
        outbox, self.service.outbox = self.service.outbox, []
        for identity, message in outbox:
            if isinstance(message, m.Lease) and identity in self.servers and self.servers[identity].alive:
                server = self.servers[identity]
                assert message.min_version <= server.version, "a lease may start only when its version is live"
                server.leases.append(message)
                server.started[message.pass_, message.index, message.attempt] = server.version
                key = (message.pass_, message.index)
                if key not in self.admitted:
                    self.admitted.append(key)
            if isinstance(message, m.Batch):
                known = self.batches.setdefault((message.step, message.rank), message)
                assert known.group_ids == message.group_ids, "a batch is formed once"
        self.max_in_flight = max(self.max_in_flight, len(self.service.buffer.slots))

    def finish_a_lease(self, server):
        lease = server.leases.pop(self.rng.randrange(len(server.leases)))
        start = server.started[lease.pass_, lease.index, lease.attempt]
        length = self.rng.randint(1, 6)
        versions = sorted(self.rng.choice([start, server.version]) for _ in range(length))
        group = group_message(lease, versions)
        for _ in range(self.rng.choice([1, 1, 1, 2])):  # sends are at-least-once
            self.service.handle(server.identity, group, self.now)

    def take_and_commit(self):
        step = self.version + 1
        ranks = range(self.config.num_learner_ranks)
        for rank in ranks:
            for _ in range(self.rng.choice([1, 2])):
                self.service.handle(f"learner-{rank}", m.Take(step=step, rank=rank), self.now)
        self.deliver()
        if (step, 0) not in self.batches:
            return
        parts = [self.batches[step, rank] for rank in ranks]
        assert len({part.num_microbatches for part in parts}) == 1
        positions = sorted(i for part in parts for i in part.trajectory.tolist())
        assert positions == list(range(self.config.trajectories_per_step)), "every trajectory is at exactly one rank"
        for part in parts:
            lag = step - 1 - part.versions[part.loss_mask != 0]
            self.max_lag_trained = max(self.max_lag_trained, int(lag.max(initial=0)))
        self.trained += [tuple(g) for g in parts[0].group_ids]
        for _ in range(self.rng.choice([1, 2])):
            self.service.handle("learner-0", m.Committed(step=step, digest="d"), self.now)
        self.version = step
        self.service.handle("learner-0", m.Published(version=step, digest="d"), self.now)

    def step(self):
        self.now += self.rng.random() * 2
        alive = [s for s in self.servers.values() if s.alive]
        move = self.rng.random()
        if move < 0.45 and any(s.leases for s in alive):
            self.finish_a_lease(self.rng.choice([s for s in alive if s.leases]))
        elif move < 0.65:
            self.take_and_commit()
        elif move < 0.85 and alive:
            self.update_weights(self.rng.choice(alive))
        elif move < 0.88 and len(alive) > 1:
            dead = self.rng.choice(alive)
            dead.alive = False
            self.service.lost(dead.identity, "closed", self.now)
        elif move < 0.91:
            self.join(f"rollout-{len(self.servers)}")
        else:
            for server in alive:
                self.service.handle(server.identity, m.Heartbeat(), self.now)
                if self.rng.random() < 0.7:
                    held = [[x.pass_, x.index, x.attempt, 1] for x in server.leases]
                    self.service.handle(server.identity, m.Renew(leases=held), self.now)
            self.service.tick(self.now)
        self.deliver()
