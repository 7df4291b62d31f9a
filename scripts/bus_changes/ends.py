"""The two processes at the ends of a link: `python -m scripts.bus_changes.ends publisher|subscriber JOB PARENT`.

JOB is a file of JSON (`Job`). The publisher makes versions of real AdamW steps and sends them, one pass for each
compression; both write what they saw beside it.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.lifeline import die_with_parent, set_up_logging
from scripts.bench_bus_parts import steps
from scripts.bus_changes.namespaces import ADDRESSES
from weight_bus import BusClosed, Publisher, Subscriber
from weight_bus.digest import Part, slice_digests

RUN = "bus-changes-link"
NAME = "engine"
FIRST_PORT = 5801
JOIN_S, MAKE_S = 60.0, 600.0
STEPS_BEFORE = 40
KEPT = 3
BETWEEN_S = 0.3
"""Pause between versions, so that what one leaves behind does not count for the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ends do. Example: Job(model="/tmp/m", versions=14, lr=1e-6, seed=1, bucket_bytes=8388608)"""

    model: str
    """A folder of safetensors."""
    versions: int
    lr: float
    seed: int
    bucket_bytes: int
    threads: int = 1
    """Of torch, at each end."""
    compressions: list[str] = field(default_factory=lambda: ["none"])

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def configs(self) -> Iterable[tuple[str, WeightBus]]:
        """(compression, settings) of each pass; every second version travels whole."""
        for number, compression in enumerate(self.compressions):
            settings: dict[str, Any] = {"compression": compression, "bucket_bytes": self.bucket_bytes}
            settings |= {"delta": True, "full_every": 2, "port": FIRST_PORT + number}
            yield compression, WeightBus(**settings, deadline_s=120.0, collective_timeout_s=30.0)


def publish(job: Job, out: Path) -> None:
    """All passes. Raises TimeoutError when nobody comes, RuntimeError when a version is not served."""
    cpu = torch.device("cpu")
    made = steps.versions(Path(job.model), before=STEPS_BEFORE, count=KEPT, lr=job.lr, device=cpu, seed=job.seed)
    passes: dict[str, list[dict[str, float]]] = {}
    for compression, config in job.configs():
        # nobody else is in these namespaces, so nothing is encrypted
        with Publisher(config, host=ADDRESSES[0], run_id=RUN, incarnation=1, insecure=True) as publisher:
            deadline = time.monotonic() + JOIN_S
            while not publisher.members():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no subscriber joined within {JOIN_S:.0f} s")
                time.sleep(0.01)
            rows = passes[compression] = []
            for number in range(job.versions):
                at = number % (
                    2 * KEPT - 2
                )  # to and fro, as a jump from the last back to the first would be a long one
                rows.append(_published(publisher, number, made[min(at, 2 * KEPT - 2 - at)]))
                time.sleep(BETWEEN_S)
    out.write_text(json.dumps({"passes": passes, "density": steps.density(made[0], made[1])}), encoding="utf-8")


def _published(publisher: Publisher, number: int, version: steps.Version) -> dict[str, float]:
    names = list(version)
    digests = dict(zip(names, slice_digests(Part(version[name]) for name in names), strict=True))
    used = time.process_time()
    report = publisher.publish(number, version.items(), digests)
    if report.served != [NAME]:
        raise RuntimeError(f"v{number} is not served: {report.failed}")
    phases = {f"{phase}_s": seconds for phase, seconds in report.seconds.items()}
    return {"bytes": report.num_bytes, "cpu_s": time.process_time() - used, **phases}


class Engine:
    """Live weights that nobody samples from; what it holds is digested where it lies."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}

    def load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        """See `weight_bus.intake.Load`."""
        for name, tensor in named_tensors:
            if name in self._live:
                self._live[name].copy_(tensor)
            else:
                self._live[name] = tensor.clone()
        return dict(zip(self._live, slice_digests(Part(tensor) for tensor in self._live.values()), strict=True))

    def activate(self, version: int, evaluate: bool) -> None:
        """Nobody samples."""

    def quarantine(self, version: int, reason: str) -> None:
        """Raises RuntimeError: nothing may go wrong here."""
        raise RuntimeError(f"v{version}: {reason}")


def subscribe(job: Job, out: Path) -> None:
    """All passes, each until the publisher says goodbye."""
    cpu_s: dict[str, float] = {}
    for compression, config in job.configs():
        address, engine = f"tcp://{ADDRESSES[0]}:{config.port}", Engine()
        used = time.process_time()
        with Subscriber(address, name=NAME, config=config, host=ADDRESSES[1], run_id=RUN) as subscriber:
            try:
                while True:
                    subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
            except BusClosed:
                cpu_s[compression] = time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out.write_text(json.dumps({"cpu_s": cpu_s, "peak_mb": peak / 1000}), encoding="utf-8")


def main() -> int:
    """Entry point of either end."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bus_changes.ends", description=__doc__)
    parser.add_argument("role", choices=["publisher", "subscriber"])
    parser.add_argument("job", type=Path)
    parser.add_argument("parent", type=int)
    args = parser.parse_args()
    die_with_parent(args.parent)
    set_up_logging(args.role, None)
    job = Job(**json.loads(args.job.read_text(encoding="utf-8")))
    torch.set_num_threads(job.threads)
    (publish if args.role == "publisher" else subscribe)(job, args.job.with_name(f"{args.role}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
