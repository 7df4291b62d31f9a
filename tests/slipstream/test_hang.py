"""Hang reports of real processes: one is stopped, one sleeps in a function with a name, one has ended."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.runtime import processes
from slipstream.runtime.hang import __main__ as by_hand
from slipstream.runtime.hang import expired, registry, report, stacks
from tests.support.waiting import until


def waits_for_a_friend() -> None:
    time.sleep(600)


def fork(name: str | None = None, run_dir: Path | None = None) -> int:
    """A process that sleeps, as a member of a run or of none; its pid."""
    pid = os.fork()
    if pid:
        return pid
    if name is not None and run_dir is not None:
        registry.begin(name, run_dir)
    waits_for_a_friend()
    os._exit(0)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "replay.log").write_text(
        "2026-11-22 10:00:02,000 replay WARNING lost 'rollout-0' [silent]\n2026-11-22 10:00:03,000 replay INFO fine\n"
    )
    (logs / "learner-0.log").write_text("2026-11-22 10:00:01,000 learner-0 ERROR first of all\n")
    return tmp_path


@pytest.fixture
def members(run_dir: Path) -> Iterator[dict[str, int]]:
    pids = {name: fork(name, run_dir) for name in ("rollout-0", "learner-0")}
    until(lambda: len(registry.members(run_dir)) == len(pids), "both have noted themselves")
    yield pids
    for pid in pids.values():
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            end(pid)


@pytest.mark.parametrize("has_py_spy", [False, True])
def test_a_report_names_the_stopped_process_and_shows_where_all_are(run_dir, members, capsys, monkeypatch, has_py_spy):
    if not has_py_spy:
        monkeypatch.setattr(stacks, "py_spy", lambda _: {})
    elif not stacks.py_spy([os.getpid()]):
        pytest.skip("py-spy is not installed, or has no right")
    stopped = members["rollout-0"]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: (found := processes.of(stopped)) is not None and found.state == "T", "the stop")
    began = time.monotonic()
    assert by_hand.main([str(run_dir)]) == 0
    assert time.monotonic() - began < stacks.ANSWER_S + stacks.PY_SPY_S
    path, suspect = capsys.readouterr().out.splitlines()
    assert suspect == f"rollout-0 (pid {stopped}) is stopped (SIGSTOP)"
    text = Path(path).read_text()
    assert suspect in text.splitlines()[4]
    sleeper = text[text.index("STACKS OF learner-0") : text.index("STACKS OF rollout-0")]
    assert "waits_for_a_friend" in sleeper
    where = text[text.index("STACKS OF rollout-0") : text.index("LAST EVENTS")]
    assert ("waits_for_a_friend" in where) == has_py_spy and ("did not answer within 1 s" in where) != has_py_spy
    events = text[text.index("LAST EVENTS") : text.index("LAST LINES")].splitlines()[1:3]
    assert [event.split()[2] for event in events] == ["learner-0", "replay"], "by time"
    assert "INFO fine" in text[text.index("LAST LINES") :]


def test_what_has_ended_is_sent_no_signal(run_dir, members, capsys):
    """Its pid may belong to another process by now, which the signal would end."""
    end(members["learner-0"])
    innocent = fork()
    noted = run_dir / "processes" / "learner-0.json"
    noted.write_text(noted.read_text().replace(f'"pid": {members["learner-0"]}', f'"pid": {innocent}'))
    try:
        assert by_hand.main([str(run_dir)]) == 0
        assert os.waitpid(innocent, os.WNOHANG) == (0, 0)
    finally:
        end(innocent)
    text = Path(capsys.readouterr().out.splitlines()[0]).read_text()
    assert f"learner-0        pid {innocent}: has ended" in text and "STACKS OF learner-0" not in text


@pytest.fixture
def member(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> registry.RegisteredProcess:
    """This process as a member of a run."""
    made = registry.RegisteredProcess(name="learner-0", pid=os.getpid(), host="here", started=0, replay=None, keys=None)
    monkeypatch.setattr(registry, "own", registry.Own(run_dir, made))
    return made


def test_the_message_names_the_file_and_what_follows_is_noted_in_it(run_dir, member):
    said = expired("batch 9", owed_by=("replay", "rollout-0"), waited_s=600.0, key="learner.batch_deadline_s")
    (path,) = run_dir.glob("hang-*.txt")
    assert said == f"; hang report: {path}"
    first = "learner-0 waited 600.0 s for batch 9 from replay, rollout-0 (learner.batch_deadline_s)"
    assert path.read_text().splitlines()[1] == first
    assert expired("a sign", waited_s=1.0, key="network.silent_after_s", ends=False) == said
    assert "ALSO EXPIRED" in path.read_text() and len(list(run_dir.glob("hang-*.txt"))) == 1


def test_a_run_that_goes_on_waits_for_no_report(run_dir, member, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_S", 0.1)
    go_on, write = threading.Event(), report.write
    monkeypatch.setattr(report, "write", lambda *words: go_on.wait(30) and write(*words))
    state = {"version": 3, "groups": {"leased": 2, "buffered": 1, "taken": 0, "max": 4}}
    wait = {"code": "ranks", "who": "learner-0", "for": "learner-1 to hold batch 4", "since_s": 2.0}
    silent = {"name": "rollout-7", "role": "rollout_server", "leases": 2, "silent_s": 9.0, "since_s": 9.0}
    slow = {"code": "reward", "who": "rollout-7", "for": "reward 'judge.py:f': 40 answers, 1 worker", "since_s": 41.0}
    state |= {"waits": [wait, slow], "peers": [silent | {"activity": "generating"}]}
    said = expired("leases", waited_s=1.0, key="replay.lease_s", status=lambda: state, ends=False)
    path = Path(said.removeprefix("; hang report: "))
    assert path.read_text() == ""
    assert expired("batch 4", waited_s=2.0, key="learner.batch_deadline_s", ends=False) == said  # one that is under way
    go_on.set()
    until(lambda: "LAST LINES" in path.read_text(), "the report is whole")
    text = path.read_text()
    assert text.rstrip().splitlines()[-1].endswith("learner-0 waited 2.0 s for batch 4 (learner.batch_deadline_s)")
    suspects = text[text.index("SUSPECTS") : text.index("WHO WAITS")]
    assert "rollout-7 waits for reward 'judge.py:f': 40 answers, 1 worker, for 41.0 s" in suspects
    owes = "rollout-7 does not run here; replay last heard it 9.0 s ago; it owes replay 2 leases"
    assert owes in text and "learner-0 waits for learner-1 to hold batch 4, for 2.0 s" in text


def test_reports_have_a_bound_and_a_process_without_a_run_writes_none(run_dir, member, monkeypatch):
    for number in range(report.MOST):
        (run_dir / f"hang-2026{number:04}-000000.txt").touch()
        os.utime(run_dir / f"hang-2026{number:04}-000000.txt", (0, 0))
    assert "20 hang reports are there already" in expired("x", waited_s=1.0, key="y")
    assert len(list(run_dir.glob("hang-*.txt"))) == report.MOST
    monkeypatch.setattr(registry, "own", None)
    assert expired("x", waited_s=1.0, key="y") == ""


@pytest.mark.parametrize("count", [1, report.MOST_ASIDE])
def test_what_ends_a_run_has_a_report_of_its_own_after_any_number_of_late_answers(run_dir, member, monkeypatch, count):
    for number in range(count):
        path = run_dir / f"hang-202601{number + 1:02}-000000.txt"
        path.touch()
    now = time.time()
    for age_s in (50, 40, 30, 20):  # late turns of an environment, each of which is noted
        os.utime(path, (now - age_s, now - age_s))
        assert expired("a turn", waited_s=1.0, key="environment.timeout_s", ends=False) == f"; hang report: {path}"
    os.utime(path, (now - 70, now - 70))
    if count == report.MOST_ASIDE:
        said = expired("a turn", waited_s=1.0, key="environment.timeout_s", ends=False)
        assert said.startswith("; 10 hang reports are there already") and path.read_text().count("ALSO EXPIRED") == 4
    os.utime(path, (now - 20, now - 20))
    assert expired("a turn", waited_s=1.0, key="environment.timeout_s", ends=False) == f"; hang report: {path}"
    said = expired("batch 9", waited_s=600.0, key="learner.batch_deadline_s")
    new = sorted(run_dir.glob("hang-*.txt"))[-1]
    assert said == f"; hang report: {new}" != f"; hang report: {path}"
    assert "STACKS OF" in new.read_text() or "SUSPECTS" in new.read_text()


def test_a_disk_that_takes_no_report_costs_only_that(run_dir, member, monkeypatch):
    monkeypatch.setattr(registry, "own", registry.Own(run_dir / "gone", member))
    assert expired("x", waited_s=1.0, key="y").startswith("; no hang report could be written: ")


def test_a_disk_that_fills_up_under_a_report_is_named(run_dir, member, monkeypatch, caplog, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "_fill", full)
    registry.begin("learner-0", run_dir)
    assert by_hand.main([str(run_dir)]) == 2
    assert "txt cannot be written: No space left on device; run this as" in capsys.readouterr().err
    assert "could be written: [Errno 28] No space left" in expired("x", waited_s=1.0, key="y")
    (begun,) = run_dir.glob("hang-*.txt")
    begun.unlink()
    expired("x", waited_s=1.0, key="y", status=lambda: {"problem": "none"}, ends=False)
    until(lambda: "could not be written: [Errno 28]" in caplog.text, "the warning")


def test_a_replay_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        asks = registry.RegisteredProcess(name="a", pid=1, host="here", started=0, replay=address, keys=None)
        assert report.ask_replay(asks) == {"problem": f"it did not answer at {address}"}
