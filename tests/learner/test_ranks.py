"""A rank's place: device, environment and process group, and refusals that say what does not fit."""

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.errors import ConfigError, Unexpected
from configs.learner import LearnerSettings
from configs.machine import DETERMINISTIC
from learner import ranks
from learner.collectives import AFTER_S, CollectiveFailed, CollectiveTimedOut
from learner.policy import meshes
from learner.ranks import RanksError, device_of, join_ranks, named
from replay.channel.interfaces import InterfaceError
from tests.learner.tiny_models import make_config
from tests.support.runs import free_port

SET_BY_JOINING = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
SET_BY_JOINING += ["NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", *DETERMINISTIC]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Whatever joining sets is gone after the test."""
    for name in SET_BY_JOINING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def config(**placement: Any) -> Any:
    return make_config(Path("unused"), placement={"device": "cpu", "split": "1:1"} | placement)


def test_alone_without_an_environment():
    with join_ranks(config()) as place:
        assert (place.rank, place.world_size, place.device, place.is_first) == (0, 1, torch.device("cpu"), True)
        assert place.mesh.size() == 1 and dist.get_backend() == "gloo"
    assert not dist.is_initialized()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_deterministic_kernels_are_chosen_before_anything_runs():
    wanted = make_config(Path("unused"), learner={"deterministic": True})
    with join_ranks(wanted):
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "flash attention asks for more than a warning"
        assert {name: os.environ.get(name) for name in DETERMINISTIC} == DETERMINISTIC
    with join_ranks(config()):
        assert not torch.are_deterministic_algorithms_enabled()


def test_another_number_of_ranks_than_the_placement_says_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RanksError, match="WORLD_SIZE is 3, the placement has 2"), join_ranks(config(split="1:2")):
        pass


def test_an_address_of_another_machine_is_refused():
    elsewhere = make_config(Path("unused"), network={"host": "192.0.2.77", "insecure": True})
    with pytest.raises(InterfaceError, match=r"192\.0\.2\.77"), join_ranks(elsewhere):
        pass


@pytest.mark.parametrize(
    ("device", "visible", "rank", "expected"),
    [("auto", 0, "0", "cpu"), ("auto", 2, "1", "cuda:1"), ("cuda", 1, "0", "cuda:0"), ("cpu", 2, "0", "cpu")],
)
def test_the_device(monkeypatch, device, visible, rank, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert device_of(config(device=device)) == torch.device(expected)


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RanksError, match="torch finds no GPU here"):
        device_of(config(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    with pytest.raises(RanksError, match=r"learner rank 1 of this node has no GPU: 1 are visible .*=6\)"):
        device_of(config(device="cuda"))


def test_on_gpus_the_group_is_nccl_and_bound_to_the_device(monkeypatch):
    """Second node of two with one GPU each: global rank 1, local rank 0. What torch is told, without a GPU."""
    told: dict[str, Any] = {}

    def init(backend: str, **keywords: Any) -> None:
        told.update(keywords, backend=backend, nccl=(os.environ["NCCL_CUMEM_ENABLE"], os.environ["NCCL_NVLS_ENABLE"]))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.update(current=device))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(ranks, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(meshes, "init_device_mesh", lambda kind, shape: (kind, shape))
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "NCCL_NVLS_ENABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    with join_ranks(config(device="cuda", split="1:2")) as place:
        assert (place.rank, place.world_size, place.device) == (1, 2, torch.device("cuda", 0))
        assert place.mesh == ("cuda", (2,))
    assert told["backend"] == "nccl" and told["device_id"] == told["current"] == torch.device("cuda", 0)
    assert told["nccl"] == ("0", "1"), "defaults give way to what is set"
    named_s = LearnerSettings().collective_deadline_s  # not the patience for a batch
    assert told["timeout"].total_seconds() == named_s + AFTER_S, "NCCL's own watchdog comes after the one that names"


def test_ranks_that_do_not_come_are_named(monkeypatch):
    """One of an earlier generation that still lives is none of this one."""
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    monkeypatch.setenv("SLIPSTREAM_GENERATION", "2")
    older = threading.Thread(target=lambda: arrive(port, "generation-1/here/1", "generation-2/here/2"))
    older.start()
    with pytest.raises(CollectiveTimedOut, match=r"rank 0 .* for learner-1 \(placement.give_up_after_s\)"):
        ranks.meet(0, 3, 2.0)
    older.join()
    with socket.create_server(("", port)), pytest.raises(RanksError, match=r":\d+ \(placement.rendezvous_port\)"):
        ranks.meet(0, 3, 2.0)
    with pytest.raises(CollectiveTimedOut, match=r"rank 1 .* for learner-0 \("):
        ranks.meet(1, 2, 0.1)


def arrive(port: int, *keys: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    for key in keys:
        store.set(key, "")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            RuntimeError("[pair.cc:548] Timed out waiting 6000ms for recv"),
            CollectiveTimedOut,
            "recv; a rank that the others wait for stands still [silent]",
        ),
        (RuntimeError("Connection closed by peer"), Unexpected, "RuntimeError: Connection closed by peer"),
        (dist.DistBackendError("NCCL error: unhandled system error"), CollectiveFailed, "unhandled system error"),
        (ConfigError("learner.lr: 0"), ConfigError, "learner.lr: 0"),
    ],
)
def test_an_error_that_ends_a_rank_has_a_code(error, kind, said, monkeypatch):
    keys = []
    monkeypatch.setattr(ranks, "expired", lambda *_, key, **__: keys.append(key) or "")
    found = named(error)
    assert keys == ["learner.collective_deadline_s"] * ("Timed out" in str(error))
    assert type(found) is kind and str(found).endswith(f"{said} [{kind.code}]")
