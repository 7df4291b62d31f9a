"""Learner's main loop: batch → update → weight broadcast. One process per training device.

consumes     Batch (replay): this rank's trajectories of the step
produces     Committed (replay) and one policy version per step (weight bus)
waits for    its batch for at most learner.batch_deadline_s, the last broadcast for at most weight_bus.deadline_s
unblocked by replay/serve.py (the oldest groups are complete) and weight_bus/subscriber.py (engines verified)
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from configs.loading import ConfigError, add_arguments, from_arguments
from configs.schema import Config
from learner.batches import BatchReader
from learner.checkpoints.checkpointer import CheckpointError
from learner.collectives import watched
from learner.dialog import RunEnded
from learner.guards import SilentlyWrong
from learner.guards.roll_back import RollBack
from learner.learner import Learner
from learner.policy.memory import OutOfMemory
from learner.policy.pretrained import PolicyError
from learner.ranks import Ranks, RanksError, join_ranks, named
from learner.record.metrics import MetricsError
from learner.record.profile import readings
from learner.rows import BatchError
from replay.channel import ChannelError, KeysError, PeerRefused
from replay.channel.interfaces import InterfaceError
from replay.data import DataError
from slipstream.runtime import ending, hang
from slipstream.runtime.fingerprint import FingerprintError, run_fingerprint
from slipstream.runtime.lifeline import CANNOT_GO_ON, PARENT, die_with_parent, set_up_logging
from slipstream.runtime.vitals.watch import Vitals
from weight_bus.errors import WeightBusError

log = logging.getLogger(__name__)


REFUSALS = (
    ConfigError,
    DataError,
    FingerprintError,
    PolicyError,
    CheckpointError,
    MetricsError,
    SilentlyWrong,
    BatchError,
    OutOfMemory,
    WeightBusError,
    RanksError,
    InterfaceError,
    KeysError,
    PeerRefused,
)
"""Errors that a restart would hit again: they end the run."""
MakeLearner = Callable[[Config, Ranks, BatchReader], Learner]


def train(
    config: Config,
    address: str,
    *,
    resume: bool,
    make_learner: MakeLearner = Learner,
    vitals: Vitals | None = None,
) -> None:
    """Train from the initial model, or from the newest complete checkpoint, to learner.total_steps."""
    deadline_s = config.learner.collective_deadline_s
    with (
        join_ranks(config) as ranks,
        watched(ranks.mesh, ranks.device, deadline_s, break_off),
        open_reader(config, address, ranks.rank, vitals) as batches,
    ):
        learner = make_learner(config, ranks, batches)
        version = learner.start(resume=resume)
        learner.publish(version)

        while version < config.learner.total_steps:
            step = version + 1
            with learner.span("step"):
                with learner.span("wait_batch"):
                    batch = batches.take(step, learner.check)
                with learner.span("update_actor"):
                    update = learner.update(batch)
                with learner.span("publish_wait"):
                    report = learner.wait_for_broadcast()
                with learner.span("param_sync"):
                    digest = learner.commit(batch)
                    learner.publish(step)
            learner.record(step, batch, update, report=report, digest=digest)
            learner.checkpoint_if_due(batch)
            version = step

        learner.finish(version)


@contextmanager
def open_reader(config: Config, address: str, rank: int, vitals: Vitals | None = None) -> Iterator[BatchReader]:
    """The channel to replay; closes with Goodbye unless a restarted learner can continue."""
    reader = BatchReader(config, address, rank=rank, fingerprint=run_fingerprint(config), vitals=vitals)
    try:
        yield reader
    except (RunEnded, PeerRefused):
        raise  # replay knows
    except REFUSALS as error:
        reader.close(f"learner rank {rank} failed: {error}", failed=True)
        raise
    except BaseException:
        reader.abandon()  # a peer that was killed, a device that failed: another start goes on from here
        raise
    reader.close("all steps are done", failed=False)


def main(make_learner: MakeLearner = Learner) -> NoReturn:
    """Entry point of one rank."""
    parser = argparse.ArgumentParser(prog="python -m learner.train", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--replay", required=True, help="address of replay, tcp://host:port")
    parser.add_argument("--resume", action="store_true", help="start from the newest complete checkpoint")
    args = parser.parse_args()
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    rank = int(os.environ.get("RANK", "0"))
    name = f"learner-{rank}"
    try:
        config = from_arguments(args)
        set_up_logging(name, None if PARENT in os.environ else config.run_dir)
        hang.begin(name, config.run_dir, replay=args.replay, keys=config.network.keys)
        with Vitals(config, name, "learner", device=readings) as vitals:
            train(config, args.replay, resume=args.resume, make_learner=make_learner, vitals=vitals)
    except (*REFUSALS, RunEnded) as error:
        log.error("%s", said := f"learner rank {rank} stops: {error}")
        leave(CANNOT_GO_ON, said, error)
    except (ChannelError, RollBack) as error:
        log.error("%s", said := f"learner rank {rank} breaks off: {error}")
        leave(1, said, error)
    except Exception as error:  # the edge of the process: whatever it is, the log names it
        known = named(error)
        log.error(
            "%s", said := f"learner rank {rank} breaks off: {known}", exc_info=not isinstance(error, dist.DistError)
        )
        leave(1, said, known)
    leave(0, "all steps are done")


def break_off(error: Exception) -> NoReturn:
    """End this rank by name, from another thread than the one that stands still."""
    log.error("%s", said := f"learner rank {os.environ.get('RANK', '0')} breaks off: {error}")
    leave(1, said, error)


def leave(code: int, said: str, error: BaseException | None = None) -> NoReturn:
    """End without destructors: after an error they would wait for peers in a collective, and after a good run
    threads of the collective backend may outlive what they use and abort the process."""
    ending.leave(code, said, error)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
