"""What the launcher reads from the logs of its children, and when it starts a server again."""

import json
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from configs.algorithm import Rollout
from slipstream.launch import children, servers
from slipstream.launch.servers import GOOD_RUN_S, LONGEST_WAIT_S, SOON_S, LocalServers, Restarts, RunFailed
from slipstream.runtime import processes
from slipstream.runtime.lifeline import CANNOT_START, RUN_FAILED, START_REFUSED
from tests.support.waiting import until

NOTES = """
import sys
from slipstream.runtime import ending, hang
from configs.errors import NoRoom
hang.begin("x", sys.argv[1])
ending.leave_on_error()
if sys.argv[2] == "leave":
    hang.expired("batch 9", owed_by=("replay",), waited_s=6.0, key="learner.batch_deadline_s")
    ending.step = 9
    error = NoRoom("no disk\\nmore")
    sys.exit(ending.leave(2, f"x stops: {error}", error))
raise KeyError("lost")
"""


@pytest.mark.parametrize(
    ("how", "code", "facts", "said"),
    [
        ("leave", 2, ("SLIP-CONFIG-10", "NoRoom", ("replay",), 9), "x stops: no disk [SLIP-CONFIG-10]"),
        ("raise", 1, ("", "KeyError", (), None), "KeyError: 'lost'"),
    ],
)
def test_a_process_that_ends_notes_why_beside_its_log(tmp_path, how, code, facts, said):
    log = tmp_path / "logs" / "x.log"
    child = children.start("x", [sys.executable, "-c", NOTES, str(tmp_path), how], log, {})
    child.process.wait()
    noted = child.ending
    assert (noted.code, (noted.error, noted.kind, noted.peers, noted.step)) == (code, facts)
    assert child.how_it_ended() == f"exit code {code}: {said}"
    again = children.start("x", ["sh", "-c", "kill -9 $$"], log, {})
    again.process.wait()
    assert again.ending is None and "SIGKILL" in again.how_it_ended(), "what an earlier one noted is not its own"


def test_who_was_killed_from_outside_has_no_last_word(tmp_path):
    said = "import os, signal, sys; print('2026-11-21 10:00:00,000 x ERROR no room [full]', flush=True); "
    ends = {"os.kill(os.getpid(), signal.SIGKILL)": ("SIGKILL", False), "sys.exit(4)": ("exit code 4", True)}
    for end, (how, quoted) in ends.items():
        child = children.start("x", [sys.executable, "-c", said + end], tmp_path / f"{how}.log", {})
        child.process.wait()
        assert how in child.how_it_ended() and ("no room" in child.how_it_ended()) == quoted


def test_what_an_ended_child_has_left_is_ended_and_nothing_else(tmp_path):
    child = children.start("left", ["sh", "-c", "sleep 60 & echo $!"], tmp_path / "left.log", {})
    until(lambda: child.exit_code() == 0, "the end of the child")
    left = int((tmp_path / "left.log").read_text())
    assert processes.of(left) is not None
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ended = SimpleNamespace(pid=stranger.pid, poll=lambda: 0, terminate=lambda: None, wait=lambda _: 0)
    try:  # the number of a child that ended hours ago, of another run now
        children.stop([child, children.Child("ended", ended, tmp_path / "ended.log", 0)])
        until(lambda: (found := processes.of(left)) is None or found.state == "Z", "the end of what it has left")
        with pytest.raises(subprocess.TimeoutExpired):  # a signal takes its time
            stranger.wait(0.2)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_quoted_line_keeps_its_code():
    line = f"2026-11-21 10:00:00,000 x ERROR {'a' * 1000}: no room [full] [SLIP-JOURNAL-03]"
    quoted = children.without_time(line)
    assert quoted.startswith("x ERROR aaa") and quoted.endswith("a [SLIP-JOURNAL-03]") and len(quoted) < 700


def test_logs_are_followed_line_by_line(tmp_path):
    log = tmp_path / "x.log"
    tail = children.Tail.from_end(log)
    assert tail.new_lines() == []
    log.write_bytes(b"one\ntwo\nthr")
    assert tail.new_lines() == ["one", "two"]
    with log.open("ab") as file:
        file.write(b"ee\n")
    assert tail.new_lines() == ["three"] and children.Tail.from_end(log).new_lines() == []
    (tmp_path / "new").write_text("anew\n")
    (tmp_path / "new").replace(log)
    assert tail.new_lines() == ["anew"]


def test_rows_that_a_learner_copies_when_it_starts_again_are_known(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "time": float(step)}) + "\n" for step in range(1, 5)]
    path.write_text("".join(lines[:3]))
    tail, of_this_start = children.RowTail(path), children.RowTail(path, newest=2.0)
    assert [row["step"] for row in tail.new_rows()] == [1, 2, 3]
    assert [row["step"] for row in of_this_start.new_rows()] == [3], "a resumed run: those before its start"
    again = json.dumps({"step": 3, "time": 3.5}) + "\n"
    (tmp_path / "new").write_text("".join(lines[:2]) + again)
    (tmp_path / "new").replace(path)
    assert tail.new_rows() == of_this_start.new_rows() == [json.loads(again)]
    with path.open("a") as file:
        file.write(json.dumps({"step": 4, "time": 1.0}) + "\n")
    assert [row["step"] for row in tail.new_rows()] == [4], "a clock that was set back hides nothing"


def test_what_a_child_reports_while_it_starts_is_shown_once(tmp_path):
    line = "2026-11-22 07:00:00,000 replay INFO reading a.jsonl: 1,000 rows, 40%"
    waits = f"until [ -e {tmp_path}/seen ]; do sleep 0.01; done"
    child = children.start("x", ["sh", "-c", f"echo '{line}'; {waits}; exec sleep 600"], tmp_path / "x.log", {})
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        (tmp_path / "seen").touch()

    wait = partial(children.wait_for, child, timeout_s=20, progress=r"INFO (reading .*)$", show=show)
    assert wait(lambda: "7" if (tmp_path / "seen").exists() else None) == "7"
    assert shown == ["reading a.jsonl: 1,000 rows, 40%"]
    child.process.kill()
    assert wait(lambda: None) is None, "it has ended"


def made(monkeypatch, limit: int) -> tuple[Restarts, SimpleNamespace]:
    """Restarts, and the monotonic seconds that they go by: a test moves `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
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
    backoffs = [Restarts(99, backoff_s=wait_s, count=count) for wait_s, count in ((1.0, 2), (1.0, 2000), (90.0, 3))]
    assert [each.plan().partition(" in ")[2] for each in backoffs] == ["4 s", "8 s", "90 s"]


def test_a_good_run_gives_a_rollout_server_its_restarts_back(monkeypatch):
    clock, said = made(monkeypatch, 1)[1], []
    monkeypatch.setattr(servers, "Restarts", partial(Restarts, _started=clock.now))
    dead = SimpleNamespace(exit_code=lambda: -9, root_cause=lambda: "rollout-0 died")
    local = servers.LocalServers(Rollout(restarts=1, restart_backoff_s=2.0), lambda _: dead, said.append)
    local.add("rollout-0")
    for lived in (1.0, GOOD_RUN_S, 1.0):
        clock.now += lived
        local.watch(run_is_over=False)  # it has died
        clock.now += 2.0
        local.watch(run_is_over=False)  # its backoff is over
    assert [line.partition("; ")[2][:12] for line in said] == ["restart 1 of", "restart 1 of", "no restart l"]


def test_a_server_that_leaves_while_the_run_goes_on_is_started_again(monkeypatch):
    clock, said = made(monkeypatch, 1)[1], []
    left = SimpleNamespace(exit_code=lambda: 0, root_cause=lambda: "rollout-0 left")
    local = servers.LocalServers(Rollout(restarts=1), lambda _: left, said.append)
    local.add("rollout-0")
    for expected in (0, 0, 1):  # the launcher may learn only now that the run is over
        local.watch(run_is_over=False)
        clock.now += servers.GOOD_ORDER_S / 2
        assert len(said) == expected
    assert "restart 1 of 1" in said[0]


@pytest.mark.parametrize(
    ("code", "said", "failures"),
    [
        (1, ["restart 1 of 2", "restart 2 of 2", "no restart left"], ["a"]),
        (0, [], []),
        (RUN_FAILED, ["ended because the run has failed"], ["a"]),
        (CANNOT_START, RunFailed, ["a"]),
        (START_REFUSED, RunFailed, ["a"]),
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
        assert said is RunFailed and f"died: exit code {code}" in str(failure)
        assert len(lines) == (code == START_REFUSED), "an engine gets another try"
    assert list(local.failures) == failures


def test_a_silent_server_is_ended_and_started_again_while_a_restart_is_left(tmp_path):
    """Only where it is the process of this machine that was started here, and another can take its place."""
    lines = []

    def begin(name):
        return children.start(name, ["sleep", "600"], tmp_path / f"{name}.log", {})

    local = LocalServers(Rollout(restarts=1, restart_backoff_s=0), begin, lines.append)
    local.add("a")
    first, stranger = local.children[0], begin("stranger")

    def silent(pid, host, name="a"):
        local.end_silent([{"name": name, "pid": pid, "host": host}])
        local.watch(run_is_over=False)

    try:
        first.process.send_signal(signal.SIGSTOP)
        silent(stranger.pid, socket.gethostname())
        silent(first.pid, "another-host")
        silent(first.pid, socket.gethostname(), "of another container")
        time.sleep(0.1)
        assert (first.exit_code(), stranger.exit_code(), lines) == (None, None, [])
        silent(first.pid, socket.gethostname())
        first.process.wait(20)
        until(lambda: local.watch(run_is_over=False) or local.children != [first], "another one")
        (line,) = lines
        assert f"a (pid {first.pid}) " in line and "[silent]" in line and "restart 1 of 1" in line
        second = local.children[0]
        silent(second.pid, socket.gethostname())
        time.sleep(0.1)
        assert second.exit_code() is None, "none would take its place"
    finally:
        children.stop([first, stranger, *local.children])
