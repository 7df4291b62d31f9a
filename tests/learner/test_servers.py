"""Restarts in place: at once, later and later when a process dies again and again, never more than allowed."""

import time
from functools import partial
from types import SimpleNamespace

import pytest

from configs.algorithm import Rollout
from learner.launch import children, servers
from learner.launch.servers import GOOD_RUN_S, LONGEST_WAIT_S, SOON_S, LocalServers, Restarts, RunFailed
from replay.lifeline import CANNOT_START, RUN_FAILED


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def made(monkeypatch, limit: int) -> tuple[Restarts, Clock]:
    clock = Clock()
    monkeypatch.setattr(servers, "time", clock)
    return Restarts(limit, _started=clock.now), clock


def test_a_first_death_costs_no_wait_and_is_started_once(monkeypatch):
    restarts, clock = made(monkeypatch, 2)
    assert not restarts.is_due(), "nothing has died"
    assert restarts.plan() == "restart 1 of 2"
    assert restarts.is_due() and not restarts.is_due()
    clock.now += SOON_S + 1
    assert restarts.plan() == "restart 2 of 2" and restarts.are_used_up


def test_each_death_right_after_a_start_doubles_the_wait_up_to_a_bound(monkeypatch):
    restarts, clock = made(monkeypatch, 9)
    waits = []
    for _ in range(8):
        restarts.plan()
        assert restarts.due is not None
        waits.append(restarts.due - clock.now)
        assert restarts.is_due() == (waits[-1] == 0)
        clock.now += waits[-1]
        assert waits[-1] == 0 or restarts.is_due()
    assert waits == [0, 0.5, 1, 2, 4, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]
    clock.now += SOON_S + 1
    assert restarts.plan() == "restart 9 of 9", "one that lived for long starts at once again"


def test_a_good_run_gives_the_restarts_back(monkeypatch):
    restarts, clock = made(monkeypatch, 2)
    for _ in range(2):
        restarts.plan()
        clock.now += LONGEST_WAIT_S
        assert restarts.is_due()
    clock.now += GOOD_RUN_S - 1
    assert restarts.are_used_up
    clock.now += 1
    assert not restarts.are_used_up
    assert restarts.plan() == "restart 1 of 2" and restarts.is_due(), "at once, as after a first death"


def test_a_good_run_gives_a_rollout_server_its_restarts_back(monkeypatch):
    clock, said = Clock(), []
    monkeypatch.setattr(servers, "time", clock)
    monkeypatch.setattr(servers, "Restarts", partial(Restarts, _started=clock.now))

    def child(_name):
        return SimpleNamespace(exit_code=lambda: -9, root_cause=lambda: "rollout-0 died")

    local = servers.LocalServers(Rollout(restarts=1, restart_backoff_s=2.0), child, said.append)
    local.add("rollout-0")
    for lived in (1.0, GOOD_RUN_S, 1.0):
        clock.now += lived
        local.watch(run_is_over=False)  # it has died
        clock.now += 2.0
        local.watch(run_is_over=False)  # its backoff is over
    assert [line.partition("; ")[2][:16] for line in said] == [
        "restart 1 of 1 i",
        "restart 1 of 1 i",
        "no restart left ",
    ]


@pytest.mark.parametrize(
    ("code", "said", "failures"),
    [
        (1, ["restart 1 of 2", "restart 2 of 2", "no restart left"], ["a"]),
        (0, [], []),
        (RUN_FAILED, ["ended because the run has failed"], ["a"]),
        (CANNOT_START, RunFailed, ["a"]),
    ],
)
def test_what_follows_from_the_exit_code_of_a_server(tmp_path, code, said, failures):
    lines = []

    def begin(name):
        return children.start(name, ["sh", "-c", f"exit {code}"], tmp_path / f"{name}.log", {})

    local = LocalServers(Rollout(restarts=2, restart_backoff_s=0), begin, lines.append)
    local.add("a")
    deadline = time.monotonic() + 20
    try:
        while not local.all_over and time.monotonic() < deadline:
            local.watch(run_is_over=True)
            time.sleep(0.01)
        assert local.all_over and len(lines) == len(said)
        assert [words for words, line in zip(said, lines, strict=True) if words not in line] == []
    except RunFailed as failure:
        assert said is RunFailed and "died: exit code 78" in str(failure)
    assert local.failures == failures
