"""A run of Slipstream whose learner is TRL's trainer: batches in, weights out, one version an update.

consumes     Batch (replay): the whole batch of the step, and the weights that TRL made of it
produces     samples for TRL's queue, Committed (replay) and one policy version per update (weight bus)
waits for    its batch for at most learner.batch_deadline_s, the last broadcast for at most weight_bus.deadline_s
unblocked by replay/serve.py (the oldest groups are complete) and weight_bus/subscriber.py (engines verified)

Everything here runs on TRL's main thread, as it does in learner/train.py.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from configs.errors import InputMissing, SlipstreamError
from configs.schema import Config
from examples.trl.processes import Processes
from examples.trl.samples import Sample, SampleQueue, samples_of
from learner.advantages import advantages_of, build_advantage
from learner.batches import BatchReader
from learner.dialog import RunEnded
from learner.layout import DTYPES
from learner.record.ledger import Ledger
from learner.record.metrics import Metrics
from learner.rows import check as check_batch
from learner.trainer import check_rewards, inputs_of
from learner.weights import numbers_of
from replay import messages as m
from replay.channel import ChannelError, load_keys
from slipstream.runtime.fingerprint import read_json, run_fingerprint
from weight_bus import Event, PublishReport
from weight_bus.digest import combined, slice_digest
from weight_bus.errors import WeightBusError
from weight_bus.publisher import Publisher

log = logging.getLogger(__name__)
Weights = Iterator[tuple[str, torch.Tensor]]


class RolloutsFailed(SlipstreamError, RuntimeError, code="SLIP-TRL-01"):
    """The rollout side cannot go on; the message is its root cause."""


class TrlRun:
    """What the rollout worker and the weight transfer share. Created before any process is.

    Args:
        config: as `examples.trl.agreement.agreed` gives it, its run folder claimed.
        microbatch: samples of one microbatch over all processes of TRL.
        make: RolloutSample of TRL.
    """

    def __init__(self, config: Config, *, microbatch: int, make: Callable[..., Any]) -> None:
        self.config = config
        self.processes = Processes(config)
        size = config.rollout.groups_per_step * config.rollout.group_size
        self.samples = SampleQueue(self._take, make, size=size, microbatch=microbatch)
        self.version = -1
        """Of the weights last handed over."""
        self.proven: dict[int, set[str]] = {}
        """By version: rollout servers whose engine has proven its digest."""
        self.differing: list[str] = []
        """Digests that were not equal, each with its server and version."""
        self.rewards: list[float] = []
        """Mean reward of each batch."""
        self.outbox: list[dict[str, float]] = []
        """Numbers of steps that TRL has not logged yet."""
        self._advantage = build_advantage(config.algorithm)
        self._vocab_size = _vocab_size(config)
        self._reader: BatchReader | None = None
        self._publisher: Publisher | None = None
        self._batch: m.Batch | None = None
        self._step_started = self._waited_s = 0.0
        self._is_over = False

    def start(self) -> None:
        """Start replay and the rollout servers. Raises RunFailed when replay does not come up."""
        address = self.processes.start()
        fingerprint = run_fingerprint(self.config)
        self._reader = BatchReader(self.config, address, rank=0, fingerprint=fingerprint)
        run_dir, given = Path(self.config.run_dir), self.config.model_dump(mode="json")
        self._metrics = Metrics(run_dir, self.config.tracking, given, resume_step=None)
        self._ledger = Ledger(run_dir, resume_version=None)

    def publish(self, weights: Weights) -> None:
        """Version 0 at the start; after update s commit step s, then publish version s. They travel meanwhile.

        Raises:
            RolloutsFailed: replay or the bus has failed.
            OutOfStep: the update was not of batch s.
            NonFiniteWeights: a tensor is not finite; engines keep the version before.
        """
        try:
            report = self._settle()
            wire, masters, tensors = self._digested(weights)
            if self._publisher is None:
                self._join(masters)
            else:
                self._commit(masters, report)
            self.version += 1
            assert self._reader is not None and self._publisher is not None
            self._reader.announce(m.Published(version=self.version, digest=combined(wire)))
            self._publisher.start_publish(self.version, iter(tensors.items()), wire)
        except (ChannelError, RunEnded) as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises RolloutsFailed when the processes beside this one cannot go on."""
        if self.processes.failure:
            raise RolloutsFailed(self.processes.failure)

    def finish(self, *, failure: str = "") -> None:
        """Wait for the last broadcast, say Goodbye, end all processes. Does nothing the second time.

        Args:
            failure: of TRL's trainer. Once all updates are made it is none of the rollouts' business.
        """
        if self._is_over:
            return
        self._is_over = True
        failure = failure if self.version < self.config.learner.total_steps else ""
        if self._publisher is not None and not failure:
            try:
                report = self._settle()
                self._metrics.log_final(self.version, numbers_of(report))
            except WeightBusError as error:
                log.error("weight bus: the last version: %s", error)
        if self._reader is not None:
            reason = f"TRL's trainer failed: {failure}" if failure else "TRL's trainer is done"
            self._reader.close(reason, failed=bool(failure))
            self._metrics.close()
        if self._publisher is not None:
            self._publisher.close("TRL's trainer is done")
        self.processes.stop()

    # ---- batches -----------------------------------------------------------------------------------------

    def _take(self, step: int) -> list[Sample]:
        """Batch `step` as samples. Raises RolloutsFailed, BatchError."""
        assert self._reader is not None
        self.check()
        started = time.monotonic()
        try:
            self._batch = batch = self._reader.take(step, self._check)
        except (ChannelError, RunEnded) as error:
            raise self._failed(error) from error
        self._waited_s = time.monotonic() - started
        self.rewards.append(float(batch.all_rewards.mean()))
        rollout = self.config.rollout
        size = rollout.groups_per_step * rollout.group_size
        advantages = advantages_of(self._advantage, inputs_of(batch))
        return samples_of(batch, advantages, num_groups=rollout.groups_per_step, size=size)

    def _check(self, batch: m.Batch) -> None:
        """The second guard of the lag, before replay counts the batch as held. Raises BatchError."""
        check_batch(batch, async_lag=self.config.replay.async_lag, vocab_size=self._vocab_size)
        check_rewards(batch, self._advantage)

    # ---- versions ----------------------------------------------------------------------------------------

    def _digested(self, weights: Weights) -> tuple[dict[str, int], dict[str, int], dict[str, torch.Tensor]]:
        """(digests in wire dtype, digests in float32, tensors in wire dtype in host memory) of what TRL holds.

        Digests are of TRL's tensors, where those are; what goes to the bus is a copy, unless they are in host memory
        in the wire dtype already.
        """
        dtype = DTYPES[self.config.rollout.dtype]
        wire: dict[str, int] = {}
        masters: dict[str, int] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            sent = tensor.detach().to(dtype)
            wire[name] = slice_digest(sent)
            masters[name] = wire[name] if dtype == torch.float32 else slice_digest(tensor.detach().float())
            tensors[name] = sent.cpu()
        return wire, masters, tensors

    def _join(self, masters: dict[str, int]) -> None:
        assert self._reader is not None
        config = self.config
        run_id, last = self._reader.connect()
        self._publisher = Publisher(
            config.weight_bus,
            host=config.network.host,
            run_id=run_id,
            incarnation=last + 1,
            keys=load_keys(config.network.keys),
            insecure=config.network.insecure,
            pack_on_host=True,
        )
        self._publisher.on_event.append(self._on_event)
        digest, address = combined(masters), self._publisher.address
        self._reader.join(version=0, digest=digest, bus_address=address, cursor=None)
        self._step_started = time.monotonic()

    def _commit(self, masters: dict[str, int], report: PublishReport | None) -> None:
        step, batch = self.version + 1, self._batch
        assert self._reader is not None
        self.samples.committed(step)
        assert batch is not None and batch.step == step
        digest = combined(masters)
        self._reader.announce(m.Committed(step=step, digest=digest))
        if batch.checkpoint:  # no checkpoint of ours will ever need what the journal has of these steps
            self._reader.announce(m.Checkpointed(step=step))
        incarnation = self._reader.incarnation
        twice = self._ledger.append(step, batch.group_ids, incarnation=incarnation, digest=digest, expected="")
        now = time.monotonic()
        step_s, self._step_started = now - self._step_started, now
        values: dict[str, Any] = {
            **batch.stats,
            **numbers_of(report),
            "training/lag_histogram": batch.lag_histogram,
            "training/groups_trained_twice": twice,
            "timing_s/step": step_s,
            "timing_s/wait_batch": self._waited_s,
        }
        self._metrics.log(step, values)
        self.outbox.append({f"slipstream/{name}": float(value) for name, value in batch.stats.items()})
        self._reader.drain()

    def _settle(self) -> PublishReport | None:
        """Wait for the last broadcast, for weight_bus.deadline_s at most."""
        if self._publisher is None or self.version < 0:
            return None
        return self._publisher.wait()

    def _on_event(self, event: Event) -> None:
        """On the bus's thread."""
        if event.kind == "live":
            self.proven.setdefault(event.version, set()).add(event.name)
        elif event.kind in ("corrupt", "quarantined"):
            self.differing.append(f"{event.name or 'the wire'} at version {event.version}: {event.detail}")

    def _failed(self, error: Exception) -> RolloutsFailed:
        return RolloutsFailed(self.processes.failure or str(error))


def _vocab_size(config: Config) -> int:
    """Raises ConfigError: the model has none, as those that are of more than text."""
    found = read_json(Path(config.model.path) / "config.json").get("vocab_size")
    if not isinstance(found, int):
        raise InputMissing(
            f"model.path: {config.model.path}/config.json has no vocab_size; under TRL's trainer a model is one of text"
        )
    return found
