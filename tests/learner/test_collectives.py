"""A collective over NCCL that stands still: which rank is blamed, and what the process says before it ends."""

import json
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learner import collectives
from learner.collectives import Collective, CollectiveFailed, CollectiveWatch, blame, groups_of, recorded
from tests.learner.tiny_models import process_group
from tests.support.waiting import until

STUCK = Collective("0", "all_gather", 8, "started", 40.0, False)


def its(reached: int, over: int) -> dict[str, Any]:
    return {"reached": reached, "over": over, "lines": []}


@pytest.mark.parametrize(
    ("left", "culprits"),
    [
        ({1: None, 2: its(9, 7)}, (1,)),  # stopped or gone
        ({1: its(9, 7), 2: its(7, 7)}, (2,)),  # has not begun it
        ({1: its(9, 8), 2: its(9, 7)}, (0,)),  # rank 1 is through it: this one is cut off
        ({1: its(9, 7), 2: its(8, 7)}, (1, 2)),  # all have begun it
    ],
)
def test_the_rank_that_keeps_others_waiting_is_blamed(left: Any, culprits: Any) -> None:
    assert blame(STUCK, 0, left)[1] == culprits


def entry(number: int, age_s: float, *, group: str = "0", over: bool = False) -> dict[str, Any]:
    """As torch's flight recorder writes one."""
    return {
        "process_group": [group, ""],
        "profiling_name": "nccl:all_gather",
        "collective_seq_id": number,
        "state": "completed" if over else "started",
        "time_created_ns": int((time.time() - age_s) * 1e9),
        "retired": over,
    }


def test_a_watch_ends_the_process_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, reported: Any) -> None:
    """Rank 0 of three stands still; rank 1 does something else and is asked, rank 2 does not answer."""
    store, said = dist.HashStore(), list[CollectiveFailed]()
    monkeypatch.setattr(collectives, "ANSWER_S", 0.5)
    monkeypatch.setattr(collectives, "LOOK_S", 0.01)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: int(threading.current_thread().name == "collectives asked"))
    young, old = [entry(7, 60, over=True), entry(8, 10)], [entry(7, 60, over=True), entry(8, 40)]
    traces = iter([young])

    def read() -> str:
        return json.dumps({"entries": [*next(traces, old), entry(99, 500, group="bus")]})

    watch = CollectiveWatch({"0": [0, 1, 2]}, 30, said.append, read=read)
    watch.start()
    watch.join(30)
    (error,) = said
    assert error.code == "SLIP-LEARN-06" and "no. 8" in str(error) and "rank 2 gave no answer" in str(error)
    assert "learner-2" in reported(), "the report names the process that owes"
    (report,) = (tmp_path / "the-run").glob("hang-*.txt")
    assert "rank 1: all_gather no. 7 of group '0', over" in report.read_text(), "the flight recorder"


def test_a_recorder_that_cannot_be_read_ends_the_process_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that nothing watches would stand still without a name."""

    def read() -> str:
        raise KeyError("collective_seq_id")

    said = list[CollectiveFailed]()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    watch = CollectiveWatch({"0": [0, 1]}, 0.1, said.append, read=read)
    watch.start()
    watch.join(30)
    watch.stop()
    assert [error.code for error in said] == ["SLIP-LEARN-06"] and "KeyError: 'collective_seq_id'" in str(said[0])
    (record,) = [record for record in caplog.records if record.name == "learner.collectives"]
    assert record.levelname == "ERROR" and "collective_seq_id" in record.getMessage()


def test_the_flight_recorder_is_read_as_torch_writes_it(tmp_path: Any) -> None:
    with process_group(tmp_path / "store") as mesh:
        groups = groups_of(mesh)
        dist.all_reduce(torch.ones(3))
        newest = lambda: collectives.collectives(recorded(), [*groups], time.time())[-1]  # noqa: E731
        until(lambda: newest().is_over, "a thread of gloo that says so")
        seen = newest()
    assert [*groups.values()] == [[0]] and seen.name == "all_reduce" and 0 <= seen.age_s < 60


def test_only_nccl_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveWatch, "start", lambda self: pytest.fail("gloo raises by itself"))
    with collectives.watched(None, torch.device("cpu"), timedelta(seconds=1).total_seconds(), print):
        pass
