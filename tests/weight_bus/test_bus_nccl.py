"""The NCCL transport without a GPU: launches, deadlines and epochs over a gloo group; options over a fake one."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from configs.infrastructure import WeightBus
from configs.machine import NCCL_DEFAULTS
from tests.support.bus_receiver import CONFIG, HOST, formation, together
from weight_bus import TransportError
from weight_bus.transports import set_nccl_defaults
from weight_bus.transports.nccl import ABORT_S, WATCHDOG, NcclCollective

SHORT = CONFIG.model_copy(update={"collective_timeout_s": 0.5})


class OverGloo(NcclCollective):
    """The same code, with a gloo group and host memory in place of NCCL and a GPU."""

    def _open(self, config, host):
        return torch.device("cpu"), None

    inside = False
    """On the stream of the transport."""

    @contextmanager
    def _here(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def _build(self, store, formation):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=2)  # the transport has its own deadline; gloo ends what was left only then
        return ProcessGroupGloo(store, formation.rank, formation.size, options)

    def facts(self) -> dict[str, str]:
        return {"backend": "nccl over gloo"}


@pytest.fixture
def members():
    """Rank 0 and two others, not yet in a group."""
    made = [OverGloo(SHORT, HOST) for _ in range(3)]
    yield made
    for transport in made:
        transport.close()


def formed(members: list[OverGloo], epoch: int) -> None:
    endpoint, size = members[0].serve(), len(members)
    calls = [partial(member.form, formation(endpoint, epoch, rank, size)) for rank, member in enumerate(members)]
    assert together(*calls) == [None] * size


def arrived(member: OverGloo, order: list[int], index: int) -> None:
    assert not member.inside, "a digest that was begun on the transport's stream would be read before it is there"
    order.append(index)


def test_launched_buckets_arrive_in_order_in_successive_epochs(members):
    for epoch, size in ((1, 3), (2, 2), (3, 3)):
        formed(members[:size], epoch)
        for _ in range(2):
            buckets = [[torch.full((50_000,), 7 * (r == 0), dtype=torch.uint8) for _ in range(3)] for r in range(size)]
            order: list[list[int]] = [[] for _ in range(size)]

            def take(rank: int, buckets=buckets, order=order) -> None:
                for index, bucket in enumerate(buckets[rank]):
                    members[rank].broadcast(bucket, index)
                members[rank].finish(lambda index: arrived(members[rank], order[rank], index))

            assert together(*(partial(take, rank) for rank in range(size))) == [None] * size
            assert order == [[0, 1, 2]] * size
            assert all(bool((bucket == 7).all()) for held in buckets for bucket in held)


def test_who_does_not_show_up_is_named_before_anything_collective(members):
    endpoint = members[0].serve()
    (raised,) = together(lambda: members[0].form(formation(endpoint, 1, 0, 3)))
    assert isinstance(raised, TransportError) and raised.symptom == "silent"
    assert "epoch 1 with 3 members did not form: rank 1, 2 did not come in 0.5 s" in str(raised)
    with pytest.raises(TransportError, match="no group"):
        members[0].broadcast(torch.zeros(1, dtype=torch.uint8), 0)
    formed(members, 2)


def test_rank_0_does_not_finish_before_all_have_everything(members):
    formed(members, 1)
    small = [torch.zeros(8, dtype=torch.uint8) for _ in members]

    def take(rank: int) -> None:
        members[rank].broadcast(small[rank], 0)
        if rank != 2:
            members[rank].finish()

    started = time.monotonic()
    raised = together(*(partial(take, rank) for rank in range(3)))
    assert time.monotonic() - started < 5.0
    assert isinstance(raised[0], TransportError) and raised[0].symptom == "silent"
    assert "the closing collective failed: not done in 0.5 s" in str(raised[0])
    with pytest.raises(TransportError, match="no group"):
        members[0].finish()
    formed(members, 2)


class Recorded:
    """Stands where PyTorch with NCCL has ProcessGroupNCCL; notes what its constructor would have read."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = type("Config", (), {"blocking": None})()

    def __init__(self, store, rank, size, options) -> None:
        self.arguments = (store, rank, size)
        self.options = options
        self.environment = {name: os.environ[name] for name in WATCHDOG}


def test_groups_of_the_bus_have_no_watchdog_and_others_keep_theirs(monkeypatch):
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", Recorded, raising=False)
    # the first as torchrun sets it, the second by the user
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_CUMEM_ENABLE": "1"})
    set_nccl_defaults(WeightBus(collective_timeout_s=7.2))
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "8"
    assert {name: os.environ[name] for name in NCCL_DEFAULTS} == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    others, place = {name: os.environ[name] for name in WATCHDOG}, formation("h:1", 4, 1, 3)
    group = NcclCollective._build(object.__new__(NcclCollective), "store", place)
    assert group.environment == {name: ours for name, (ours, _) in WATCHDOG.items()}
    assert {name: os.environ[name] for name in WATCHDOG} == others
    assert others["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and others["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    options = group.options
    assert group.arguments == ("store", 1, 3) and options.global_ranks_in_group == [0, 1, 2]
    assert options.config.blocking == 0 and options._timeout == timedelta(seconds=ABORT_S)
    assert options.group_name == place.prefix
