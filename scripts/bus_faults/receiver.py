"""Receivers of the bus as processes: `python -m scripts.bus_faults.receiver ADDRESS CONFIG` forks one for each line.

A line of standard input is `NAME FOLDER`; the answer is its pid. Forked, because importing torch anew for each of a
hundred receivers would take longer than their faults. FOLDER gets its gate, its log and events.jsonl: one line for each
version that it was told to serve, with a digest of what it held then. Everything ends with standard input.
"""

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from configs.infrastructure import WeightBus
from replay.lifeline import die_with_parent
from scripts.bus_faults.gates import Gate, install
from weight_bus import BusClosed, RemovedFromBus
from weight_bus.digest import slice_digest

HOST = "127.0.0.1"
RUN = "bus-faults"
SHAPES = {"first": (64, 256), "middle": (1024, 1024), "between": (64, 256), "last": (1024, 1024), "norm": (33,)}
"""Float32, a bucket each. 4 MB is more than the kernel's socket buffers take: there a sender really waits for its peer.
The others are small, so that a busy machine has time for a hundred faults."""

Weights = dict[str, torch.Tensor]


def weights(version: int) -> Weights:
    """The tensors of a version, the same in every process."""
    rng = torch.Generator().manual_seed(version)
    return {name: torch.rand(shape, generator=rng) for name, shape in SHAPES.items()}


def bytes_digest(named: Mapping[str, torch.Tensor]) -> str:
    """Of all bytes by name, with nothing of the bus's own digests in it."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(named):
        state.update(name.encode())
        state.update(named[name].view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Engine:
    """Holds copies of what it was sent, and notes what it is told to serve."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._live: Weights = {}

    def load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        """See `weight_bus.intake.Load`."""
        for name, tensor in named_tensors:
            self._live[name] = tensor.clone()
        return {name: slice_digest(tensor) for name, tensor in self._live.items()}

    def activate(self, version: int, _evaluate: bool) -> None:
        """Note the version and what is held."""
        line = json.dumps({"pid": os.getpid(), "live": version, "digest": bytes_digest(self._live)})
        with self._events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def quarantine(self, version: int, reason: str) -> None:
        """Nothing is served here that could be stopped."""


def receive(address: str, config: WeightBus, name: str, folder: Path) -> NoReturn:
    """The life of one receiver, in its own process."""
    die_with_parent()
    logging.basicConfig(filename=folder / "receiver.log", format="%(asctime)s %(message)s", level=logging.INFO)
    install(Gate(folder))
    from weight_bus import subscriber  # after the gate was put into it

    engine = Engine(folder / "events.jsonl")
    receiving = subscriber.Subscriber(address, name=name, config=config, host=HOST, run_id=RUN)
    try:
        while True:
            receiving.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
    except (BusClosed, RemovedFromBus) as error:
        logging.info("ended: %s", error)
        os._exit(0)
    except BaseException:
        logging.exception("failed")
        os._exit(1)


def main() -> None:
    """Fork on demand."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    torch.set_num_threads(1)
    address, config = sys.argv[1], WeightBus.model_validate_json(sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        name, folder = line.strip().split(" ", 1)
        pid = os.fork()
        if pid == 0:
            receive(address, config, name, Path(folder))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
