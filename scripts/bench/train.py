"""`torchrun -m scripts.bench.train`: one learner rank that runs the phases of the pipeline benchmark.

The loop is that of learner/train.py, and so are replay, the rollout servers and the weight bus. Only the steps of
the idle phase leave the update out: they take, commit and publish as always, so that admission and versions go on
as in a run. After the last step the updates are made once more from batches in memory, while the engines stand
still; nothing of that is committed or published.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from configs.loading import add_arguments, from_arguments
from configs.schema import Config
from learner.batches import BatchReader
from learner.learner import Learner, Update
from learner.ranks import Ranks
from learner.train import leave, stop, train
from replay import messages as m
from replay.channel import Dealer, WireError, load_keys
from replay.lifeline import PARENT, die_with_parent, set_up_logging
from scripts.bench.core import until

log = logging.getLogger(__name__)

Phase = Literal["warmup", "idle", "full"]
FILE = "bench_plan.json"
RESULT = "bench_learner.json"
ALONE_REPEATS = 3
NOTHING = Update({}, applied=False, has_advantage=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps of each phase, in this order. A measured phase runs one step more: its first only refills the pipeline.

    Example: Plan(warmup=2, idle=3, full=3, train=3, quiet_s=60) has 10 steps; steps 4 to 6 give T_roll, 8 to 10
    T_step, and after step 10 four updates on the batches of 8 to 10, without rollouts, give T_train.
    """

    warmup: int
    """Whole steps that nobody counts."""
    idle: int
    """Counted steps in which the update is left out: T_roll."""
    full: int
    """Counted steps as a run makes them: T_step."""
    train: int
    """Counted updates on batches that are already here: T_train."""
    quiet_s: float
    """How long the engines have to finish what they hold before the updates are timed."""

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        return self.warmup + self._length(self.idle) + self._length(self.full)

    def phase(self, step: int) -> Phase:
        """The phase of a step, counted from 1."""
        if step <= self.warmup:
            return "warmup"
        return "idle" if step <= self.warmup + self._length(self.idle) else "full"

    def measured(self, phase: Phase) -> Iterator[int]:
        """Steps of a phase that count."""
        steps = [step for step in range(1, self.total_steps + 1) if self.phase(step) == phase]
        yield from steps[1:]

    def write(self, run_dir: Path) -> None:
        """Leave the plan where the learner ranks look for it."""
        (run_dir / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> "Plan":
        """The plan of a run. Raises FileNotFoundError in the folder of any other run."""
        return cls(**json.loads((run_dir / FILE).read_text(encoding="utf-8")))

    @staticmethod
    def _length(counted: int) -> int:
        return counted + 1 if counted else 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that made all its steps, or as many as there was time for."""

    options: argparse.Namespace
    config: Config
    plan: Plan
    watcher: Any
    learner: Mapping[str, Any] = field(default_factory=dict)
    """What the learner ranks wrote."""
    seconds: float = 0.0
    cut_short: str = ""
    """Why the run did not end by itself; empty when it did."""

    def measured(self, phase: Phase) -> list[int]:
        """Counted steps that were made; of a run that was cut short an even number, for they are pairs."""
        made = [step for step in self.plan.measured(phase) if str(step) in self.learner["committed_at"]]
        return made[: len(made) // 2 * 2] if self.cut_short else made


class BenchLearner(Learner):
    """A learner that leaves updates out where the plan says so, and notes when each step was committed."""

    def __init__(self, config: Config, ranks: Ranks, batches: BatchReader, *, address: str) -> None:
        super().__init__(config, ranks, batches)
        self.plan = Plan.read(Path(config.run_dir))
        self.address = address
        self.kept: list[m.Batch] = []
        self.result: dict[str, Any] = {"committed_at": {}, "trained": {}, "memory": {}, **facts(ranks.device)}

    def update(self, batch: m.Batch) -> Update:
        """The update, or nothing in the idle phase. The batches that count towards T_step are kept."""
        if self.plan.phase(batch.step) == "idle":
            return NOTHING
        if batch.step in self.plan.measured("full"):
            self.kept.append(batch)
        return super().update(batch)

    def commit(self, batch: m.Batch) -> str:
        """As always, with the time of it: the digests lie between the update and the gather."""
        with self.span("commit"):
            digest = super().commit(batch)
        self.result["committed_at"][batch.step] = time.monotonic()
        return digest

    def checkpoint_if_due(self, batch: m.Batch) -> None:
        """No checkpoint; after the last step come the measurements without rollouts."""
        self._write()  # so that a run which is cut short has given what it had measured
        if batch.step == self.plan.total_steps and self.plan.train:
            self.wait_for_broadcast()
            self._wait_for_the_engines()
            self._measure_updates()
            self._measure_parts()

    def finish(self, version: int) -> None:
        """Leave as always, and write what was measured."""
        super().finish(version)
        self.result |= {"memory": self._memory()}
        self._write()

    def _write(self) -> None:
        if self.ranks.is_first:
            path = Path(self.config.run_dir) / RESULT
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self.result) + "\n", encoding="utf-8")
            part.replace(path)

    # ---- without rollouts -------------------------------------------------------------------------------

    def _wait_for_the_engines(self) -> None:
        """Until every admitted group is here and the engines have nothing to do; all ranks wait for rank 0."""
        if self.ranks.is_first:
            self.result["quiet"] = quiet(self.config, self.address, self.plan.quiet_s)
        self._together()

    def _measure_updates(self) -> None:
        """The same batches as in the full phase; the first one twice, because the first update is not counted."""
        order = [self.kept[i % len(self.kept)] for i in range(self.plan.train)]
        seconds = []
        for batch in [order[0], *order]:
            self._together()
            started = time.perf_counter()
            super().update(batch)
            self._synchronize()
            seconds.append(time.perf_counter() - started)
        self.result["trained"] = {"seconds": seconds[1:], "steps": [batch.step for batch in order]}

    def _measure_parts(self) -> None:
        """Parts of a publication by themselves: the gather of all tensors, and the digests of the shards."""
        parts: dict[str, list[float]] = {"gather": [], "digest": []}
        for _ in range(ALONE_REPEATS):
            self._together()
            started = time.perf_counter()
            for _ in self.policy.named_full_tensors(self.config.rollout.dtype):
                pass
            self._synchronize()
            gathered = time.perf_counter()
            self.bus.digests()
            self._synchronize()
            parts["gather"].append(gathered - started)
            parts["digest"].append(time.perf_counter() - gathered)
        self.result["alone"] = parts

    def _together(self) -> None:
        """A barrier that ends with the device idle."""
        dist.all_reduce(torch.zeros(1, device=self.ranks.device))
        self._synchronize()

    def _synchronize(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def _memory(self) -> dict[str, float]:
        """What the fullest rank has taken from the device, in GB (a collective); empty on a CPU.

        The allocator gives nothing back by itself, so at the end this is its peak.
        """
        if self.ranks.device.type != "cuda":
            return {}
        reserved = torch.tensor(
            [torch.cuda.memory_reserved(self.ranks.device)], dtype=torch.float64, device=self.ranks.device
        )
        dist.all_reduce(reserved, op=dist.ReduceOp.MAX)
        return {"learner_reserved_gb": float(reserved.item()) / 1e9}


def quiet(config: Config, address: str, limit_s: float) -> bool:
    """Ask replay until no lease is out and there is no room for one; False when that took longer than the limit."""
    keys = load_keys(config.network.keys)
    with Dealer(address, f"bench.{os.getpid()}", m.FROM_REPLAY, keys=keys) as dealer:

        def is_quiet() -> bool:
            dealer.send(m.StatusRequest())
            try:
                envelope = dealer.poll(0.2)
            except WireError as error:
                log.warning("status of replay: %s", error)
                return False
            if envelope is None or not isinstance(envelope.message, m.Status):
                return False
            groups = envelope.message.state["groups"]
            return bool(groups["leased"] == 0 and groups["buffered"] + groups["taken"] >= groups["max"])

        if until(is_quiet, limit_s):
            return True
    log.warning("the engines were still busy after %g s: the updates are timed beside them", limit_s)
    return False


def facts(device: torch.device) -> dict[str, Any]:
    """What this rank ran on."""
    if device.type != "cuda":
        return {"learner_device": "cpu", "nccl": None}
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"learner_device": torch.cuda.get_device_name(device), "nccl": version}


def main() -> NoReturn:
    """Entry point of one rank."""
    parser = argparse.ArgumentParser(prog="torchrun -m scripts.bench.train", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--replay", required=True, help="address of replay, tcp://host:port")
    args = parser.parse_args()
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    rank = os.environ.get("RANK", "0")
    try:
        config = from_arguments(args)
        set_up_logging(f"learner-{rank}", config.run_dir)
        train(config, args.replay, resume=False, make_learner=partial(BenchLearner, address=args.replay))
    except Exception as error:  # the edge of the process: whatever it is, the log names it and the run ends
        log.exception("the benchmark failed")
        stop(rank, error)
    leave(0)


if __name__ == "__main__":
    main()
