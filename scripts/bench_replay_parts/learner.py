"""`python -m scripts.bench_replay_parts.learner`: a learner rank that takes, commits and publishes.

It trains nothing, and checks that no group comes twice and no token is too old.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import TypeVar

from configs.loading import load as load_config
from configs.schema import Config
from replay import messages as m
from replay.channel import Dealer, Limits, Message, load_keys
from replay.fingerprint import run_fingerprint
from replay.lifeline import die_with_parent
from scripts.bench_replay_parts.board import Board

POLL_S = 0.1
Kind = TypeVar("Kind", bound=Message)


class Stopped(Exception):
    """The command wants the case to end."""


class Fault(RuntimeError):
    """Replay did something that no learner could work with; the message says what."""


class Learner:
    """Rank 0 of one."""

    def __init__(self, config: Config, address: str, board: Board, checkpoint_every: int) -> None:
        self.config, self.board, self.checkpoint_every = config, board, checkpoint_every
        self.trained: set[tuple[int, int]] = set()
        keys, limits = load_keys(config.network.keys), Limits(config.network.max_message_bytes)
        self.dealer = Dealer(address, f"learner-0.{os.getpid()}", m.FROM_REPLAY, limits, keys=keys)

    def join(self) -> None:
        """Say Hello; the incarnation begins."""
        self.dealer.send(m.StatusRequest())  # its answer tells the run id
        self.wait_for(m.Status)
        hello = m.Hello(
            role="learner",
            name="learner-0",
            pid=os.getpid(),
            host=socket.gethostname(),
            fingerprint=run_fingerprint(self.config),
        )
        self.dealer.send(hello)
        self.wait_for(m.Welcome)

    def step(self, step: int) -> None:
        """Take, have, commit, publish."""
        self.dealer.send(m.Take(step=step, rank=0))
        batch = self.wait_for(m.Batch)
        tokens = self.check(batch, step)
        self.dealer.send(m.Take(step=step, rank=0, have=True))
        self.wait_for(m.Proceed)
        self.dealer.send(m.Committed(step=step, digest=f"simulated-{step}"))
        if batch.checkpoint or step % self.checkpoint_every == 0:
            self.dealer.send(m.CursorRequest(step=step))
            self.wait_for(m.Cursor)
            self.dealer.send(m.Checkpointed(step=step, kept=[step]))
        self.dealer.send(m.Published(version=step, digest=f"simulated-{step}"))
        self.board["version"] = step
        self.board.add("tokens", tokens)
        self.board.add("batch_bytes", sum(getattr(batch, name).nbytes for name in batch.ARRAYS))
        self.board["steps"] = step

    def check(self, batch: m.Batch, step: int) -> int:
        """Answer tokens of a batch. Raises Fault when it is not the batch of a step, or has a group a second time."""
        expected = self.config.rollout.groups_per_step
        groups = {(pass_, index) for pass_, index in batch.group_ids}
        tokens = int(batch.lengths.sum())
        if batch.step != step or len(groups) != expected or batch.versions.size != tokens:
            raise Fault(f"batch {batch.step} of {len(groups)} groups came for step {step} of {expected} groups")
        if groups & self.trained:
            raise Fault(f"batch {step} has group {min(groups & self.trained)} a second time")
        self.trained |= groups
        if int(batch.versions.min()) < step - 1 - self.config.replay.async_lag:
            raise Fault(f"batch {step} has a token of version {int(batch.versions.min())}")
        return tokens

    def wait_for(self, kind: type[Kind]) -> Kind:
        """The next message of that kind; heartbeats and the like are passed over."""
        while not self.board["stop"]:
            envelope = self.dealer.poll(POLL_S)
            if envelope is None:
                continue
            if isinstance(envelope.message, kind):
                return envelope.message
            if isinstance(envelope.message, m.Refused | m.Goodbye):
                raise Fault(f"replay: {envelope.message.reason}")
        raise Stopped

    def close(self) -> None:
        """Say Goodbye, which ends the run."""
        self.dealer.send(m.Goodbye(reason="the benchmark is over"))
        self.dealer.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_replay_parts.learner", description=__doc__)
    parser.add_argument("--config", required=True, help="the case's configuration")
    parser.add_argument("--address", required=True)
    parser.add_argument("--board", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, required=True, help="steps")
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    board = Board(args.board)
    learner = Learner(load_config(args.config), args.address, board, args.checkpoint_every)
    try:
        learner.join()
        step = 0
        while not board["stop"]:
            if board["hold"]:
                time.sleep(POLL_S)
                continue
            step += 1
            learner.step(step)
    except Stopped:
        sys.stderr.write("stopped\n")
    except Fault as fault:
        sys.stderr.write(f"learner: {fault}\n")
        return 1
    finally:
        learner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
