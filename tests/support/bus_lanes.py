"""A learner of several senders and engines of several scheduler ranks, without a model or SGLang: threads or processes.

As a process: `python -m tests.support.bus_lanes sender ADDRESS SESSION RANK SENDERS POSITIONS [FAULT ...]` packs
what it is told on its standard input ("VERSION SET" a line), or `... scheduler SOCKET [FAULT ...]` receives for one
scheduler rank. FAULT is ACTION@UPDATE[:POINT] as in bus_receiver.
"""

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from rollout_server.engines.sglang.update.receiver import Receiver
from tests.support.bus_receiver import CONFIG, HOST, ROOT, RUN, Engine, Rollout, Watched, Weights, planned, strike
from weight_bus import Publisher, PublishReport
from weight_bus.digest import add, slice_digest
from weight_bus.lane_sender import LaneSender
from weight_bus.lanes import Lane, Slice, joined, plan_lanes, whole
from weight_bus.packing import Pieces
from weight_bus.remote import ReceiverConnection, RemoteIntake, RemoteUpdate
from weight_bus.staging import NAMES, view_of
from weight_bus.transports import Transport, TransportFactory, make_transport

CPU = torch.device("cpu")
TP = "tp"
"""Rows of `rows`, columns of `columns`, the experts each on one rank, all of the others."""


def moe(version: int, *, rows: int = 240, experts: int = 4) -> Weights:
    """Matrices that are divided by rows and by columns, experts, and norms."""
    generator = torch.Generator().manual_seed(version)
    named = {
        f"layers.{i}.{kind}.weight": torch.randn(rows, 96, generator=generator) for i in range(2) for kind in SPLIT
    }
    named |= {f"layers.0.experts.{i}.weight": torch.randn(rows, 40, generator=generator) for i in range(experts)}
    named["norm.weight"] = torch.randn(33, generator=generator)
    return {name: tensor.bfloat16() for name, tensor in named.items()}


SPLIT = {"rows": 0, "columns": 1}


def wanted(named: Weights, positions: int) -> list[list[Slice]]:
    """What each scheduler rank needs."""
    found: list[list[Slice]] = [[] for _ in range(positions)]
    for name, tensor in named.items():
        all_of = whole(name, NAMES[tensor.dtype], tensor.shape)
        parts = name.split(".")
        if "experts" in parts and positions > 1:
            found[int(parts[3]) % positions].append(all_of)
            continue
        dim = SPLIT.get(parts[-2]) if positions > 1 else None
        for position in range(positions):
            piece = all_of
            if dim is not None:
                size = tensor.shape[dim] // positions
                piece = all_of._replace(
                    start=tuple(position * size if d == dim else 0 for d in range(2)),
                    shape=tuple(size if d == dim else n for d, n in enumerate(tensor.shape)),
                )
            found[position].append(piece)
    return found


def cut(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def lanes_of(senders: int, positions: int, config: WeightBus = CONFIG) -> tuple[Lane, ...]:
    return plan_lanes(wanted(moe(0), positions), senders, config.bucket_bytes)


def pieces(lanes: Sequence[Lane], rank: int, named: Weights) -> Iterator[tuple[str, Pieces]]:
    """What a learner rank packs, each in two parts of rows."""
    for entry in joined([lane.layout for lane in lanes if lane.sender == rank]).layout.entries:
        part = cut(named[entry.name], entry.start, entry.shape)
        half = -(-len(part) // 2)
        yield (
            entry.name,
            Pieces(entry.shape, part.dtype, [part[half:], part[:half]], [(slice(half, None),), (slice(0, half),)]),
        )


def slice_digests(lanes: Sequence[Lane], named: Weights) -> dict[tuple[str, tuple[int, ...]], int]:
    entries = [entry for lane in lanes for entry in lane.layout.entries]
    return {(e.name, e.start): slice_digest(cut(named[e.name], e.start, e.shape), e.whole, e.start) for e in entries}


class ShardedEngine(Engine):
    """Each scheduler rank holds its slices; their digests add up."""

    def load_slices(
        self, version: int, update: RemoteUpdate, buckets: Callable[[int, int, int], torch.Tensor]
    ) -> Mapping[str, int]:
        self.loads += 1
        self.ranks: list[dict[str, torch.Tensor]] = []
        parts: dict[str, dict[tuple[int, ...], int]] = {}
        for position, its in enumerate(update.slices or (update,)):
            memory = [buckets(position, number, one["take"]) for number, one in enumerate(its.memory)]
            held = {entry.name: (entry, view_of(memory, entry).clone()) for entry in its.entries}
            self.ranks.append({name: tensor for name, (_, tensor) in held.items()})
            self._spoil(version, self.ranks[-1])
            for name, (entry, _) in held.items():
                live = self.ranks[-1][name]
                parts.setdefault(name, {})[entry.start] = slice_digest(live, entry.whole, entry.start)
        return {name: add(list(pieces.values())) for name, pieces in parts.items()}


class Learner:
    """The senders of a learner: rank 0's publisher here, the others threads or processes."""

    def __init__(
        self,
        senders: int,
        positions: int,
        config: WeightBus = CONFIG,
        *,
        processes: bool = False,
        faults: Mapping[int, Sequence[str]] | None = None,
        factory: TransportFactory | None = None,
    ) -> None:
        self.lanes, self.stack = lanes_of(senders, positions, config), ExitStack()
        self.publisher = self.stack.enter_context(
            Publisher(config, host=HOST, run_id=RUN, incarnation=1, lanes=self.lanes, transport_factory=factory)
        )
        self.senders: dict[int, Any] = {}
        for rank in sorted({lane.sender for lane in self.lanes} - {0}):
            options = {"address": self.publisher.address, "session": self.publisher.session, "rank": rank}
            if processes:
                words = ["sender", options["address"], options["session"], str(rank), str(senders), str(positions)]
                self.senders[rank] = self.stack.enter_context(process(*words, *(faults or {}).get(rank, ())))
            else:
                self.senders[rank] = self.stack.enter_context(sender(options, self.lanes, config, factory))

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start(self, version: int, **shape: Any) -> None:
        named = moe(version, **shape)
        into = self.publisher.spare(version)
        threads = []
        for rank, its in self.senders.items():
            if isinstance(its, LaneSender):
                pack = threading.Thread(target=its.pack, args=(version, into, pieces(self.lanes, rank, named)))
                pack.start()
                threads.append(pack)
            else:
                its.stdin.write(f"{version} {into}\n")
                its.stdin.flush()
        wholes = {name: slice_digest(tensor) for name, tensor in named.items()}
        tensors, slices = pieces(self.lanes, 0, named), slice_digests(self.lanes, named)
        self.publisher.start_publish(version, tensors, wholes, slices=slices)
        for pack in threads:
            pack.join()

    def publish(self, version: int) -> PublishReport:
        self.start(version)
        return self.publisher.wait()


def sender(
    options: Mapping[str, Any], lanes: Sequence[Lane], config: WeightBus, factory: TransportFactory | None = None
) -> LaneSender:
    return LaneSender(config, lanes=lanes, host=HOST, run_id=RUN, incarnation=1, transport_factory=factory, **options)


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.bus_lanes", *words]
    made = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait(10.0)


class Schedulers:
    """The scheduler ranks of an engine, and the lines to them."""

    def __init__(
        self,
        folder: Path,
        positions: int,
        config: WeightBus = CONFIG,
        factory: Callable[[int], TransportFactory] = lambda _: make_transport,
    ) -> None:
        self.receivers, self.lines = [], []
        for position in range(positions):
            path = folder / f"{secrets.token_hex(4)}.sock"
            order = {"socket": str(path), "config": config.model_dump(), "host": HOST, "export": False}
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(1)
                self.receivers.append(Receiver(order, CPU, None, factory(position)))
                self.receivers[-1].start()
                self.lines.append(ReceiverConnection.accept(listener, 20.0))

    def bucket(self, position: int, number: int, take: int) -> torch.Tensor:
        return self.receivers[position].bucket(number, take)

    def close(self) -> None:
        for line in self.lines:
            line.close()


def engine(
    publisher: Publisher,
    name: str,
    schedulers: Schedulers,
    config: WeightBus = CONFIG,
    made: ShardedEngine | None = None,
    **options: Any,
) -> Rollout:
    """A rollout server of several scheduler ranks."""
    holder = made or ShardedEngine()
    load = lambda version, update: holder.load_slices(version, update, schedulers.bucket)  # noqa: E731
    intake = RemoteIntake(lambda: schedulers.lines, config, RUN, load)
    return Rollout(publisher, name, holder, config=config, intake=intake, **options)


def main(role: str, *words: str) -> None:
    if role == "sender":
        address, session, rank, senders, positions, *faults = words
        plan = dict(map(planned, faults))

        def come(update: int, point: str, transport: Transport) -> None:
            if (update, point) in plan:
                strike(plan[update, point], transport)

        lanes = lanes_of(int(senders), int(positions))
        options = {"address": address, "session": session, "rank": int(rank)}
        with sender(options, lanes, CONFIG, lambda config, host: Watched(make_transport(config, host), come)) as made:
            for line in sys.stdin:
                version, into = map(int, line.split())
                made.pack(version, into, pieces(lanes, int(rank), moe(version)))


if __name__ == "__main__":
    main(*sys.argv[1:])
