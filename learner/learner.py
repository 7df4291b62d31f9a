"""What one rank of the learner holds, and the phases that the main loop (learner/train.py) names."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from configs.schema import Config
from learner.batches import BatchReader
from learner.beside.beside import build_beside
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.checkpoints.memory_plan import KEY, described, plan_memory
from learner.guards import Alarm, Guards, GuardVerdict, SilentlyWrong
from learner.guards.roll_back import RollBack, RollBacks
from learner.held_out import HeldOut
from learner.optimizer import Optimizer
from learner.policy.flops import mfu, peak_flops
from learner.policy.memory import OutOfMemory
from learner.policy.model import build_policy
from learner.ranks import Ranks
from learner.record.evaluation import Evaluations
from learner.record.ledger import Ledger
from learner.record.metrics import Metrics, Spans
from learner.record.profile import Profile
from learner.record.rollouts import RolloutWriter
from learner.rows import check as check_batch
from learner.trainer import CRITIC_WARMUP, Trainer, Update, check_rewards
from learner.weights import WeightPublisher
from replay import messages as m
from replay.messages import Batch
from slipstream.runtime.disk import Disk, until_room
from slipstream.runtime.lifeline import Cores
from slipstream.runtime.progress import Progress
from weight_bus import PublishReport
from weight_bus.digest import combined

log = logging.getLogger(__name__)


class Learner:
    """One rank: its shard of the policy, its end of the channels."""

    def __init__(self, config: Config, ranks: Ranks, batches: BatchReader) -> None:
        self.config = config
        self.ranks = ranks
        self.batches = batches
        budget = plan_memory(config, ranks.mesh, ranks.device)
        self._plan = {KEY: described(config, budget)}
        """For checkpoints, which a resumed run goes on from in the same way."""
        self.policy = build_policy(config, ranks.mesh, ranks.device, budget)
        self.optimizer = Optimizer(config.learner, self.policy)
        self.beside = build_beside(config, self.policy)
        self.teachers, parts = self.beside.teachers, self.beside.parts
        self.held_out = HeldOut(config, self.policy, self.beside, ranks)
        self.checkpoints = Checkpointer(config, self.policy, self.optimizer, parts, meanwhile=batches.heartbeat)
        self.guards = Guards(config)
        self.roll_backs = RollBacks(config.run_dir)
        self.disk = Disk()
        """What lines and small files of this rank are written through."""
        self.rollouts = RolloutWriter(config, self.disk)
        self.digests: dict[str, int] = {}
        self._masters = ""
        """Digest of the policy's float32 weights at the last commit."""
        self._has_changed = True
        """Whether the last step has changed a weight of the policy."""
        self._saved: dict[str, float] = {}
        """Metrics of a checkpoint that was completed since the last row."""
        self._withheld = False
        """The latest version is not published: engines have a newer one while a resumed learner repeats steps."""
        self.profile = Profile(config, ranks, lambda: batches.clock())
        self._spans = Spans(self.profile.observe)
        self.trainer = Trainer(config, self.policy, self.optimizer, self._spans, self.beside, self.guards)
        self._step_started, self._cores = time.monotonic(), Cores()
        name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
        self._peak = peak_flops(name) if config.learner.compute_dtype == "bfloat16" else None
        """Of a device, in bfloat16; None where it is not known."""
        self.trainer.objective = self.rollouts.watch(self.trainer.objective)
        what = "the first step, which compiles the layers" if config.learner.compile is True else "the first step"
        self._first_step: AbstractContextManager[Any] = Progress(what)
        if ranks.is_first:
            self.evaluations = Evaluations(config, self.disk)

    def start(self, *, resume: bool) -> int:
        """Load the checkpoint of a resumed run, join replay; returns the version.

        Without a checkpoint a resumed run goes on from version 0, if its journal has every step since.
        """
        rolls_back = bool(resume and self.ranks.is_first and self.roll_backs.pending)
        if rolls_back:
            self.roll_backs.set_aside()
        state = self.checkpoints.resume() if resume else None
        if state and "guards" in state:
            self.guards.restore(state["guards"])
        self.beside.restore(state or {})
        run_dir = Path(self.config.run_dir)
        if resume and state is None and self.ranks.is_first and not any((run_dir / "journal").glob("*.seg")):
            raise CheckpointError(
                f"--resume: {run_dir} has neither a complete checkpoint nor a journal; leave --resume out to start anew"
            )
        self.teachers.restore(state.get("teachers", {}) if state else {})
        version = int(state["version"]) if state else 0
        cursor = state["replay"] if state and self.ranks.is_first else None
        waiting: list[int] = []
        if self.ranks.is_first:
            resume_version = version if resume else None
            given = self.config.model_dump(mode="json")
            tracking, disk = self.config.tracking, self.disk
            self.metrics = Metrics(run_dir, tracking, given, resume_step=resume_version, disk=disk)
            self.ledger = Ledger(run_dir, resume_version=resume_version, disk=disk)
            waiting = self.checkpoints.best.read(run_dir, version) if resume else []
            if rolls_back and self.config.checkpoint.keep_best:
                self.checkpoints.tidy()  # the best of all may be among what was set aside
        run_id, last = self.batches.connect()
        if cursor is not None:
            last = max(last, int(cursor["incarnation"]))
        self.bus = WeightPublisher(self.config, self.policy, self.ranks, run_id=run_id, incarnation=last + 1)
        teacher_buses = self.teachers.open(self.ranks, run_id=run_id, incarnation=last + 1)
        self.digests = self.bus.digests()
        digest = self.policy_digest()
        welcome = self.batches.join(
            version=version, digest=digest, bus_address=self.bus.address, teacher_buses=teacher_buses, cursor=cursor,
            rolls_back=rolls_back,
        )  # fmt: skip
        if rolls_back:
            self.roll_backs.done()
        for earlier in waiting:
            self.batches.announce(m.Evaluate(version=earlier))
        self.batches.dialog.incarnation, repeats = self.ranks.agree(welcome.incarnation, welcome.resumes_until)
        self._withheld = repeats > version
        log.info(
            "rank %d starts at version %d, policy digest %s%s", self.ranks.rank, version, digest,
            f"; repeats the journal's steps up to {repeats}" if self._withheld else "",
        )  # fmt: skip
        self.profile.after(version)
        return version

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a phase as `timing_s/<name>`."""
        return self._spans(name)

    def policy_digest(self) -> str:
        """Digest of the float32 master weights, those of a critic included (a collective)."""
        is_sent_whole = self.config.rollout.dtype == "float32"
        masters = self.digests if is_sent_whole else self.policy.shard_digests("float32")
        self._masters = combined(masters)
        return combined({**masters, **self.beside.digests()})

    def publish(self, version: int) -> None:
        """Hand the weights to the bus; they travel while the next batch is awaited."""
        evaluate = self.config.is_evaluated(version)
        if evaluate and self.ranks.is_first:
            self.checkpoints.best.expect(version)
            self.batches.announce(m.Evaluate(version=version))
        if self._withheld or (self.config.learner.facts.from_data and not evaluate):  # nobody else would read it
            return
        if self.ranks.is_first:
            self.batches.announce(m.Published(version=version, digest=combined(self.digests)))
        self.bus.start(version, self.digests, evaluate=evaluate)
        self.teachers.publish()

    def wait_for_broadcast(self, *, last: bool = False) -> PublishReport | None:
        """The last broadcast, for weight_bus.deadline_s at most; None while a later one may supersede it."""
        report = self.bus.wait(last=last)
        self.profile.broadcast(report)
        return report

    def check(self, batch: Batch) -> None:
        """Raises BatchError for a bad part, before any rank starts on the batch."""
        lag, scoring = self.config.replay.async_lag, self.config.scoring
        vocab_size, experts = self.policy.vocab_size, self.trainer.experts
        check_batch(batch, async_lag=lag, vocab_size=vocab_size, experts=experts, scoring=scoring)
        check_rewards(batch, self.trainer.advantage)

    def update(self, batch: Batch) -> Update:
        """Train on it; what was trained goes to the rollout files. Raises OutOfMemory."""
        self.rollouts.begin(batch.step)
        first = self._first_step
        self._first_step = nullcontext()
        try:
            with first:
                update = self.trainer.train_step(batch)
        except RuntimeError as error:
            if said := self.policy.when_exhausted(error, self.config):
                raise OutOfMemory(said) from error
            raise
        if self.policy.leads:
            self.rollouts.write_if_due(batch, update.advantages)
        if update.reason not in ("", CRITIC_WARMUP):
            log.warning("step %d was not applied: %s", batch.step, update.reason)
        return update

    def commit(self, batch: Batch) -> str:
        """Digest the new weights (a collective) and commit the step at replay.

        While a resumed learner repeats journalled steps, their versions stay here, unless the weights are not those
        that the journal has: then all that was sampled since is gone, and engines need the new ones.
        """
        self.digests = self.bus.digests()
        before, digest = self._masters, self.policy_digest()
        self._has_changed = self._masters != before
        if batch.expected_digest not in ("", digest):
            log.error("step %d: weights %s, the journal has %s", batch.step, digest, batch.expected_digest)
        self._withheld = not batch.publish and digest == batch.expected_digest
        if self.ranks.is_first:
            self.batches.announce(m.Committed(step=batch.step, digest=digest))
        return digest

    def record(self, step: int, batch: Batch, update: Update, *, report: PublishReport | None, digest: str) -> None:
        """Metrics, ledger and evaluations of a step; then what the guards have decided, on every rank.

        Raises:
            SilentlyWrong: a guard stops the run.
            RollBack: a guard ends this incarnation.
        """
        held_out = self.held_out.measure(step)
        if self.ranks.is_first:
            now = time.monotonic()
            step_s, self._step_started = now - self._step_started, now
            spans = self._spans.take()
            incarnation, expected = self.batches.incarnation, batch.expected_digest
            twice = self.ledger.append(step, batch.group_ids, incarnation=incarnation, digest=digest, expected=expected)
            values: dict[str, Any] = {**batch.stats, **update.values, **self.bus.metrics(report), **spans}
            values |= held_out | self.teachers.metrics() | self._saved
            self._saved = {}
            communication_s = self.policy.communication.take()
            if communication_s:
                values["perf/communication_share"] = communication_s / max(spans["timing_s/gradients"], 1e-9)
            if self._peak is not None and update.sums.global_tokens:
                values["perf/mfu"] = mfu(update.sums.values["flops"], spans, self._peak * self.ranks.world_size)
            values |= {
                "training/lag_histogram": batch.lag_histogram,
                "training/update_applied": update.applied,
                "training/groups_trained_twice": twice,
                "trainer/idle_ratio": min(1.0, spans.get("timing_s/wait_batch", 0.0) / step_s),
                "trainer/cores": self._cores.take(),
                "guards/roll_backs": float(self.roll_backs.count),
                "perf/learner_tokens_per_s": batch.stats["perf/total_num_tokens"] / step_s,
            }
            self.metrics.log(step, values)
            if self.batches.vitals is not None:
                self.batches.vitals.show(self.metrics.last)
            self.batches.drain()
            self._record_evaluations()
        self._act(step, update.verdict)
        self.profile.after(step)
        moved, lr = update.applied and update.sums.grad_norm > 0, update.lr
        alarm = self.guards.weigh(step, was_applied=moved, has_changed=self._has_changed, lr=lr)
        if alarm is not None:
            self._stop(alarm)

    def _act(self, step: int, verdict: GuardVerdict) -> None:
        """What follows from a verdict once the step is committed; every rank does the same."""
        for alarm in verdict.alarms:
            if said := self.guards.said(alarm):
                log.warning("guard: %s", said)
        if verdict.async_lag is not None and self.ranks.is_first:
            log.warning("guard: step %d: the lag is %d at most from here on", step, verdict.async_lag)
            self.batches.announce(m.LowerLag(step=step, async_lag=verdict.async_lag))
        if (stops := verdict.first("stop")) is not None:
            self._stop(stops)
        if (rolls_back := verdict.first("roll_back")) is not None:
            self._roll_back(step, rolls_back)

    def _stop(self, alarm: Alarm) -> NoReturn:
        """End the run (a collective). A checkpoint on its way to the disk comes first: --resume is to go on from it."""
        try:
            self._settle(wait=True)
        except CheckpointError as error:
            log.error("%s", error)
        raise alarm.error()

    def _roll_back(self, step: int, alarm: Alarm) -> NoReturn:
        """Have the next incarnation begin before the first bad step (a collective); or stop, where it cannot.

        A checkpoint on its way to the disk comes first: completing it may delete the one that the choice falls on.
        """
        self._settle(wait=True)
        noted, most = self.roll_backs, self.config.limits.roll_backs
        target, count = (noted.target(alarm.first_step), noted.count) if self.ranks.is_first else (0, 0)
        if self.ranks.is_first and target >= 0 and count < most:  # before another rank can end
            noted.note(alarm.first_step, step=step, reason=alarm.text)
        target, count = self.ranks.agree(target, count)
        if target < 0 or count >= most:
            why = f"there were {count} roll-backs (limits.roll_backs)" if target >= 0 else "no checkpoint is older"
            raise SilentlyWrong(f"{alarm.text}, but {why}")
        raise RollBack(f"{alarm.text} (to version {target}, {count + 1} of {most})")

    def checkpoint_if_due(self, batch: Batch) -> None:
        """Start a checkpoint every checkpoint.every_steps, after the last step, and when replay's journal is full.

        It is written while training goes on: of a step like any other this takes the copy of the weights. One that is
        due while the one before is written waits for it, and after the last step the run waits.
        """
        step, every, is_writing = batch.step, self.config.checkpoint.every_steps, self.checkpoints.is_writing
        is_last = step == self.config.learner.total_steps
        # replay goes on asking until the one that is being written has freed its journal; its wish may differ between
        # ranks, if it was restarted after some of them had their parts
        (is_asked,) = self.ranks.agree(int(batch.checkpoint))
        is_due = is_last or (every > 0 and step % every == 0) or (bool(is_asked) and not is_writing)
        if not is_due and not is_writing:
            return
        with self.span("checkpoint"):
            with self.span("checkpoint_wait") if is_due and is_writing else nullcontext():
                self._settle(wait=is_due)
            if is_due:
                cursor = self.batches.cursor(step) if self.ranks.is_first else {}
                self.checkpoints.start(
                    step, replay=cursor, digest=self._masters, guards=self.guards.state(), **self.beside.state(),
                    teachers=self.teachers.versions, **self._plan,
                )  # fmt: skip
                self._settle(wait=is_last or not self.config.checkpoint.asynchronous)

    def _settle(self, *, wait: bool) -> None:
        """Announce the checkpoint that was started, once it is complete: replay's journal forgets what it covers."""
        report = self.checkpoints.settle(wait=wait)
        if report is not None and self.ranks.is_first:
            self._saved |= report.metrics
            self.batches.announce(m.Checkpointed(step=report.step, kept=report.kept))

    def finish(self, version: int) -> None:
        """Wait for the last broadcast and all evaluations, and leave."""
        report = self.wait_for_broadcast(last=True)
        if self.ranks.is_first:
            sent = {**self.bus.metrics(report), **self.teachers.metrics(last=True)}
            self.metrics.log_final(version, {**self._spans.take(), **sent, **self._saved})
            self.batches.wait_for_evaluations(self.config.evaluation.deadline_s)
            self._record_evaluations()
            if self.config.checkpoint.keep_best:
                until_room(self.checkpoints.tidy, Path(self.config.run_dir), self.batches.heartbeat)
            self.metrics.close()
        self.disk.settle(self.batches.heartbeat)
        self.profile.close()
        self.bus.close()
        self.teachers.close()

    def _record_evaluations(self) -> None:
        inbox = self.batches.inbox
        for version, name, numbers in self.evaluations.news(inbox.results, inbox.closed):
            self.metrics.log_evaluation(version, numbers, name)
            self.checkpoints.best.record(version, numbers)
        self.checkpoints.best.closed(inbox.closed)
