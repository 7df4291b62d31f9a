"""A run on a simulated clock: engines, admission and the learner, with the times that were measured. Pure.

The rules are replay's with `on_stale: wait`: groups are leased in order, group k not before the commit of version
k // groups_per_step - async_lag, to the server that holds the fewest; a batch is the oldest groups, once all are there.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from configs.schema import Config
from replay.batches import build as batches
from slipstream.plan.costs import Costs, Int64, Workload

Action = Callable[[], None]


class Clock:
    """Runs what is due, in order of time, then of arrival.

    Events are in seconds of work, `now` is in seconds of the wall: where engines and the learner share GPUs, a second
    of work takes `sharing` seconds while both sides are busy.
    """

    def __init__(self, sharing: float = 1.0) -> None:
        self.now = 0.0
        self.work = 0.0
        """Seconds of work of a process that was busy all the time."""
        self.decoding = 0
        """Engines that decode."""
        self.updating = False
        """Whether the learner updates."""
        self._sharing = sharing
        self._due: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Run an action once so many seconds of work have passed."""
        heapq.heappush(self._due, (self.work + seconds, next(self._count), action))

    def step(self) -> None:
        """Go to the next event and run it. Raises RuntimeError: there is none, so that the run stands still."""
        if not self._due:
            raise RuntimeError(f"the simulated run stands still at {self.now:.6g} s: nothing is due any more")
        at, _, action = heapq.heappop(self._due)
        self.now += (at - self.work) * (self._sharing if self.decoding and self.updating else 1.0)
        self.work = at
        action()


@dataclass(frozen=True, slots=True)
class Outcome:
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
    max_lag: int


@dataclass(slots=True)
class Sampled:
    """A group at an engine."""

    number: int
    lengths: list[int]
    began_at: float = 0.0
    oldest: int = -1
    """Version that sampled the first token of its first answer."""
    ended: int = 0


class Engine:
    """Continuous batching: all running answers get a token with every decode step; the others wait in order."""

    def __init__(
        self, clock: Clock, costs: Costs, max_running: int, prefill_s: float, done: Callable[[Sampled], None]
    ) -> None:
        self.clock, self.costs, self.max_running, self.prefill_s, self.done = clock, costs, max_running, prefill_s, done
        self.version, self.held = 0, 0
        self.busy_s = 0.0
        """Wall time with a request, up to `settle`."""
        self._waiting: deque[tuple[Sampled, int]] = deque()
        self._running: list[tuple[float, int, Sampled]] = []
        """(token of the engine at which the answer ends, a number that makes the order one, its group)"""
        self._tokens, self._owed = 0.0, 0.0
        """Decode steps so far, and seconds before the next one: prefills and pauses."""
        self._at, self._wall, self._plan, self._number, self._free_at = clock.work, clock.now, 0, 0, 0.0

    def submit(self, group: Sampled) -> None:
        """Sample a group; an answer's first token comes with its prefill."""
        self.settle()
        self.held += 1
        group.began_at = self.clock.now
        self._waiting.extend((group, length) for length in group.lengths)
        self._owed += self.prefill_s
        self._begin()

    def server(self, seconds: float, action: Action) -> None:
        """Work of the rollout server, one piece after the other."""
        self._free_at = max(self._free_at, self.clock.work) + seconds
        self.clock.after(self._free_at - self.clock.work, action)

    def update(self, version: int, live: Action) -> None:
        """Stand still for new weights, then serve them."""
        if self._running:
            self.settle()
            self._owed += self.costs.pause_s
            self._schedule()

        def serve() -> None:
            self.settle()
            self.version = version
            live()

        self.server(self.costs.pause_s, serve)

    def settle(self) -> None:
        """Count the time and the tokens up to now."""
        work, wall = self.clock.work - self._at, self.clock.now - self._wall
        self._at, self._wall = self.clock.work, self.clock.now
        if self._running:
            self.busy_s += wall
            paid = min(self._owed, work)
            self._owed -= paid
            self._tokens += (work - paid) / self._step_s()

    def _step_s(self) -> float:
        return self.costs.decode_step_s + len(self._running) * self.costs.decode_answer_s

    def _begin(self) -> None:
        """Start what has room, and plan the next end."""
        was_busy = bool(self._running)
        while self._waiting and len(self._running) < self.max_running:
            group, length = self._waiting.popleft()
            self._number += 1
            group.oldest = self.version if group.oldest < 0 else group.oldest
            heapq.heappush(self._running, (self._tokens + max(0, length - 1), self._number, group))
        self.clock.decoding += bool(self._running) - was_busy
        self._owed = self._owed if self._running else 0.0
        self._schedule()

    def _schedule(self) -> None:
        self._plan += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._tokens)
            self.clock.after(self._owed + left * self._step_s(), partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        """The shortest answers end, if nothing has changed since this was planned."""
        if plan != self._plan:
            return
        self.settle()
        self._tokens = max(self._tokens, self._running[0][0])
        finished = []
        while self._running and self._running[0][0] <= self._tokens + 1e-9:
            _, _, group = heapq.heappop(self._running)
            group.ended += 1
            if group.ended == len(group.lengths):
                finished.append(group)
        self.clock.decoding -= not self._running
        self._begin()
        for group in finished:
            self.done(group)


@dataclass
class SimulatedRun:
    """One run on so many engines of `costs.engine_gpus` GPUs each; without `trains` no step has an update (T_roll)."""

    config: Config
    num_engines: int
    num_ranks: int
    costs: Costs
    workload: Workload
    trains: bool = True
    commits: list[float] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of each update by the wall, and as if nothing shared its GPU."""
    group_s: list[float] = field(default_factory=list)
    max_lag: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock(self.costs.sharing)
        prefill_s = self.workload.prompt_tokens * self.costs.prefill_token_s
        running = self.config.rollout.max_running
        self.engines = [
            Engine(self.clock, self.costs, running, prefill_s, partial(self._finished, number))
            for number in range(self.num_engines)
        ]
        self._free = [(0, number) for number in range(self.num_engines)]
        """(groups held, engine), with entries that do not hold any more; a heap."""
        self._leased = 0
        self._there: dict[int, Sampled] = {}
        """Finished groups by number."""
        self._arrived: Counter[int] = Counter()
        """Finished groups by step."""
        self._waits, self._published_at = False, 0.0
        self._dark = 0
        """Engines that do not serve the newest version yet; no other one is committed before."""
        self._updated_while_dark = False

    def run(self, warmup: int, steps: int) -> Outcome:
        """Make so many steps; the first ones do not count."""
        self._lease()
        self._take()
        before = (0.0, 0)
        while len(self.commits) < warmup + steps:
            made = len(self.commits)
            self.clock.step()
            if made < warmup == len(self.commits):
                before = self._so_far()
        busy, tokens = (after - then for after, then in zip(self._so_far(), before, strict=True))
        seconds = self.commits[-1] - self.commits[warmup - 1]
        wall, alone = np.mean(self.updates[warmup:], axis=0)
        return Outcome(
            step_s=seconds / steps,
            train_s=float(alone),
            train_wall_s=float(wall),
            rollout_idle=max(0.0, 1 - busy / seconds / len(self.engines)),
            learner_idle=max(0.0, 1 - float(wall) * len(self.updates[warmup:]) / seconds),
            tokens_per_s=tokens / seconds,
            group_s=float(np.mean(self.group_s)),
            max_lag=self.max_lag,
        )

    # ---- rollouts -----------------------------------------------------------------------------------------

    def _lease(self) -> None:
        """Lease the next groups, while one is admitted and a server of a young enough version has room."""
        per_step, lag = self.config.rollout.groups_per_step, self.config.replay.async_lag
        capacity, too_old = self.config.lease_capacity, list[tuple[int, int]]()
        while (least := self._leased // per_step - lag) <= len(self.commits) and self._free:
            held, number = heapq.heappop(self._free)
            engine = self.engines[number]
            if held != engine.held or held >= capacity:
                continue
            if engine.version < least:
                too_old.append((held, number))
                continue
            lengths = self.workload.draw(self._leased, self.config.rollout.group_size)
            engine.submit(Sampled(self._leased, lengths.tolist()))
            self._leased += 1
            heapq.heappush(self._free, (engine.held, number))
        for entry in too_old:
            heapq.heappush(self._free, entry)

    def _finished(self, number: int, group: Sampled) -> None:
        self.group_s.append(self.clock.now - group.began_at)
        self.tokens += sum(group.lengths)
        self.engines[number].server(self.costs.group_s, partial(self._sent, number, group))

    def _sent(self, number: int, group: Sampled) -> None:
        self.engines[number].held -= 1
        heapq.heappush(self._free, (self.engines[number].held, number))
        self._there[group.number] = group
        self._arrived[group.number // self.config.rollout.groups_per_step] += 1
        self._lease()
        if self._waits:
            self._take()

    # ---- learner ------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Train the oldest groups, once all of them are there."""
        count, version = self.config.rollout.groups_per_step, len(self.commits)
        self._waits = self._arrived[version] < count
        if self._waits:
            return
        groups = [self._there.pop(version * count + place) for place in range(count)]
        self.max_lag = max(self.max_lag, *(version - group.oldest for group in groups))
        kept = groups[: self.costs.kept_groups(self.config)]
        more = self.workload.prompt_tokens
        seconds = self.update_s([np.array(group.lengths) + more for group in kept]) if self.trains else 0.0
        self.clock.updating = seconds > 0
        self.clock.after(seconds, partial(self._updated, self.clock.now, seconds))

    def update_s(self, groups: list[Int64]) -> float:
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

    def _updated(self, began: float, alone: float) -> None:
        self.clock.updating = False
        self.updates.append((self.clock.now - began, alone))
        if self._dark:  # one broadcast at a time
            self._updated_while_dark = True
        else:
            self.clock.after(self.costs.commit_s, self._commit)

    def _commit(self) -> None:
        self.commits.append(self.clock.now)
        self._dark = len(self.engines)
        self._published_at = max(self._published_at, self.clock.work) + self.costs.publish_s
        self.clock.after(self._published_at - self.clock.work, partial(self._published, len(self.commits)))
        self.clock.after(self.costs.record_s, self._take)
        self._lease()

    def _published(self, version: int) -> None:
        for number, engine in enumerate(self.engines):
            engine.update(version, partial(self._live, number))

    def _live(self, number: int) -> None:
        heapq.heappush(self._free, (self.engines[number].held, number))
        self.clock.after(0.0, self._lease)  # once all servers of this instant are live: replay shares leases out
        self._dark -= 1
        if not self._dark and self._updated_while_dark:
            self._updated_while_dark = False
            self.clock.after(self.costs.commit_s, self._commit)

    def _so_far(self) -> tuple[float, int]:
        """Seconds in which engines had requests, and tokens of finished groups."""
        for engine in self.engines:
            engine.settle()
        return sum(engine.busy_s for engine in self.engines), self.tokens
