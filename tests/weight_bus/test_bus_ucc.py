"""Backend ucc: where UCC comes from, and its process per group, which may die.

Groups are those of a stub over gloo here (tests/weight_bus/ucc_stub); only one test needs a real UCC.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend

from configs import ConfigError
from configs.infrastructure import WeightBus
from configs.loading import load
from slipstream.check.checks import check_available
from tests.support import bus_receiver as bus
from tests.support import runs
from weight_bus import TransportError, WeightBusError
from weight_bus.transports import Formation, make_transport, resolve_ucc
from weight_bus.transports.base import PROTOCOL
from weight_bus.transports.ucc import collective, member, process
from weight_bus.transports.ucc.collective import SLACK_S, UccCollective
from weight_bus.transports.ucc.member import MODULE

STUB = Path(__file__).parent / "ucc_stub"
CONFIG = bus.CONFIG.model_copy(update={"backend": "ucc", "collective_timeout_s": 2.0, "deadline_s": 60.0})
START_S = 90.0
"""For a process to import torch on a busy machine."""
THREADS = ThreadPoolExecutor(1)
"""Outlives the transports, whose starters end with the thread that has made them."""
BOUND_S = CONFIG.collective_timeout_s + SLACK_S + 3.0
"""Of one call whose peer is lost, and what two busy cores add."""
over_the_stub = pytest.mark.skipif(dist.is_ucc_available(), reason="PyTorch's own UCC goes before any plugin")


@contextmanager
def stub() -> Iterator[Path]:
    """`import torch_ucc` finds the stub, here and in every process that is started meanwhile; its file of faults."""
    with pytest.MonkeyPatch.context() as patch, NamedTemporaryFile() as faults:
        for name in ("_plugins", "backend_type_map", "backend_capability"):  # where a backend is registered
            patch.setattr(Backend, name, dict(getattr(Backend, name)))
        patch.delitem(sys.modules, "torch_ucc", raising=False)
        patch.syspath_prepend(STUB)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STUB), os.environ.get("PYTHONPATH")])))
        patch.setenv("UCC_STUB_FAULT", faults.name)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # left to the transport
            patch.delenv(name, raising=False)
        yield Path(faults.name)
        sys.modules.pop("torch_ucc", None)


def make_warm(config: WeightBus, host: str) -> UccCollective:
    """With a starter that has imported torch, so that a test's time is that of its groups."""
    made = UccCollective(config, host)
    made.facts()
    return made


def processes(parent: int) -> list[int]:
    """Pids of the UCC processes of one transport's process, zombies not counted."""
    return [pid for pid, command in runs.processes() if {MODULE, str(parent)} <= {*command.split()}]


def is_gone(pid: int) -> bool:
    """Ended and reaped."""
    return not Path(f"/proc/{pid}").exists()


def hit(transport: UccCollective, number: signal.Signals) -> int:
    """Send a signal to the process that is in the group; its pid."""
    assert transport._member is not None
    os.kill(transport._member.pid, number)
    return transport._member.pid


class Outcome(NamedTuple):
    """What the error of a call says, empty if there was none, and how long the call took."""

    said: str
    seconds: float


def outcome(call: Callable[[], object]) -> Outcome:
    said, started = "", time.monotonic()
    try:
        call()
    except TransportError as error:
        said = str(error)
    return Outcome(said, time.monotonic() - started)


def carry(transport: UccCollective, buckets: Sequence[torch.Tensor]) -> None:
    for index, bucket in enumerate(buckets):
        transport.broadcast(bucket, index)
    transport.finish()


class Pair:
    """Rank 0 and one member, in one process."""

    def __init__(self) -> None:
        self.root, self.member = make_warm(CONFIG, bus.HOST), make_warm(CONFIG, bus.HOST)
        self.endpoint = self.root.serve()
        self.epoch = 0

    def both(self, call: Callable[[UccCollective, int], object]) -> list[Outcome]:
        """Of a call with each transport and its rank at once, rank 0 in this thread."""
        other = THREADS.submit(outcome, lambda: call(self.member, 1))
        return [outcome(lambda: call(self.root, 0)), other.result(START_S)]

    def formation(self, rank: int) -> Formation:
        return bus.formation(self.endpoint, self.epoch, rank, 2)

    def try_form(self) -> list[Outcome]:
        self.epoch += 1
        return self.both(lambda transport, rank: transport.form(self.formation(rank)))

    def form(self) -> None:
        """The next epoch."""
        assert [said for said, _ in self.try_form()] == ["", ""]

    def stand(self) -> None:
        """There is a group: the one that is there, or the next."""
        if self.root._member is None or self.member._member is None:
            self.form()

    def send(self, *buckets: torch.Tensor) -> list[Outcome]:
        """One version, which arrives if it is carried to the end."""
        received = [torch.zeros_like(bucket) for bucket in buckets]
        outcomes = self.both(lambda transport, rank: carry(transport, received if rank else buckets))
        assert any(said for said, _ in outcomes) or all(map(torch.equal, buckets, received))
        return outcomes

    def carries(self, *buckets: torch.Tensor) -> None:
        assert [said for said, _ in self.send(*buckets)] == ["", ""]

    def close(self) -> None:
        self.root.close()
        self.member.close()
        assert processes(os.getpid()) == [], "no process is left"


# ---- where it comes from --------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch):
    """A machine without any UCC."""
    monkeypatch.setattr(dist, "is_ucc_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_ucc", None)


def test_a_plugin_is_named_with_its_version_and_pytorchs_own_goes_first(without, monkeypatch):
    plugin = ModuleType("torch_ucc")
    monkeypatch.setitem(sys.modules, "torch_ucc", plugin)
    assert resolve_ucc() == "plugin torch_ucc of unknown version"
    plugin.__version__ = "1.0.0"  # type: ignore[attr-defined]
    assert resolve_ucc() == "plugin torch_ucc 1.0.0"
    check_available(load("quickstart", ["weight_bus.backend=ucc"]), runs_servers=True)
    monkeypatch.setattr(dist, "is_ucc_available", lambda: True)
    assert resolve_ucc() == "native"


def test_absent_ucc_is_refused_everywhere_and_nothing_takes_its_place(without):
    absent = r"'ucc': this PyTorch .* built without UCC, and there is no plugin torch_ucc.*backend: gloo"
    calls = [
        lambda: make_transport(CONFIG, bus.HOST),
        lambda: bus.learner(CONFIG),
        lambda: bus.Rollout("tcp://127.0.0.1:1", "one", config=CONFIG),
        lambda: check_available(load("quickstart", ["weight_bus.backend=ucc"]), runs_servers=True),
    ]
    for call in calls:
        with pytest.raises((WeightBusError, ConfigError), match=absent):
            call()
    disk = ["weight_bus.backend=ucc", "weight_bus.transport=disk", "weight_bus.folder=shared"]
    check_available(load("quickstart", disk), runs_servers=True)  # which needs no backend at all


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import ctypes; ctypes.CDLL('libucc-of-this-test.so.1')", "libucc-of-this-test.so.1: cannot open shared obj"),
        ("import a_module_of_torch_ucc", "No module named 'a_module_of_torch_ucc'"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_not_absent(monkeypatch, tmp_path, source, words):
    (tmp_path / "torch_ucc.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(dist, "is_ucc_available", lambda: False)
    monkeypatch.delitem(sys.modules, "torch_ucc", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightBusError, match=f"torch_ucc is installed but cannot be loaded: {words}.*LD_LIBRARY_PATH"):
        resolve_ucc()


# ---- one member's end -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults():
    with stub() as file:
        yield file


@pytest.fixture(scope="module")
def pair(faults):
    made = Pair()
    yield made
    made.close()


def bucket(value: int, size: int = 100_000) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_real_ucc_carries_a_version():
    try:
        kind = resolve_ucc()
    except WeightBusError as error:
        pytest.skip(str(error))
    assert "stub" not in kind, "this test is about the real one"
    with closing(Pair()) as real:
        real.form()
        for version in (1, 2):
            real.carries(bucket(version), bucket(version + 1, 20_000_000))


@over_the_stub
def test_each_group_has_processes_of_its_own_and_carries_buckets(pair):
    seen: set[int] = set()
    for value in (1, 2):
        pair.form()
        assert pair.root._member is not None and pair.member._member is not None
        pids = {pair.root._member.pid, pair.member._member.pid}
        assert not pids & seen and all(is_gone(pid) for pid in seen), "a group ends with its processes"
        seen |= pids
        for version in (3, 4):
            pair.carries(bucket(value, 100), bucket(version, 3_000_000), bucket(9, 0))
    assert not dist.is_initialized(), "no group in this process"
    assert pair.root.facts() == {"backend": "ucc", "protocol": PROTOCOL, "ucc": "plugin torch_ucc ucc-stub(gloo)"}


@over_the_stub
@pytest.mark.parametrize(
    ("rank", "number", "how", "symptom"),
    [
        (0, signal.SIGKILL, "was ended by SIGKILL", "closed"),
        (1, signal.SIGKILL, "was ended by SIGKILL", "closed"),
        (1, signal.SIGSTOP, "did not answer in 3.0 s and was killed", "silent"),
    ],
)
def test_a_process_lost_in_a_transfer_costs_bounded_time(pair, rank, number, how, symptom):
    pair.stand()
    transport = (pair.root, pair.member)[rank]
    pid = hit(transport, number)
    outcomes = pair.send(bucket(1), bucket(2, 3_000_000))
    assert all(said and seconds < BOUND_S for said, seconds in outcomes)
    said = outcomes[rank].said
    assert f"broadcast of bucket 1 failed: the UCC process (pid {pid}) {how}" in said and f"[{symptom}]" in said
    assert is_gone(pid) and pair.root._member is None and pair.member._member is None
    with pytest.raises(TransportError, match="no group is formed"):
        transport.broadcast(bucket(1), 0)
    pair.form()  # of new processes
    pair.carries(bucket(5))


@pytest.mark.parametrize("adds", [[0, 0], [1, 1]])
def test_a_sum_that_lacks_a_member_or_a_bucket_is_no_end(monkeypatch, adds):
    """UCC was seen to return from a broadcast whose receiver was dead; the other member adds what is given here."""
    group = process.UccGroup(member.SharedBytes())
    group._size = 2
    monkeypatch.setattr(dist, "broadcast", lambda tensor, root: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(torch.tensor(adds)))
    group.broadcast(100)
    group.broadcast(100)
    with pytest.raises(TransportError, match=rf"\[{1 + adds[0]}, {2 + adds[1]}\], not \[2, 4\] \[corrupt\]"):
        group.finish()


@over_the_stub
def test_a_group_that_only_seems_to_be_built_is_not_formed(pair, faults):
    """UCC connects with the first broadcast, and ends its process by std::terminate where that fails."""
    faults.write_text("abort@1", encoding="ascii")
    root, member = pair.try_form()
    assert f"epoch {pair.epoch} with 2 members did not form" in root.said and root.seconds < 2 * BOUND_S
    assert "by SIGABRT" in member.said and "[closed]" in member.said
    faults.unlink()  # an error of the stub that was not foreseen
    said = [said for said, _ in pair.try_form()]
    assert all("did not form: " in one for one in said), said
    assert any("form: No such file or directory" in one for one in said), "one may see the end of the other first"
    faults.write_text("", encoding="ascii")


@over_the_stub
def test_a_lost_starter_takes_its_group_along_and_is_replaced(pair, monkeypatch):
    pair.stand()
    starter, member = pair.member._starter, pair.member._member
    assert member is not None
    os.kill(starter.pid, signal.SIGKILL)
    bus.until(lambda: is_gone(member.pid), "the process of the group goes with it")
    assert all(said for said, _ in pair.send(bucket(1), bucket(2, 3_000_000)))
    monkeypatch.setattr(collective, "START_S", START_S)  # for two busy cores
    pair.form()
    assert is_gone(starter.pid) and pair.member._starter is not starter
