"""A run on a simulated clock: replay's own service, desks and records, between simulated engines and a learner.

Admission, leases, the order of batches and the lag bound are those of replay/ itself; only its journal keeps nothing.
Engines, environments and learner take the time that `Costs` says. What has no effect on time is left out: token ids,
digests, ranks beyond rank 0 (whose times are computed), heartbeats, evaluations, checkpoints and faults.
"""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from configs.schema import Config
from learner.plan.clock import Action, Clock, Process
from learner.plan.costs import Answers, Costs, Int64, Workload
from learner.plan.engine import Sampled, SimulatedEngine
from replay import messages as m
from replay.desks import batches
from replay.desks.batch_desk import BatchDesk
from replay.journal import Journal
from replay.lifeline import BoundedLog
from replay.prompts import PromptSource
from replay.service import Service

ROUNDS, LARGE_ROUNDS, LARGE = 400, 100, 1024
"""Messages that arrive within a step's 1/400 cost replay one round; with 1,024 engines within 1/100."""
FIRST_ROUND_S = 1e-3
FRAMES = (b"",)
"""What stands for a message's bytes, for a journal that keeps none."""
MOST_EVENTS = 200_000_000
TICK_S = 0.25
"""Between two looks of replay at its deadlines."""
LEARNER = "learner-0"
SILENT = logging.getLogger("simulated")
SILENT.disabled = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run came to, over its counted steps."""

    step_s: float
    train_s: float
    """Mean of an update alone."""
    train_wall_s: float
    """The same beside whatever else is busy where it runs."""
    rollout_idle: float
    """Share of the time in which engines had no request, mean over engines."""
    learner_idle: float
    tokens_per_s: float
    """Answer tokens."""
    group_s: float
    """Mean from lease to the group's last token."""
    decoded_s: float
    """Work of decode steps and prefills of all engines, in a step."""
    max_lag: int
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who works: engines of `costs.engine_gpus` GPUs each, and learner ranks."""

    engines: int
    ranks: int


class SimulatedRun:
    """One run. `trains` false leaves the update out, as T_roll of the pipeline benchmark does."""

    def __init__(self, config: Config, fleet: Fleet, costs: Costs, workload: Workload, *, trains: bool = True) -> None:
        self.config, self.fleet, self.costs, self.workload, self.trains = config, fleet, costs, workload, trains
        self.clock = Clock(costs.cores, costs.contention, costs.crowding, sharing=costs.sharing)
        rows = _Prompts()
        source = PromptSource(rows, shuffle=False, seed=config.run.seed)
        self.service = _Service(_simulable(config), source, {}, 0.0, journal=Journal())
        self.service.granting.bounded = BoundedLog(SILENT)
        self.service.batch_desk.num_ranks = self.service.batch_desk.ranks_per_part = 1
        self.commits: list[float] = []
        self.trained: list[float] = []
        """Seconds by the wall of each update, and of work."""
        self.alone: list[float] = []
        self.answers: dict[tuple[int, int], Answers] = {}
        self.flat: set[tuple[int, int]] = set()
        self.max_lag, self.tokens, self.group_s = 0, 0, list[float]()
        self._replay, self._publisher = Process(self.clock), Process(self.clock)
        self._dark = 0
        """Engines that do not serve the newest version yet; no other one is committed before."""
        self._updated_while_dark = False
        self._quantum, self._waits = FIRST_ROUND_S, False
        self._rewards = np.arange(config.rollout.group_size, dtype=np.float32)
        self.engines: dict[str, SimulatedEngine] = {}

    def run(self, warmup: int, steps: int) -> Outcome:
        """Make so many steps; the first ones do not count."""
        self._join()
        self._take()
        self._advance()
        if self.config.replay.on_stale == "substitute":
            self._tick()
        before = (0.0, 0.0, 0)
        for _ in range(MOST_EVENTS):
            if len(self.commits) == warmup + steps:
                break
            made = len(self.commits)
            self.clock.step()
            if made < warmup == len(self.commits):
                before = self._so_far()
        busy, decoded, tokens = (after - then for after, then in zip(self._so_far(), before, strict=True))
        seconds = self.commits[-1] - self.commits[warmup - 1]
        trained, servers = self.trained[warmup:], len(self.engines)
        return Outcome(
            step_s=seconds / steps,
            train_s=float(np.mean(self.alone[warmup:])),
            train_wall_s=float(np.mean(trained)),
            rollout_idle=max(0.0, 1 - busy / seconds / servers),
            learner_idle=max(0.0, 1 - sum(trained) / seconds),
            tokens_per_s=tokens / seconds,
            group_s=float(np.mean(self.group_s)),
            decoded_s=decoded / steps,
            max_lag=self.max_lag,
            steps=[float(gap) for gap in np.diff(self.commits[warmup - 1 :])],
        )

    # ---- peers --------------------------------------------------------------------------------------------

    def _join(self) -> None:
        rollout, environment = self.config.rollout, self.config.environment
        self._says(LEARNER, m.Hello(role="learner", name=LEARNER, pid=1, host="simulated", digest="0"))
        for number in range(self.fleet.engines):
            name = f"rollout-{number}"
            self.engines[name] = SimulatedEngine(
                self.clock,
                self.costs,
                max_running=rollout.max_running,
                max_episodes=environment.max_episodes if environment.function is not None else 0,
                prompt_tokens=self.workload.prompt_tokens,
                in_process=rollout.engine == "torch",
                done=partial(self._finished, name),
            )
            self._says(name, m.Hello(role="rollout_server", name=name, pid=1, host="simulated"))
            self._asks(name, 0)

    def _says(self, identity: str, message: Any) -> None:
        self.service.receive(identity, message, self.clock.now, frames=FRAMES)
        if not self._waits:
            self._waits = True
            self.clock.after(self._quantum, self._advance)

    def _advance(self) -> None:
        """Replay hands out what it can, and its messages reach their peers."""
        self._waits = False
        self.service.advance(self.clock.now)
        outbox = self.service.sayable(self.clock.now)
        for identity, message in outbox:
            if isinstance(message, m.Lease):
                self._leased(identity, message)
            elif isinstance(message, m.Batch):
                self._train(message)
            elif isinstance(message, m.Cancel):
                self.engines[identity].cancel((message.pass_, message.index), message.attempt)
            elif isinstance(message, m.Goodbye | m.Refused):
                raise RuntimeError(f"the simulated run ended: {message.reason}")

    def _tick(self) -> None:
        """What time alone causes: a group's deadline."""
        self._advance()
        self.clock.after(TICK_S, self._tick)

    # ---- rollout servers ----------------------------------------------------------------------------------

    def _asks(self, name: str, version: int) -> None:
        self._says(name, m.LeaseRequest(capacity=self.config.lease_capacity, version=version, incarnation=1))

    def _leased(self, name: str, lease: m.Lease) -> None:
        key = (lease.pass_, lease.index)
        answers = self.answers[key] = self.workload.answers(lease.seed, self.config.rollout.group_size)
        self.engines[name].submit(Sampled(key, lease.attempt, answers))

    def _finished(self, name: str, group: Sampled) -> None:
        self.group_s.append(self.clock.now - group.began_at)
        self.tokens += int(group.answers.sampled.sum())
        self.engines[name].work(self.costs.group_s, partial(self._sent, name, group))

    def _sent(self, name: str, group: Sampled) -> None:
        """A finished group is on its way; replay works on one after the other."""
        self._replay.work(self.costs.replay_group_s, lambda: self._says(name, self._message(group)))

    def _message(self, group: Sampled) -> m.Group:
        """First and last version of each answer stand for all its tokens."""
        n = len(group.ended)
        versions = np.array([group.begun, group.ended], dtype=np.int32).T.ravel()
        share = self.costs.flat_share
        is_flat = share > 0 and np.random.default_rng(group.group).random() < share
        if is_flat:
            self.flat.add(group.group)
        return m.Group(
            pass_=group.group[0],
            index=group.group[1],
            attempt=group.attempt,
            finish_reasons=["stop"] * n,
            texts=[],
            reward_metrics={},
            generate_s=0.0,
            data_source="",
            prompt_ids=np.zeros(1, np.int32),
            lengths=np.full(n, 2, np.int32),
            token_ids=np.zeros(2 * n, np.int32),
            loss_mask=np.ones(2 * n, np.uint8),
            logprobs=np.zeros(2 * n, np.float32),
            versions=versions,
            rewards=self._rewards * (not is_flat),
        )

    # ---- learner ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.commits)

    def _take(self) -> None:
        self._says(LEARNER, m.Take(step=self.version + 1, rank=0))

    def _train(self, batch: m.Batch) -> None:
        self.max_lag = max(self.max_lag, max((int(lag) for lag in batch.lag_histogram), default=0))
        groups = [(pass_, index) for pass_, index in batch.group_ids]
        leaves_out = self.config.algorithm.flat_groups_are_left_out
        answers = {group: self.answers.pop(group) for group in groups}
        tokens = [answers[group].trained for group in groups if not (leaves_out and group in self.flat)]
        began, seconds = self.clock.now, self.update_s(tokens) if self.trains else 0.0
        self.alone.append(seconds)
        self.clock.updating = seconds > 0
        self._computes(seconds, partial(self._updated, began))

    def _computes(self, seconds: float, then: Action) -> None:
        """All ranks work for so long."""
        ranks = self.fleet.ranks if seconds else 0
        self.clock.busy += ranks

        def done() -> None:
            self.clock.busy -= ranks
            then()

        self.clock.after(seconds, done)

    def update_s(self, groups: list[Int64]) -> float:
        """Of an update on groups with these tokens, microbatches and ranks as replay assigns them."""
        mesh, costs = self.config.learner.mesh, self.costs
        parts = max(1, self.fleet.ranks // mesh.tensor)
        whole = np.concatenate([*groups, np.empty(0, np.int64)])
        everyone = np.ones(len(whole), np.bool_)
        where = batches.assign(whole, everyone, parts, self.config.learner.max_tokens_per_microbatch)
        loads = np.zeros((where.num_microbatches, parts))
        np.add.at(loads, (where.microbatch, where.rank), whole)
        seconds = float(loads.max(1).sum()) * costs.train_token_s / min(self.fleet.ranks, mesh.tensor)
        several = self.fleet.ranks > 1
        return costs.update_s + costs.exchange_s * several + seconds * (1 + costs.exchange_share * several)

    def _updated(self, began: float) -> None:
        self.clock.updating = False
        self.trained.append(self.clock.now - began)
        if self._dark:  # one broadcast at a time
            self._updated_while_dark = True
        else:
            self._computes(self.costs.commit_s, self._commit)

    def _commit(self) -> None:
        step = self.version + 1
        self._says(LEARNER, m.Committed(step=step, digest=f"{step}"))
        self.commits.append(self.clock.now)
        if step > 1:
            rounds = ROUNDS if self.fleet.engines < LARGE else LARGE_ROUNDS
            self._quantum = max(1e-4, (self.commits[-1] - self.commits[0]) / (step - 1) / rounds)
        self._dark = len(self.engines)
        self._publisher.work(self.costs.publish_s, partial(self._published, step))
        self._computes(self.costs.record_s, self._take)

    def _published(self, version: int) -> None:
        for name, engine in self.engines.items():
            engine.update(version, partial(self._live, name, version))

    def _live(self, name: str, version: int) -> None:
        self._asks(name, version)
        self._dark -= 1
        if not self._dark and self._updated_while_dark:
            self._updated_while_dark = False
            self._computes(self.costs.commit_s, self._commit)

    def _so_far(self) -> tuple[float, float, int]:
        """Seconds in which engines had requests, and decoded; tokens of finished groups."""
        for engine in self.engines.values():
            engine.settle()
        engines = self.engines.values()
        return sum(e.busy_s for e in engines), sum(e.decoded_s for e in engines), self.tokens


class _BatchDesk(BatchDesk):
    """Forms batches as replay does, and leaves out what they are made of: `SimulatedRun.update_s` assigns it."""

    def build(self, step: int, groups: list[m.Group], stats: dict[str, float]) -> None:
        """A part without tokens, with the lag of the oldest one."""
        oldest = min(int(group.versions[group.loss_mask != 0].min(initial=step - 1)) for group in groups)
        nothing, no_numbers = np.empty(0, np.int32), np.empty(0, np.float32)
        part = m.Batch(
            step=step,
            rank=0,
            num_microbatches=0,
            total_loss_tokens=0,
            group_ids=[[group.pass_, group.index] for group in groups],
            stats={},
            lag_histogram={str(step - 1 - oldest): 1},
            trajectory=nothing,
            microbatch=nothing,
            prompt_lengths=nothing,
            lengths=nothing,
            token_ids=nothing,
            loss_mask=np.empty(0, np.uint8),
            logprobs=no_numbers,
            versions=nothing,
            all_rewards=no_numbers,
            all_groups=nothing,
            all_loss_tokens=nothing,
        )
        self.batches[step] = [part]
        self.peers.to_rank(0, part)


class _Service(Service):
    batch_desk_type = _BatchDesk


class _Prompts(list[dict[str, Any]]):
    """Prompts without content, as many as a run may ask for; none comes twice within it."""

    def __init__(self) -> None:
        super().__init__([{"prompt": ""}] * 1_000)


def _simulable(config: Config) -> Config:
    """The run's configuration without what the simulation has no part for; sizes are those of stand-in groups."""
    evaluation = config.evaluation.model_copy(update={"every_steps": 0})
    replay = config.replay.model_copy(update={"partial_rollouts": False})
    return config.model_copy(update={"evaluation": evaluation, "replay": replay})


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one plan."""

    outcome: Outcome
    roll_s: float | None = None
    """T_roll: a step without its update; None: not simulated."""

    @property
    def eta(self) -> float | None:
        """Overlap efficiency max(T_roll, T_train) / T_step, as in docs/benchmarks/pipeline.md."""
        return max(self.roll_s, self.outcome.train_s) / self.outcome.step_s if self.roll_s is not None else None


def with_lag(config: Config, lag: int) -> Config:
    """The configuration at another bound of the lag."""
    return config.model_copy(update={"replay": config.replay.model_copy(update={"async_lag": lag})})
