"""A receiver of the weight bus for tests, as a thread or a process, with a scripted engine and faults of its transport.

As a process: `python -m tests.support.bus_receiver ADDRESS NAME [ACTION@UPDATE[:POINT] ...]`, ACTION stop | kill | cut
at a point of the UPDATE-th update that it receives: `before-N` or `after-N`, around the call that receives bucket N
(from 0; before-1 where nothing is said), or `closing`, when all of them are under way. It prints one line per activated
version, version and digest; at the end why it ended. BUS_CONFIG in the environment holds JSON with other values for the
weight_bus section.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from configs.infrastructure import WeightBus
from tests.support.forking import Started, Zygote
from tests.support.waiting import until
from weight_bus import BusClosed, Publisher, PublishReport, RemovedFromBus, Subscriber, TransportError
from weight_bus.digest import combined, slice_digest
from weight_bus.transports import Formation, Transport, TransportFactory, make_transport
from weight_bus.transports.base import group_prefix, ignore

CONFIG = WeightBus(bucket_bytes=600_000, deadline_s=8.0, collective_timeout_s=1.5, heartbeat_s=0.5, max_heals=2)
RUN = "bus-test"
HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
CUT_S = 5.0
"""For which a process that was cut off makes no connection."""
NO_BUCKET = -1

Weights = dict[str, torch.Tensor]


def weights(version: int, *, rows: int = 500, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Five matrices and a scalar-like vector that differ in every version."""
    generator = torch.Generator().manual_seed(version)
    named = {f"layers.{i}.weight": torch.randn(rows, 257, generator=generator).to(dtype) for i in range(5)}
    named["norm.weight"] = torch.randn(33, generator=generator)
    return named


def digests(named: Weights) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in named.items()}


class Engine:
    """Holds copies; `spoil` may change the live tensors after they were applied."""

    def __init__(self, spoil: Callable[[int, Weights], None] = lambda version, live: None) -> None:
        self.live: Weights = {}
        self.activated: list[int] = []
        self.evaluated: list[int] = []
        self.quarantined: list[tuple[int, str]] = []
        self.loads = 0
        self.busy: tuple[float, str] | None = None
        self._spoil = spoil

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        self.loads += 1
        for name, tensor in named_tensors:
            self.live[name] = tensor.clone()
        self._spoil(version, self.live)
        return digests(self.live)

    def activate(self, version: int, evaluate: bool) -> None:
        self.activated.append(version)
        if evaluate:
            self.evaluated.append(version)

    def quarantine(self, version: int, reason: str) -> None:
        self.quarantined.append((version, reason))


def once(fault: Callable[[Weights], object]) -> Callable[[int, Weights], None]:
    """A `spoil` that has this fault in the first load alone."""
    faults = iter([fault])

    def spoil(version: int, live: Weights) -> None:
        for each in faults:
            each(live)

    return spoil


class Faulty:
    """A transport with a fault around the broadcast of one bucket."""

    def __init__(self, inner: Transport, bucket: int, fault: Callable[[torch.Tensor], None], *, before: bool) -> None:
        self._inner, self._bucket, self._fault, self._before = inner, bucket, fault, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if self._before and index == self._bucket:
            self._fault(bucket)
        self._inner.broadcast(bucket, index)
        if not self._before and index == self._bucket:
            self._fault(bucket)


def faulty(bucket: int, fault: Callable[[torch.Tensor], None], *, before: bool = False) -> TransportFactory:
    return lambda config, host: Faulty(make_transport(config, host), bucket, fault, before=before)


class Rollout(threading.Thread):
    """A rollout server without an engine to serve: receives until the bus ends."""

    def __init__(
        self,
        publisher: Publisher | str,
        name: str,
        engine: Engine | None = None,
        *,
        factory: TransportFactory | None = None,
        config: WeightBus = CONFIG,
        run_id: str = RUN,
        ends: tuple[type[Exception], ...] = (BusClosed, RemovedFromBus),
        **options: Any,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.engine = engine or Engine()
        self.ended: BaseException | None = None
        self._ends = ends
        address = publisher if isinstance(publisher, str) else publisher.address
        self.subscriber = Subscriber(
            address, name=name, config=config, host=HOST, run_id=run_id, transport_factory=factory, **options
        )
        self.start()

    def run(self) -> None:
        engine = self.engine
        try:
            with self.subscriber:
                while True:
                    self.subscriber.receive(
                        engine.load, activate=engine.activate, quarantine=engine.quarantine, busy=lambda: engine.busy
                    )
        except self._ends as error:
            self.ended = error

    def halt(self) -> None:
        self.subscriber.stop()
        self.join(20.0)
        assert not self.is_alive()


def servers(publisher: Publisher, *names: str, **options: Any) -> list[Rollout]:
    """Rollout servers that have joined, in this order."""
    made = []
    for name in names:
        made.append(Rollout(publisher, name, **options))
        until(lambda name=name: name in publisher.members(), f"{name} joins")
    return made


def learner(config: WeightBus = CONFIG, *, incarnation: int = 1, **options: Any) -> Publisher:
    return Publisher(config, host=HOST, run_id=RUN, incarnation=incarnation, **options)


def joined(publisher: Publisher, *names: str) -> None:
    until(lambda: publisher.members().keys() == set(names), f"{names} are the members")


def publish(publisher: Publisher, version: int, *, evaluate: bool = False, **shape: Any) -> PublishReport:
    named = weights(version, **shape)
    return publisher.publish(version, named.items(), digests(named), evaluate=evaluate)


def formation(endpoint: str, epoch: int, rank: int, size: int) -> Formation:
    return Formation(epoch=epoch, rank=rank, size=size, endpoint=endpoint, prefix=group_prefix("r", 1, epoch))


def together(*calls: Callable[[], object]) -> list[TransportError | None]:
    """Run each call in a thread of its own; what they raised."""

    def run(call: Callable[[], object]) -> TransportError | None:
        try:
            call()
        except TransportError as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls, timeout=20.0))


# ---- as a process ---------------------------------------------------------------------------------------


class Process:
    """A receiver process, and the lines that it has printed."""

    def __init__(
        self, publisher: Publisher, name: str, *faults: str, zygote: Zygote | None = None, **environment: str
    ) -> None:
        paths = [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""), str(ROOT)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "tests.support.bus_receiver", publisher.address, name, *faults]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._output = NamedTemporaryFile()  # noqa: SIM115 - it goes with the process
        self.process: subprocess.Popen[bytes] | Started
        if zygote is None:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._output, env=environment)
        else:
            self.process = zygote.start(command, output=Path(self._output.name), env=environment)

    @property
    def lines(self) -> list[str]:
        said = Path(self._output.name).read_text().splitlines()
        return [line for line in said if not line.startswith("weight bus: ")]  # warnings, of a forked one


@contextmanager
def receiver_process(
    publisher: Publisher,
    name: str,
    *faults: str,
    joins_in_s: float = 60.0,
    zygote: Zygote | None = None,
    **environment: str,
) -> Iterator[Process]:
    """Joined, unless `joins_in_s` is 0; killed at the end. Forked, where there is a zygote."""
    made = Process(publisher, name, *faults, zygote=zygote, **environment)
    try:
        if joins_in_s:
            until(lambda: name in publisher.members(), f"{name} joins", joins_in_s)
        yield made
    finally:
        made.process.kill()
        made.process.wait(10.0)


def printed(version: int, *, rows: int = 500) -> str:
    """What a receiver process prints of the weights of a version."""
    return f"{version} {combined(digests(weights(version, rows=rows)))}"


class Watched(Faulty):
    """A transport that says which point of which update has come."""

    def __init__(self, inner: Transport, come: Callable[[int, str, Transport], None]) -> None:
        super().__init__(inner, NO_BUCKET, lambda _: None, before=True)
        self._come = come
        self._updates = 0

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        self._updates += index == 0
        self._come(self._updates, f"before-{index}", self._inner)
        super().broadcast(bucket, index)
        self._come(self._updates, f"after-{index}", self._inner)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self._come(self._updates, "closing", self._inner)
        self._inner.finish(arrived)


def strike(action: str, transport: Transport) -> None:
    """Do this to the process: stop | kill | cut."""
    if action == "cut":
        transport.leave()
        cut_off()
    else:
        os.kill(os.getpid(), SIGNALS[action])


def cut_off() -> None:
    """Shut every TCP connection of this process, listen no more, and open none for CUT_S."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    unconnected = socket.socket()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:  # OSError: it is no socket
            if end.family != socket.AF_INET:
                continue
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.dup2(unconnected.fileno(), descriptor)  # a listener that was shut would end ZeroMQ's process
            else:
                end.shutdown(socket.SHUT_RDWR)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # not 0: poll() takes no more descriptors than that
    threading.Timer(CUT_S, resource.setrlimit, (resource.RLIMIT_NOFILE, limits)).start()


def planned(fault: str) -> tuple[tuple[int, str], str]:
    action, _, when = fault.partition("@")
    update, _, point = when.partition(":")
    return (int(update), point or "before-1"), action


def main(address: str, name: str, *faults: str) -> None:
    plan = dict(map(planned, faults))

    def come(update: int, point: str, transport: Transport) -> None:
        if (update, point) in plan:
            strike(plan[update, point], transport)

    engine = Engine()
    config = CONFIG.model_copy(update=json.loads(os.environ.get("BUS_CONFIG", "{}")))
    factory = lambda config, host: Watched(make_transport(config, host), come)  # noqa: E731
    options = {"name": name, "config": config, "host": HOST, "run_id": RUN, "transport_factory": factory}
    with Subscriber(address, **options) as subscriber:
        try:
            while True:
                version = subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
                print(version, combined(digests(engine.live)), flush=True)
        except BusClosed:
            print("closed", flush=True)
        except RemovedFromBus as removed:
            print("removed", removed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
