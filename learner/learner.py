"""What one rank of the learner holds, and the phases that the main loop (learner/train.py) names."""

import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from configs.schema import Config
from learner.batches import BatchReader
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.health_checks import HealthChecks
from learner.ledger import Ledger
from learner.optimizer import Optimizer
from learner.policy.memory import OutOfMemory
from learner.policy.model import build_policy
from learner.ranks import Ranks
from learner.report.evaluation import Evaluations
from learner.report.metrics import Metrics, Spans
from learner.report.rollouts import RolloutWriter
from learner.rows import check as check_batch
from learner.trainer import Trainer, Update
from learner.weights import WeightPublisher
from replay import messages as m
from replay.messages import Batch
from weight_bus import PublishReport
from weight_bus.digest import combined

log = logging.getLogger(__name__)


class Learner:
    """One rank: its shard of the policy, its end of the channels."""

    def __init__(self, config: Config, ranks: Ranks, batches: BatchReader) -> None:
        self.config = config
        self.ranks = ranks
        self.batches = batches
        self.policy = build_policy(config, ranks.mesh, ranks.device)
        self.optimizer = Optimizer(config.learner, self.policy)
        self.checkpoints = Checkpointer(config, self.policy, self.optimizer)
        self.health_checks = HealthChecks(config)
        self.rollouts = RolloutWriter(config)
        self.digests: dict[str, int] = {}
        self._withheld = False
        """The latest version is not published: engines have a newer one while a resumed learner repeats steps."""
        self._spans = Spans()
        self.trainer = Trainer(config, self.policy, self.optimizer, self._spans)
        self._step_started = time.monotonic()
        if ranks.is_first:
            self.evaluations = Evaluations(config)

    def start(self, *, resume: bool) -> int:
        """Load the checkpoint of a resumed run, join replay; returns the version.

        Without a checkpoint a resumed run goes on from version 0, if its journal has every step since.
        """
        state = self.checkpoints.resume() if resume else None
        run_dir = Path(self.config.run_dir)
        if resume and state is None and self.ranks.is_first and not any((run_dir / "journal").glob("*.seg")):
            raise CheckpointError(
                f"--resume: {run_dir} has neither a complete checkpoint nor a journal; leave --resume out to start anew"
            )
        version = int(state["version"]) if state else 0
        cursor = state["replay"] if state and self.ranks.is_first else None
        if self.ranks.is_first:
            resume_version = version if resume else None
            given = self.config.model_dump(mode="json")
            self.metrics = Metrics(run_dir, self.config.tracking, given, resume_step=resume_version)
            self.ledger = Ledger(run_dir, resume_version=resume_version)
        run_id, last = self.batches.connect()
        if cursor is not None:
            last = max(last, int(cursor["incarnation"]))
        self.bus = WeightPublisher(self.config, self.policy, self.ranks, run_id=run_id, incarnation=last + 1)
        self.digests = self.bus.digests()
        digest = self.policy_digest()
        welcome = self.batches.join(version=version, digest=digest, bus_address=self.bus.address, cursor=cursor)
        self.batches.incarnation, repeats = self.ranks.agree(welcome.incarnation, welcome.resumes_until)
        self._withheld = repeats > version
        log.info(
            "rank %d starts at version %d, policy digest %s%s", self.ranks.rank, version, digest,
            f"; repeats the journal's steps up to {repeats}" if self._withheld else "",
        )  # fmt: skip
        return version

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a phase as `timing_s/<name>`."""
        return self._spans(name)

    def policy_digest(self) -> str:
        """Digest of the float32 master weights (a collective)."""
        return combined(self.digests) if self.config.rollout.dtype == "float32" else self.policy.parameter_digest()

    def publish(self, version: int) -> None:
        """Hand the weights to the bus; they travel while the next batch is awaited."""
        evaluate = self.config.is_evaluated(version)
        if evaluate and self.ranks.is_first:
            self.batches.announce(m.Evaluate(version=version))
        if self._withheld:
            return
        if self.ranks.is_first:
            self.batches.announce(m.Published(version=version, digest=combined(self.digests)))
        self.bus.start(version, self.digests, evaluate=evaluate)

    def wait_for_broadcast(self) -> PublishReport | None:
        """The last broadcast, for weight_bus.deadline_s at most."""
        return self.bus.wait()

    def check(self, batch: Batch) -> None:
        """Raises BatchError for a bad part, before any rank starts on the batch."""
        check_batch(batch, async_lag=self.config.replay.async_lag, vocab_size=self.policy.vocab_size)

    def update(self, batch: Batch) -> Update:
        """Train on it; what was trained goes to the rollout files. Raises OutOfMemory."""
        try:
            update = self.trainer.train_step(batch)
        except RuntimeError as error:
            if said := self.policy.when_exhausted(error, self.config):
                raise OutOfMemory(said) from error
            raise
        self.rollouts.write_if_due(batch, update.advantages)
        if update.reason:
            log.warning("step %d was not applied: %s", batch.step, update.reason)
        return update

    def commit(self, batch: Batch) -> str:
        """Digest the new weights (a collective) and commit the step at replay.

        While a resumed learner repeats journalled steps, their versions stay here, unless the weights are not those
        that the journal has: then all that was sampled since is gone, and engines need the new ones.
        """
        self.digests = self.bus.digests()
        digest = self.policy_digest()
        if batch.expected_digest not in ("", digest):
            log.error("step %d: weights %s, the journal has %s", batch.step, digest, batch.expected_digest)
        self._withheld = not batch.publish and digest == batch.expected_digest
        if self.ranks.is_first:
            self.batches.announce(m.Committed(step=batch.step, digest=digest))
        return digest

    def record(self, step: int, batch: Batch, update: Update, *, report: PublishReport | None, digest: str) -> None:
        """Metrics, ledger and evaluations of a step; health checks look at it on every rank."""
        if self.ranks.is_first:
            now = time.monotonic()
            step_s, self._step_started = now - self._step_started, now
            spans = self._spans.take()
            twice = self.ledger.append(
                step,
                batch.group_ids,
                incarnation=self.batches.incarnation,
                digest=digest,
                expected=batch.expected_digest,
            )
            values: dict[str, Any] = {**batch.stats, **update.values, **self.bus.metrics(report), **spans}
            values |= {
                "training/lag_histogram": batch.lag_histogram,
                "training/update_applied": update.applied,
                "training/groups_trained_twice": twice,
                "trainer/idle_ratio": min(1.0, spans.get("timing_s/wait_batch", 0.0) / step_s),
                "perf/throughput": batch.stats["perf/total_num_tokens"] / step_s,
            }
            self.metrics.log(step, values)
            self.batches.drain()
            self._record_evaluations()
        self.health_checks.check(step, update.values, applied=update.applied, has_advantage=update.has_advantage)

    def checkpoint_if_due(self, batch: Batch) -> None:
        """Write a checkpoint every checkpoint.every_steps, after the last step, and when replay's journal is full."""
        step, every = batch.step, self.config.checkpoint.every_steps
        if step != self.config.learner.total_steps and (every == 0 or step % every) and not batch.checkpoint:
            return
        with self.span("checkpoint"):
            cursor = self.batches.cursor(step) if self.ranks.is_first else {}
            self.checkpoints.save(step, replay=cursor)
        if self.ranks.is_first:
            self.batches.announce(m.Checkpointed(step=step, kept=self.checkpoints.kept()))

    def finish(self, version: int) -> None:
        """Wait for the last broadcast and the last evaluation, and leave."""
        report = self.wait_for_broadcast()
        if self.ranks.is_first:
            self.metrics.log_final(version, {**self._spans.take(), **self.bus.metrics(report)})
            if self.config.is_evaluated(version):
                self.batches.wait_for_evaluation(version, self.config.evaluation.deadline_s)
            self._record_evaluations()
            self.metrics.close()
        self.bus.close()

    def _record_evaluations(self) -> None:
        inbox = self.batches.inbox
        for version, name, numbers in self.evaluations.news(inbox.results, inbox.closed):
            self.metrics.log_evaluation(version, numbers, name)
