"""What the launcher says to a terminal, and how a run ends that an exception or a signal breaks off."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import load
from learner import main
from slipstream.launch import terminal
from slipstream.launch.launcher import Launcher
from slipstream.launch.reach.commands import Command
from slipstream.view.live_view import LiveView
from tests.support.runs import ROOT
from tests.support.waiting import until

SAYS = """
import sys
from slipstream.launch.terminal import say
for _ in range(3):
    say("finished \u2013 all")
sys.exit(7)
"""


@pytest.mark.parametrize("is_utf_8", [True, False])
def test_what_is_said_to_a_full_disk_ends_nothing(is_utf_8: bool) -> None:
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8" if is_utf_8 else "latin-1"}
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", SAYS], cwd=ROOT, env=variables, stderr=full).returncode == 7


class Full(io.StringIO):
    """An output that takes nothing."""

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_node_whose_lines_nothing_takes_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is not emptied would block the node."""
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    command = [sys.executable, "-c", "for line in range(30_000): print(line, 'x' * 20)"]
    remote = Command("node0", command, "")
    try:
        until(lambda: remote.exit_code() == 0, "the end of its process")
        until(lambda: remote.output.last_line().startswith("29999 "), "its last line")
    finally:
        remote.kill()


def test_an_exception_that_ends_a_run_stands_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Launcher) -> None:
        raise PermissionError(13, "Permission denied", "metrics.jsonl")

    config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu", "tracking.plot=false"])
    monkeypatch.setattr(Launcher, "start", start)
    monkeypatch.setattr(terminal.EVENTS, "handlers", list(terminal.EVENTS.handlers))
    with pytest.raises(PermissionError):
        main.run(Launcher(config, False, LiveView(config, "off")))
    said = (Path(config.run_dir) / "logs" / terminal.EVENTS_LOG).read_text()
    assert re.search(r"ERROR run stopped: PermissionError: .*Permission denied: 'metrics.jsonl'", said), said


RUNS = """
import sys, time
from pathlib import Path
from configs import load
from learner import main
from slipstream.launch.launcher import Launcher
from slipstream.view.live_view import LiveView
folder = Path(sys.argv[1])
Launcher.start = lambda self: (folder / "started").touch()
def watch(self):
    while not (folder / "over").exists():
        time.sleep(0.01)
Launcher.watch = watch
Launcher.stop = lambda self: time.sleep(0.5)
config = load("quickstart", [f"run.dir={folder}", "placement.device=cpu", "tracking.plot=false", *sys.argv[2:]])
sys.exit(main.run(Launcher(config, False, LiveView(config, "off"))))
"""


@contextlib.contextmanager
def a_run(folder: Path, *settings: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A launcher in a process of its own, that has begun to watch a run without any processes."""
    command = [sys.executable, "-c", RUNS, str(folder), *settings]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)
    try:
        until((folder / "started").exists, "the start")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_end_of_the_session_ends_a_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    default = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731 - also where the tests run under nohup
    with a_run(tmp_path, preexec_fn=default) as process:
        for _ in range(2):  # the kernel sends one, and so may the shell
            process.send_signal(signal.SIGHUP)
        said = process.communicate(timeout=120)[1]
    ending = f"run stopped: SIGHUP received; no checkpoint: --resume {tmp_path}/quickstart starts at step 0"
    assert process.returncode == 130 and ending in said and "Traceback" not in said, said
    assert ending in (tmp_path / "quickstart" / "logs" / terminal.EVENTS_LOG).read_text()


def test_a_run_under_nohup_outlives_the_session(tmp_path: Path) -> None:
    with a_run(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        (tmp_path / "over").touch()
        assert "finished" in process.communicate(timeout=120)[1]
    assert process.returncode == 0


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A run that finishes at once, and a Python for its reports that does what the shell says; the exit code."""
    for method in ("start", "watch", "leave", "stop"):
        monkeypatch.setattr(Launcher, method, lambda _: None)
    monkeypatch.setattr(terminal.EVENTS, "handlers", list(terminal.EVENTS.handlers))
    stand_in = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(stand_in))
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "metrics.jsonl").touch()

    def run(shell: str) -> int:
        stand_in.write_text(f"#!/bin/bash\n{shell}\n")
        stand_in.chmod(0o755)
        config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu", "tracking.profile='1:2'"])
        began = time.monotonic()
        code = main.run(Launcher(config, False, LiveView(config, "off")))
        assert time.monotonic() - began < 30
        return code

    return run


def test_a_picture_that_is_never_ready_does_not_hold_up_the_end(
    finished: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "REPORT_S", 0.5)
    assert finished(f"grep SigIgn /proc/$$/status >{tmp_path}/ignored; exec sleep 60") == 0
    closing, *missing = capsys.readouterr().err.splitlines()
    assert re.match(r"slipstream: finished 80 steps in .* \(run folder: ", closing)
    why, run_dir = "was not written: it was not ready after 0.5 s; python -m slipstream.view", tmp_path / "quickstart"
    assert missing == [
        f"slipstream: plots/summary.png {why}.plot {run_dir} writes it",
        f"slipstream: the trace {why}.trace {run_dir} writes it",
    ]
    ignored = int((tmp_path / "ignored").read_text().split()[1], 16)
    assert [number for number in (signal.SIGINT, signal.SIGTERM) if ignored >> (number - 1) & 1] == []


def test_ctrl_c_ends_the_picture_and_the_trace_and_the_run_keeps_its_exit_code(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished("kill -INT $PPID; exec sleep 60") == 0
    closing, *missing = capsys.readouterr().err.splitlines()
    assert "finished 80 steps" in closing and len(missing) == 2
    assert all("was not written: SIGINT received; python -m slipstream.view." in line for line in missing), missing


def test_the_reason_of_a_report_is_shown(finished: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert finished('[[ $2 == *plot ]] && { echo "slipstream: no rows" >&2; exit 2; }; echo "trace: at x"') == 0
    missing, shown = capsys.readouterr().err.splitlines()[1:]
    assert "plots/summary.png was not written: no rows; python" in missing and shown == "slipstream: trace: at x"
