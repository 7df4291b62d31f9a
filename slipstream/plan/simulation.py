"""A run batch by batch, on a simulated clock, with the times that were measured. Pure.

The rules are replay's with `on_stale: wait`: a batch is admitted once engines serve the version `async_lag` before its
own, its groups go to the engines that hold the fewest, and it is trained when all of them have ended.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from configs.schema import Config
from replay.batches import build as batches
from slipstream.plan.costs import Costs, Int64, Workload


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulated run came to, over its counted steps."""

    step_s: float
    train_s: float
    """Mean of an update alone."""
    train_wall_s: float
    """The same beside an engine on the same GPU."""
    rollout_idle: float
    """Share of the time in which engines had no request, mean over engines."""
    learner_idle: float
    tokens_per_s: float
    """Answer tokens."""
    group_s: float
    """Mean from lease to the group's last token."""


@dataclass(slots=True)
class Sampled:
    """A group at an engine."""

    batch: int
    began_at: float
    left: int
    """Answers that have not ended."""
    score_s: float
    """Of the teacher."""


@dataclass(slots=True)
class SimulatedEngine:
    """Continuous batching: all running answers get a token with every decode step; the others wait in order."""

    costs: Costs
    max_running: int
    capacity: int
    """Groups that its server leases at a time."""
    prefill_s: float
    """Of a group: its answers share their prompt."""
    prompt_tokens: int = 0
    score_token_s: float = 0.0
    """Of this engine's share of the teacher, which scores one group after the other."""
    now: float = 0.0
    busy_s: float = 0.0
    """Time with a request."""
    held: Counter[int] = field(default_factory=Counter)
    """Groups that have not ended, by batch."""
    done_at: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """When the last group of a batch that ended so far was sent."""
    group_s: list[float] = field(default_factory=list)
    _scored_at: float = 0.0
    _sent_at: float = 0.0
    _admitted: deque[tuple[int, Sequence[int]]] = field(default_factory=deque)
    """Groups that are not leased yet: batch and tokens."""
    _leased: int = 0
    _waiting: deque[tuple[int, Sampled]] = field(default_factory=deque)
    _running: list[tuple[float, int, Sampled]] = field(default_factory=list)
    """(token of the engine at which the answer ends, a number that makes the order one, its group)"""
    _tokens: float = 0.0
    """Decode steps so far."""
    _owed: float = 0.0
    """Seconds before the next decode step: prefills and pauses."""
    _number: int = 0

    def submit(self, batch: int, lengths: Sequence[int]) -> None:
        """Sample a group, once there is room for it."""
        self.held[batch] += 1
        self._admitted.append((batch, lengths))
        self._begin()

    def hold(self, seconds: float) -> None:
        """Stand still, if there is something to sample."""
        self._owed += seconds if self._running else 0.0

    def run(self, until: float) -> None:
        """Sample up to this moment."""
        while self._running and self.now + self._left_s() <= until:
            self._end()
        if self._running and until > self.now:
            work = until - self.now
            paid = min(self._owed, work)
            self._owed -= paid
            self._tokens += (work - paid) / self._step_s()
            self.busy_s += work
        self.now = max(self.now, until)

    def finish(self, batch: int) -> float:
        """Sample until a batch has ended here; when its last group was sent."""
        while self.held[batch]:
            self._end()
        return self.done_at[batch]

    def backlog_s(self) -> float:
        """Seconds that everything here takes, if nothing else comes."""
        tokens = [end - self._tokens for end, *_ in self._running] + [length for length, _ in self._waiting]
        tokens += [length for _, lengths in self._admitted for length in lengths]
        steps = max(max(tokens, default=0.0), sum(tokens) / self.max_running)
        return self._owed + steps * self.costs.decode_step_s + sum(tokens) * self.costs.decode_answer_s

    def _step_s(self) -> float:
        return self.costs.decode_step_s + len(self._running) * self.costs.decode_answer_s

    def _left_s(self) -> float:
        """Until the next answer ends."""
        return self._owed + max(0.0, self._running[0][0] - self._tokens) * self._step_s()

    def _begin(self) -> None:
        """Lease and start what has room; an answer's first token comes with its prefill."""
        while self._admitted and self._leased < self.capacity:
            batch, lengths = self._admitted.popleft()
            score_s = (self.prompt_tokens + sum(lengths)) * self.score_token_s
            group = Sampled(batch, self.now, len(lengths), score_s)
            self._waiting.extend((length, group) for length in lengths)
            self._owed += self.prefill_s
            self._leased += 1
        while self._waiting and len(self._running) < self.max_running:
            length, group = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._tokens + max(0, length - 1), self._number, group))

    def _end(self) -> None:
        """Go to the end of the next answer."""
        seconds = self._left_s()
        self.now += seconds
        self.busy_s += seconds
        self._owed, self._tokens = 0.0, max(self._tokens, self._running[0][0])
        _, _, group = heapq.heappop(self._running)
        group.left -= 1
        if not group.left:
            self._leased -= 1
            self.group_s.append(self.now - group.began_at)
            self._scored_at = max(self._scored_at, self.now) + group.score_s
            self._sent_at = max(self._sent_at, self._scored_at) + self.costs.group_s
            self.done_at[group.batch] = self._sent_at
            self.held[group.batch] -= 1
        self._begin()


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run on so many engines of `costs.engine_gpus` GPUs each; without `trains` no step has an update (T_roll)."""

    config: Config
    num_engines: int
    num_ranks: int
    costs: Costs
    workload: Workload
    trains: bool = True

    def run(self, warmup: int, steps: int) -> SimulationResult:
        """Make so many steps; the first ones do not count."""
        costs, lag, more = self.costs, self.config.replay.async_lag, self.workload.prompt_tokens
        room = self.config.rollout.max_running, self.config.lease_capacity
        prefill_s, score_token_s = more * costs.prefill_token_s, costs.score_token_s * self.num_engines
        engines = [SimulatedEngine(costs, *room, prefill_s, more, score_token_s) for _ in range(self.num_engines)]
        lengths = [self._admit(engines, batch, 0.0) for batch in range(lag + 1)]
        taken, live, commits, busy = 0.0, 0.0, list[float](), list[float]()
        updates: list[tuple[float, float]] = []
        """Seconds of each update by the wall, and as if nothing shared its GPU."""
        for step in range(warmup + steps):
            began = max(taken, *(engine.finish(step) for engine in engines))
            kept = lengths[step][: costs.kept_groups(self.config)]
            alone = self.update_s([group + more for group in kept]) if self.trains else 0.0
            updates.append((_beside(engines, began, alone, costs.sharing), alone))
            commit = max(began + updates[-1][0], live) + costs.commit_s  # one broadcast at a time
            for engine in engines:
                engine.run(commit)
            commits.append(commit)
            busy.append(sum(engine.busy_s for engine in engines))
            for engine in engines:
                engine.run(commit + costs.publish_s)
                engine.hold(costs.pause_s)
            taken, live = commit + costs.record_s, commit + costs.publish_s + costs.pause_s
            lengths.append(self._admit(engines, step + 1 + lag, live))
        seconds = commits[-1] - commits[warmup - 1]
        wall, alone = np.mean(updates[warmup:], axis=0)
        return SimulationResult(
            step_s=seconds / steps,
            train_s=float(alone),
            train_wall_s=float(wall),
            rollout_idle=max(0.0, 1 - (busy[-1] - busy[warmup - 1]) / seconds / len(engines)),
            learner_idle=max(0.0, 1 - float(wall) * steps / seconds),
            tokens_per_s=float(np.sum(lengths[warmup : warmup + steps])) / seconds,
            group_s=float(np.mean([each for engine in engines for each in engine.group_s])),
        )

    def _admit(self, engines: Sequence[SimulatedEngine], batch: int, at: float) -> list[Int64]:
        """Have the groups of a batch sampled from this moment on; their tokens."""
        for engine in engines:
            engine.run(at)
        count, size = self.config.rollout.groups_per_step, self.config.rollout.group_size
        lengths = [self.workload.draw(batch * count + place, size) for place in range(count)]
        fewest = [(engine.held.total(), number) for number, engine in enumerate(engines)]
        heapq.heapify(fewest)
        for group in lengths:
            held, number = fewest[0]
            engines[number].submit(batch, group.tolist())
            heapq.heapreplace(fewest, (held + 1, number))
        return lengths

    def update_s(self, groups: Sequence[Int64]) -> float:
        """Of an update on groups with these tokens, microbatches and ranks as replay assigns them."""
        mesh, costs = self.config.learner.mesh, self.costs
        parts = max(1, self.num_ranks // mesh.tensor)
        whole = np.concatenate([*groups, np.empty(0, np.int64)])
        limit = self.config.learner.max_tokens_per_microbatch
        where = batches.assign(whole, np.ones(len(whole), np.bool_), parts, limit)
        loads = np.zeros((where.num_microbatches, parts))
        np.add.at(loads, (where.microbatch, where.rank), whole)
        seconds = float(loads.max(1).sum()) * costs.train_token_s / min(self.num_ranks, mesh.tensor)
        return costs.update_s + seconds * (1 + costs.exchange_share * (self.num_ranks > 1))


def _beside(engines: Sequence[SimulatedEngine], at: float, seconds: float, sharing: float) -> float:
    """What an update takes where engines share its GPUs, and takes from them: both are slower while both are busy."""
    if sharing == 1:
        return seconds
    overlaps = []
    for engine in engines:
        engine.run(at)
        overlaps.append(min(seconds, engine.backlog_s()))
        engine.hold(overlaps[-1] * (sharing - 1))
    return seconds + max(overlaps) * (sharing - 1)
