"""A learner of several senders, and engines of several scheduler ranks without SGLang: threads or processes.

As a process: `python -m tests.support.bus_lanes sender ADDRESS SESSION RANK SENDERS POSITIONS SCALE [FAULT ...]` packs
what it is told on its standard input ("VERSION SET" a line); `... scheduler FOLDER RANK RANKS SCALE [FAULT ...]` is a
scheduler whose live tensors lie as SGLang's do, and carries out an order of the staging folder a line. Each says what
memory it has. FAULT is ACTION@UPDATE:POINT, once, ACTION stop | kill | cut | slow | corrupt, POINT as in bus_receiver,
or `meeting`, before the members of a group meet, or `joining`, once they have.
"""

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from configs.infrastructure import WeightBus
from rollout_server.engines.sglang.update import receiver
from rollout_server.engines.sglang.update.orders import FOLDER, StagingFolder
from rollout_server.engines.sglang.update.receiver import Receiver
from slipstream.families import names
from slipstream.families.sizes import Sizes
from tests.support.bus_receiver import CONFIG, HOST, ROOT, RUN, Engine, Faulty, Rollout, Weights, strike
from tests.support.idle_scheduler import idle_scheduler
from tests.support.waiting import until
from weight_bus import Publisher, PublishReport
from weight_bus.digest import add, slice_digest
from weight_bus.lane_sender import LaneSender
from weight_bus.lanes import Lane, Slice, joined, plan_lanes, whole
from weight_bus.packing import Pieces
from weight_bus.remote import ReceiverConnection, RemoteIntake, RemoteUpdate
from weight_bus.staging import view_of
from weight_bus.transports import Formation, TransportFactory, make_transport
from weight_bus.transports.base import ignore

CPU = torch.device("cpu")
EMPTY = torch.empty(0)
BUS = CONFIG.model_copy(update={"bucket_bytes": 30_000})
KEYS = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 128,
}


def shape(scale: int = 1) -> Sizes:
    """A mixture of experts; matrices are about `scale`² times as large."""
    sizes = {"hidden_size": 64 * scale, "moe_intermediate_size": 32 * scale, "vocab_size": 200 * scale}
    return Sizes.of({**KEYS, **sizes})


def moe(version: int, scale: int = 1) -> Weights:
    """Its logical tensors."""
    generator = torch.Generator().manual_seed(version)
    return {n: torch.randn(size, generator=generator).bfloat16() for n, size in shape(scale).tensors()}


def place(rank: int, ranks: int) -> names.Place:
    """Experts are divided by number over two ranks, and inside over the rest."""
    return names.Place(rank, ranks, min(ranks, 2))


def wanted(positions: int, scale: int = 1) -> list[list[Slice]]:
    """What each scheduler rank needs."""
    if positions == 1:
        return [[whole(name, "bfloat16", size) for name, size in shape(scale).tensors()]]
    parts = [names.held(shape(scale), place(rank, positions)) for rank in range(positions)]
    return [[Slice(p.name, "bfloat16", p.shape, p.start, p.size) for p in its] for its in parts]


def cut(tensor: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]


def lanes_of(senders: int, positions: int, scale: int = 1, config: WeightBus = BUS) -> tuple[Lane, ...]:
    return plan_lanes(wanted(positions, scale), senders, config.bucket_bytes)


def pieces(lanes: Sequence[Lane], rank: int, named: Weights) -> Iterator[tuple[str, Pieces]]:
    """What a learner rank packs, each in two parts of rows."""
    for entry in joined([lane.layout for lane in lanes if lane.sender == rank]).layout.entries:
        part = cut(named[entry.name], entry.start, entry.shape)
        half = -(-len(part) // 2)
        halves = [(slice(half, None),), (slice(0, half),)]
        yield entry.name, Pieces(entry.shape, part.dtype, [part[half:], part[:half]], halves)


def slice_digests(lanes: Sequence[Lane], named: Weights) -> dict[tuple[str, tuple[int, ...]], int]:
    entries = [entry for lane in lanes for entry in lane.layout.entries]
    return {(e.name, e.start): slice_digest(cut(named[e.name], e.start, e.shape), e.whole, e.start) for e in entries}


class Learner:
    """The senders of a learner: rank 0's publisher here, the others threads or processes."""

    def __init__(
        self,
        senders: int,
        positions: int,
        *,
        scale: int = 1,
        config: WeightBus = BUS,
        processes: bool = False,
        faults: Sequence[str] = (),
        factory: TransportFactory | None = None,
    ) -> None:
        """`faults` are of rank 1's process."""
        self.lanes, self.scale, self.stack = lanes_of(senders, positions, scale, config), scale, ExitStack()
        self.publisher = self.stack.enter_context(
            Publisher(config, host=HOST, run_id=RUN, incarnation=1, lanes=self.lanes, transport_factory=factory)
        )
        self.senders: dict[int, Any] = {}
        for rank in sorted({lane.sender for lane in self.lanes} - {0}):
            options = {"address": self.publisher.address, "session": self.publisher.session, "rank": rank}
            if processes:
                words = ["sender", *map(str, (*options.values(), senders, positions, scale))]
                its: Any = process(*words, *(faults if rank == 1 else ()))
            else:
                its = sender(options, self.lanes, factory, config)
            self.senders[rank] = self.stack.enter_context(its)
        until(lambda: not self.publisher._bus._senders.missing, "all senders are there", 60.0)

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start(self, version: int) -> None:
        """Pack a version on every rank."""
        named, into, threads = moe(version, self.scale), self.publisher.spare(version), []
        for rank, its in self.senders.items():
            if isinstance(its, LaneSender):
                pack = threading.Thread(target=its.pack, args=(version, into, pieces(self.lanes, rank, named)))
                pack.start()
                threads.append(pack)
            elif its.poll() is None:
                its.tell(f"{version} {into}")
        wholes, slices = {n: slice_digest(t) for n, t in named.items()}, slice_digests(self.lanes, named)
        self.publisher.start_publish(version, pieces(self.lanes, 0, named), wholes, slices=slices)
        for pack in threads:
            pack.join()

    def publish(self, version: int) -> PublishReport:
        self.start(version)
        return self.publisher.wait()


def sender(
    options: Mapping[str, Any], lanes: Sequence[Lane], factory: TransportFactory | None = None, config: WeightBus = BUS
) -> LaneSender:
    return LaneSender(config, lanes=lanes, host=HOST, run_id=RUN, incarnation=1, transport_factory=factory, **options)


class Process(subprocess.Popen[str]):
    """One that takes a line and answers with a line."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "tests.support.bus_lanes", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        super().__init__(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environment)

    def tell(self, line: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """What it answers. Raises OSError: it is gone."""
        assert self.stdout is not None
        if not (line := self.stdout.readline()):
            raise ConnectionResetError("the process has ended")
        return dict(json.loads(line))


@contextmanager
def process(*words: str) -> Iterator[Process]:
    made = Process(*words)
    try:
        yield made
    finally:
        made.kill()
        made.communicate(timeout=10.0)


class ShardedEngine(Engine):
    """Each scheduler rank holds copies of its slices; their digests add up."""

    def __init__(self, *spoil: Any) -> None:
        super().__init__(*spoil)
        self.ranks: list[dict[str, torch.Tensor]] = []

    def load_slices(self, bucket: Callable[..., torch.Tensor], version: int, update: RemoteUpdate) -> Mapping[str, int]:
        self.loads, self.ranks = self.loads + 1, []
        parts: dict[str, dict[tuple[int, ...], int]] = {}
        for position, its in enumerate(update.slices or (update,)):
            memory = [bucket(position, number, one["take"]) for number, one in enumerate(its.memory)]
            live = {entry.name: view_of(memory, entry).clone() for entry in its.entries}
            self._spoil(version, live)
            self.ranks.append(live)
            for e in its.entries:
                parts.setdefault(e.name, {})[e.start] = slice_digest(live[e.name], e.whole, e.start)
        return {name: add([*found.values()]) for name, found in parts.items()}


class Schedulers:
    """Receivers of an engine's scheduler ranks, as threads, and the lines to them."""

    def __init__(
        self, folder: Path, positions: int, factory: Callable[[int], TransportFactory] = lambda _: make_transport
    ) -> None:
        self.receivers: list[Receiver] = []
        self.lines: list[ReceiverConnection] = []
        for position in range(positions):
            with listening(folder) as (path, listener):
                order = {"socket": str(path), "config": BUS.model_dump(), "host": HOST, "export": False}
                self.receivers.append(Receiver(order, CPU, None, factory(position)))
                self.receivers[-1].start()
                self.lines.append(ReceiverConnection.accept(listener, 20.0))

    def bucket(self, position: int, number: int, take: int) -> torch.Tensor:
        return self.receivers[position].bucket(number, take)

    def join(self, publisher: Publisher, name: str, engine: ShardedEngine | None = None) -> Rollout:
        """A rollout server with these."""
        holder = engine or ShardedEngine()
        load = partial(holder.load_slices, self.bucket)
        intake = RemoteIntake(lambda: self.lines, BUS, RUN, load)
        return Rollout(publisher, name, holder, config=BUS, intake=intake)

    def __enter__(self) -> "Schedulers":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()


@contextmanager
def listening(folder: Path) -> Iterator[tuple[Path, socket.socket]]:
    path = folder / f"{secrets.token_hex(4)}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        yield path, listener


class SchedulerProcesses:
    """The scheduler ranks of an engine as processes, which load and digest as inside SGLang."""

    def __init__(self, positions: int, *, scale: int = 1, config: WeightBus = BUS, faults: Sequence[str] = ()) -> None:
        """`faults` are of the last rank."""
        self.stack, self.staging = ExitStack(), StagingFolder()
        self.stack.callback(self.staging.close)
        words = [("scheduler", str(self.staging.path), str(n), str(positions), str(scale)) for n in range(positions)]
        ends = [(), *[()] * (positions - 2), faults][-positions:]
        self.processes = [self.stack.enter_context(process(*w, *f)) for w, f in zip(words, ends, strict=True)]
        self.memory: list[dict[str, Any]] = []
        self._config = config
        self.lines: list[ReceiverConnection] = []

    def connect(self) -> list[ReceiverConnection]:
        if not self.lines:
            with ExitStack() as stack:
                ends = [stack.enter_context(listening(self.staging.path)) for _ in self.processes]
                paths = [path for path, _ in ends]
                self.staging.write_receiver(paths, self._config.model_dump(), HOST, export=False)
                self._carry_out()
                self.lines = [ReceiverConnection.accept(listener, 20.0) for _, listener in ends]
        return self.lines

    def load(self, version: int, update: RemoteUpdate) -> Mapping[str, int]:
        self.staging.write_update(update)
        self.memory = self._carry_out()
        replies = self.staging.replies(len(self.processes))
        for reply in replies:
            if reply["error"]:
                raise ValueError(reply["error"])
        return self.staging.digests(replies)

    def _carry_out(self) -> list[dict[str, Any]]:
        for one in self.processes:
            one.tell("")
        return [one.hear() for one in self.processes]

    def join(self, publisher: Publisher, name: str) -> Rollout:
        intake = RemoteIntake(self.connect, self._config, RUN, self.load)
        return Rollout(publisher, name, config=self._config, intake=intake)

    def __enter__(self) -> "SchedulerProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()
        self.stack.close()


# ---- as a process ---------------------------------------------------------------------------------------


class Struck(Faulty):
    """A transport with faults at points of its updates."""

    def __init__(self, inner: Any, plan: dict[tuple[int, str], str]) -> None:
        super().__init__(inner, -1, lambda _: None, before=True)
        self._plan, self._update = plan, 1
        self._meet, inner._meeting.show_up = inner._meeting.show_up, self._show_up

    def form(self, formation: Formation) -> None:
        self._strike("meeting")
        self._inner.form(formation)

    def _show_up(self, *meeting: Any) -> None:
        self._meet(*meeting)
        self._strike("joining")

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        damaged = self._strike(f"before-{index}", bucket)
        super().broadcast(damaged, index)  # of a sender: what it keeps is as it was
        bucket.copy_(self._strike(f"after-{index}", bucket))

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self._strike("closing")
        self._inner.finish(arrived)
        self._update += 1

    def _strike(self, point: str, bucket: torch.Tensor = EMPTY) -> torch.Tensor:
        match self._plan.pop((self._update, point), None):
            case "slow":
                time.sleep(2 * BUS.collective_timeout_s)
            case "corrupt":
                bucket = bucket.clone()
                bucket[5] ^= 1
            case str() as action:
                strike(action, self._inner)
        return bucket


def struck(faults: Sequence[str]) -> TransportFactory:
    plan = {}
    for fault in faults:
        action, _, when = fault.partition("@")
        update, _, point = when.partition(":")
        plan[int(update), point] = action
    return lambda config, host: Struck(make_transport(config, host), plan)


def live_model(rank: int, ranks: int, scale: int) -> torch.nn.Module:
    """Live tensors as SGLang has them, with nothing in them."""
    sizes, where, tensors = shape(scale), place(rank, ranks), dict[str, list[int]]()
    for part in names.held(sizes, where):
        block = (*(1,) * (len(part.at) - len(part.size)), *part.size)
        ends = [first + size for first, size in zip(part.at, block, strict=True)]
        tensors[part.holder] = [*map(max, ends, tensors.get(part.holder, ends))]
    model: Any = torch.nn.Module()
    for path, size in tensors.items():
        *modules, leaf = path.split(".")
        module = model
        for name in modules:
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        padded = leaf == "weight" and modules[-1] in ("embed_tokens", "lm_head")
        rows = -(-size[0] // names.PADDING) * names.PADDING if padded else size[0]
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(rows, *size[1:], dtype=torch.bfloat16)))
        module.shard_indices = object() if padded else None
    model.config = SimpleNamespace(to_dict=lambda: sizes.keys)
    model.tp_rank, model.tp_size, model.moe_ep_size = rank, ranks, where.expert_ranks
    return model  # type: ignore[no-any-return]


def memory(buckets: Sequence[torch.Tensor], **more: int) -> str:
    """Bytes of buckets, and of the process at its peak."""
    until(opens_files, "it opens files again")
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return json.dumps({"buckets": sum(b.numel() for b in buckets), "peak": int(peak.split()[1]) << 10, **more})


def opens_files() -> bool:
    """Whether this process is not cut off."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 3


def be_sender(address: str, session: str, rank: str, senders: str, positions: str, scale: str, *faults: str) -> None:
    lanes, me = lanes_of(int(senders), int(positions), int(scale)), int(rank)
    with sender({"address": address, "session": session, "rank": me}, lanes, struck(faults)) as made:
        for line in sys.stdin:
            version, into = map(int, line.split())
            made.pack(version, into, pieces(lanes, me, moe(version, int(scale))))
            print(memory([b for its in made._packer._sets for b in its]), flush=True)


def be_scheduler(folder: str, rank: str, ranks: str, scale: str, *faults: str) -> None:
    os.environ[FOLDER] = folder
    from rollout_server.engines.sglang.update import armed, loader

    armed.scheduler = idle_scheduler()
    torch.distributed.get_rank = lambda: int(rank)  # type: ignore[assignment]
    receiver.Receiver = partial(Receiver, transport_factory=struck(faults))  # type: ignore[misc, assignment]
    model = live_model(int(rank), int(ranks), int(scale))
    live = sum(parameter.nbytes for parameter in model.parameters())
    for _ in sys.stdin:
        until(opens_files, "it opens files again")
        loader.apply(model, [])
        its = receiver._receiver
        staged = its._intake.staging.buckets if its is not None and its._intake is not None else []
        print(memory(staged, live=live), flush=True)


if __name__ == "__main__":
    {"sender": be_sender, "scheduler": be_scheduler}[sys.argv[1]](*sys.argv[2:])
