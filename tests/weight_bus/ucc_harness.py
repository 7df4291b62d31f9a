"""What the tests of backend ucc share: the stub in place of the plugin, and the processes that a transport has."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
from torch.distributed.distributed_c10d import Backend

from configs.infrastructure import WeightBus
from tests.support.bus_receiver import CONFIG as GLOO
from tests.support.bus_receiver import HOST, formation
from weight_bus import TransportError
from weight_bus.transports import Formation
from weight_bus.transports.ucc.collective import UccCollective
from weight_bus.transports.ucc.member import MODULE

STUB = Path(__file__).parent / "ucc_stub"
CONFIG = GLOO.model_copy(update={"backend": "ucc", "collective_timeout_s": 2.0, "deadline_s": 60.0})
START_S = 90.0
"""For a process to import torch on a busy machine."""
THREADS = ThreadPoolExecutor(1)
"""Outlives the transports, whose starters end with the thread that has made them."""


@contextmanager
def stub() -> Iterator[Path]:
    """`import torch_ucc` finds the stub, here and in every process that is started meanwhile; its file of faults."""
    registered = ((Backend._plugins, "UCC"), (Backend.backend_type_map, "ucc"), (Backend.backend_capability, "ucc"))
    before = [(table, key, table.get(key)) for table, key in registered]
    with pytest.MonkeyPatch.context() as patch, NamedTemporaryFile() as faults:
        patch.delitem(sys.modules, "torch_ucc", raising=False)
        patch.syspath_prepend(STUB)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STUB), os.environ.get("PYTHONPATH")])))
        patch.setenv("UCC_STUB_FAULT", faults.name)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # left to the transport
            patch.delenv(name, raising=False)
        try:
            yield Path(faults.name)
        finally:
            sys.modules.pop("torch_ucc", None)
            for table, key, value in before:
                table.pop(key, None)
                if value is not None:
                    table[key] = value


def make_warm(config: WeightBus, host: str) -> UccCollective:
    """With a starter that has imported torch, so that a test's time is that of its groups."""
    made = UccCollective(config, host)
    made.facts()
    return made


def processes(parent: int) -> list[int]:
    """Pids of the UCC processes of one transport's process, zombies not counted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            continue
        if MODULE.encode() in words and str(parent).encode() in words:
            found.append(int(folder.name))
    return found


def is_gone(pid: int) -> bool:
    """Ended and reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def hit(transport: UccCollective, number: signal.Signals) -> int:
    """Send a signal to the process that is in the group; its pid."""
    assert transport._member is not None
    os.kill(transport._member.pid, number)
    return transport._member.pid


class Outcome:
    """What became of a call: how long it took, and its error if any."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: TransportError | None = None
        started = time.monotonic()
        try:
            call()
        except TransportError as error:
            self.error = error
        self.seconds = time.monotonic() - started


def together(*calls: Callable[[], object]) -> list[Outcome]:
    """Run all calls at once, the first in this thread."""
    others = [THREADS.submit(Outcome, call) for call in calls[1:]]
    return [Outcome(calls[0]), *(other.result(START_S) for other in others)]


class Pair:
    """Rank 0 and one member, in one process."""

    def __init__(self) -> None:
        self.root, self.member = make_warm(CONFIG, HOST), make_warm(CONFIG, HOST)
        self.endpoint = self.root.serve()
        self.epoch = 0

    def formation(self, rank: int) -> Formation:
        return formation(self.endpoint, self.epoch, rank, 2)

    def form(self) -> list[Outcome]:
        """The next epoch."""
        self.epoch += 1
        return together(lambda: self.root.form(self.formation(0)), lambda: self.member.form(self.formation(1)))

    def stand(self) -> None:
        """There is a group: the one that is there, or the next."""
        if self.root._member is None or self.member._member is None:
            assert [outcome.error for outcome in self.form()] == [None, None]

    def send(self, *buckets: torch.Tensor) -> tuple[list[Outcome], list[torch.Tensor]]:
        """One version; what the member has received."""
        received = [torch.zeros_like(bucket) for bucket in buckets]
        return together(lambda: carry(self.root, buckets), lambda: carry(self.member, received)), received

    def close(self) -> None:
        self.root.close()
        self.member.close()
        assert processes(os.getpid()) == [], "no process is left"


def carry(transport: UccCollective, buckets: "list[torch.Tensor] | tuple[torch.Tensor, ...]") -> None:
    for index, bucket in enumerate(buckets):
        transport.broadcast(bucket, index)
    transport.finish()
