"""Services, messages and journals for tests of replay; whole runs are simulated by tests/replay/simulation."""

from dataclasses import replace

import numpy as np

from configs import Config
from replay import messages as m
from replay.data import PromptSource
from replay.service import Service
from replay.state.evaluation_parts import EvaluationPart
from tests.replay.simulation.journal import SimulatedJournal
from tests.replay.simulation.samples import make_group
from tests.replay.simulation.world import rows


def config(**overrides):
    tree = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"group_size": 2, "groups_per_step": 4, "max_new_tokens": 8},
        "replay": {"async_lag": 1, "lease_s": 10, "max_attempts": 3},
        "placement": {"device": "cpu", "split": "1:1"},
        "network": {"silent_after_s": 10.0},
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return Config.model_validate(tree)


def group_message(lease, versions, *, reward=1.0, n=2):
    """A group of n trajectories whose tokens carry `versions` (one list for all)."""
    lengths, rewards = [len(versions)] * n, np.array([reward] + [0.0] * (n - 1), dtype=np.float32)
    given = {"pass_": lease.pass_, "index": lease.index, "attempt": lease.attempt}
    return make_group(lengths, **given, versions=np.array(versions * n, dtype=np.int32), rewards=rewards)


def service(journal=None, num_rows=40, *, ranks=1, evaluated=0, **overrides):
    """A service with the learner ranks 'l', 'l1', ..., the rollout servers 'a' and 'b', and prompts to evaluate."""
    made = bare_service(journal, num_rows, evaluated=evaluated, **overrides)
    learner(made, "l")
    made.batching.num_ranks = ranks
    for rank in range(1, ranks):
        made.handle(f"l{rank}", m.Hello(role="learner", name=f"learner-{rank}", pid=1, host="h", rank=rank), 0.0)
    joins(made, "a")
    joins(made, "b")
    return made


def bare_service(journal=None, num_rows=40, *, evaluated=0, sets=None, **overrides):
    """A service that nobody has joined; it evaluates greedily so many prompts, or those of `sets` by name."""
    sets = sets or {"": rows(evaluated)}
    evaluation = {"data__eval": "x", "evaluation__sampled": False} if evaluated else {}
    source = PromptSource(rows(num_rows), shuffle=False, seed=0)
    return Service(config(**evaluation | overrides), source, sets, 0.0, journal=journal or SimulatedJournal())


def learner(made, identity, *, now=0.0, **fields):
    """Rank 0 of a learner says Hello."""
    hello = {"role": "learner", "name": "learner-0", "pid": 1, "host": "h", "digest": "d0"} | fields
    made.handle(identity, m.Hello(**hello), now)


def joins(made, identity, now=0.0):
    """A rollout server says Hello."""
    made.handle(identity, m.Hello(role="rollout_server", name=f"rollout-{identity}", pid=2, host="h"), now)


def finishes(made, count, versions, **fields):
    """Server 'a' leases so many groups and sends them; the leases."""
    given = lease(made, capacity=count)
    for each in given:
        made.handle("a", group_message(each, versions, **fields), 1.0)
    return given


def gives_back(made, given, reason, detail=""):
    """Server 'a' cannot do anything with a lease."""
    cancel = m.Cancel(pass_=given.pass_, index=given.index, attempt=given.attempt, reason=reason, detail=detail)
    made.handle("a", cancel, 1.0)


def trains(made, rank, step, digest):
    """Rank 0 takes the batch of a step and commits it."""
    made.handle(rank, m.Take(step=step, rank=0), 1.0)
    made.handle(rank, m.Committed(step=step, digest=digest), 1.0)


def answering(made, result):
    """An evaluation's result as one to what replay asks for now."""
    work = made.evaluations.work.get(EvaluationPart(result.set, result.greedy, result.first))
    return result if work is None else replace(result, asked=work.fingerprint)


def sent(made, identity, kind):
    """Messages of a kind that replay has for a peer; they are taken from its outbox."""
    found = [x for who, x in made.outbox if who == identity and isinstance(x, kind)]
    made.outbox[:] = [(who, x) for who, x in made.outbox if not (who == identity and isinstance(x, kind))]
    return found


def lease(made, identity="a", *, capacity=1, version=0, incarnation=1, now=0.0):
    """Leases that a server gets for asking."""
    made.handle(identity, m.LeaseRequest(capacity=capacity, version=version, incarnation=incarnation), now)
    return sent(made, identity, m.Lease)


def make_step(made, step, *, versions=(0,)):
    """Lease and finish groups until batch `step` is out, and commit it; its group ids."""
    made.handle("l", m.Take(step=step, rank=0), 0.0)
    for given in lease(made, capacity=50, version=step - 1):
        made.handle("a", group_message(given, list(versions)), 0.0)
    batch = sent(made, "l", m.Batch)[-1]
    made.handle("l", m.Committed(step=step, digest=f"d{step}"), 0.0)
    return [tuple(group) for group in batch.group_ids]
