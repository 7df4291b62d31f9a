"""The two objects that TRL's AsyncGRPOTrainer takes: a rollout worker and a weight transfer, over one run of ours.

TRL calls them on its main thread, rank 0 alone: `init_weight_transfer`, `pause`, `send_weights` (version 0), `resume`,
`update_model_version(1)`, `start`; then after every update `pause` to `update_model_version` again; at the end, or
after an error, `stop` and `destroy`. Weights travel behind TRL's next update, so `pause` and `resume` have nothing to
do: each engine pauses for its own load.
"""

import copy
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from configs.loading import apply_override, dump, load, parse, validate
from configs.schema import Config
from examples.trl.agreement import agreed
from examples.trl.run import TrlRun
from examples.trl.samples import OutOfStep
from slipstream.check import checks
from slipstream.launch.run_folder import claim_run_dir, with_free_name
from slipstream.launch.terminal import say

GIVEN = "the configuration given to connect()"


class MetricsQueue(queue.Queue[dict[str, float]]):
    """TRL's `metrics_queue`: numbers of replay, one mapping a step."""

    def __init__(self, run: TrlRun) -> None:
        super().__init__()
        self._run = run

    def get_nowait(self) -> dict[str, float]:
        """The oldest. Raises queue.Empty."""
        if not self._run.outbox:
            raise queue.Empty
        return self._run.outbox.pop(0)


class SlipstreamRolloutWorker:
    """RolloutWorkerProtocol of TRL: `rollout_buffer` gives the batches of replay, sample by sample."""

    def __init__(self, run: TrlRun) -> None:
        self.run = run
        self.rollout_buffer: queue.Queue[Any] = run.samples
        self.metrics_queue: queue.Queue[dict[str, float]] = MetricsQueue(run)

    def start(self) -> None:
        """Rollout servers have begun when version 0 was live. Raises OutOfStep: it was never sent."""
        self._check(self.run.version)

    def stop(self) -> None:
        """End the run; after an error of TRL's it counts as failed. TRL's trainer calls it in any case."""
        error = sys.exception()
        self.run.finish(failure=f"{type(error).__name__}: {error}"[:500] if error is not None else "")

    def update_model_version(self, model_version: int) -> None:
        """TRL counts from 1 where we count from 0. Raises OutOfStep: it has sent other weights than these."""
        self._check(model_version - 1)

    def check_health(self, stale_after_s: float) -> None:
        """Raises RolloutsFailed with the root cause; `stale_after_s` is not needed, every wait has its deadline."""
        self.run.check()

    def _check(self, version: int) -> None:
        if version < 0 or version != self.run.version:
            raise OutOfStep(
                f"TRL is at version {version}, the weight bus at {self.run.version}: give the trainer both objects of"
                " connect(), rollout_worker and weight_transfer, in a process that has not trained before"
            )


class SlipstreamWeightTransfer:
    """WeightTransferProtocol of TRL: one version of the weight bus for each update."""

    def __init__(self, run: TrlRun) -> None:
        self.run = run

    def init_weight_transfer(self) -> None:
        """Start replay and the rollout servers. Raises RunFailed."""
        self.run.start()

    def pause(self) -> None:
        """Engines pause for their own load, when the weights are there."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Commit the update, and hand full tensors by their checkpoint names to the bus. Raises as TrlRun.publish."""
        self.run.publish(iterator)

    def resume(self) -> None:
        """As `pause`."""

    def destroy(self) -> None:
        """The run has ended with the worker's `stop`, which TRL calls before."""
        self.run.finish()


def connect(
    config: Config | str | PathLike[str] | Mapping[str, Any], args: Any, overrides: Sequence[str] = ()
) -> tuple[SlipstreamRolloutWorker, SlipstreamWeightTransfer]:
    """Check everything, claim the run folder, and make both objects; processes start with TRL's training.

    Call it in every process of TRL; the trainer uses those of rank 0.

    Args:
        config: a checked configuration, the path of a YAML file or a preset's name, or its tree as a mapping.
        args: TRL's AsyncGRPOConfig, as `trl_arguments` fills it.
        overrides: `a.b=c` each, as for `--set`.

    Raises:
        ConfigError, DataError, FingerprintError: as `python -m learner.main` refuses a run; or TRL's arguments say
            something else than the configuration.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    config = agreed(_loaded(config, overrides), args)
    if args.process_index == 0:
        checks.require(config, say, checks.AT_START)
        config = claim_run_dir(with_free_name(config), new=True)
    run = TrlRun(config, microbatch=args.per_device_train_batch_size * args.world_size, make=RolloutSample)
    return SlipstreamRolloutWorker(run), SlipstreamWeightTransfer(run)


def _loaded(config: Config | str | PathLike[str] | Mapping[str, Any], overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        return parse(dump(config), GIVEN, overrides)
    if isinstance(config, Mapping):
        tree = copy.deepcopy(dict(config))
        for override in overrides:
            apply_override(tree, override)
        return validate(tree, GIVEN, overrides)
    return load(config, overrides)
