"""Deaths of replay and of a learner rank as the launcher sees them: stub children, which do nothing but run.

Whole runs that lose them and go on: tests/e2e/test_in_place.py.
"""

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import load
from slipstream.launch import children
from slipstream.launch.launcher import Launcher
from slipstream.launch.servers import RunFailed
from slipstream.plan.processes import Plan, Process
from slipstream.runtime import processes
from slipstream.runtime.ending import Ending
from slipstream.runtime.lifeline import CANNOT_GO_ON
from slipstream.view.live_view import LiveView
from tests.support.waiting import until

NOTE = '{{"name":"replay","pid":%d,"host":"%s","started":%d,"replay":"tcp://127.0.0.1:9","keys":null}}'
REPLAY = (
    "cd {0}; mkdir -p processes;"
    f" printf '{NOTE}' $$ $(uname -n) $(cut -d' ' -f22 /proc/$$/stat) > processes/tmp;"
    " mv processes/tmp processes/replay.json; exec sleep 600"
)
RANKS = "sleep 600 & echo $! > {0}/rank.tmp; mv {0}/rank.tmp {0}/rank; wait $!; exit 1"


class Stubbed(Launcher):
    """A launcher whose plan has shell commands in place of our processes."""

    def plan(self) -> Plan:
        commands = {"replay": REPLAY.format(self.run_dir), "learner": RANKS.format(self.run_dir)}
        stubs = [Process(name, name, self.node, ("sh", "-c", text, name), {}) for name, text in commands.items()]
        return dataclasses.replace(super().plan(), processes=tuple(stubs))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    settings = ["placement.local_rollouts=false", "replay.restarts=0", "learner.restarts=0"]
    config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu", *settings])
    made = Stubbed(config, False, LiveView(config, "off"))
    made.start()
    until((made.run_dir / "rank").exists, "the stub rank")
    yield made
    made.stop()


def test_only_the_replay_that_was_started_says_where_it_serves(launcher: Launcher) -> None:
    """The note of an earlier one is in the folder still, and its pid may be another process's by now."""
    assert launcher.address == launcher._replay_serves() == "tcp://127.0.0.1:9"
    path = launcher.run_dir / "processes" / "replay.json"
    noted, me = json.loads(path.read_text()), processes.of(os.getpid())
    assert me is not None
    for other in ({"pid": me.pid, "started": me.started}, {"started": noted["started"] - 1}, {"replay": None}):
        path.write_text(json.dumps(noted | other))
        assert launcher._replay_serves() is None


@pytest.mark.parametrize("role", ["replay", "learner"])
def test_a_death_without_restarts_left_ends_the_run_by_name_and_leaves_nothing(launcher: Launcher, role: str) -> None:
    rank = int((launcher.run_dir / "rank").read_text())
    os.kill(launcher.replay.pid if role == "replay" else rank, signal.SIGKILL)
    with pytest.raises(RunFailed) as failed:
        launcher.watch()
    assert failed.value.code == "SLIP-RUN-01" and f"{role} (pid " in str(failed.value)
    launcher.stop()
    assert [child.name for child in launcher.processes.values() if child.exit_code() is None] == []
    until(lambda: (found := processes.of(rank)) is None or found.state == "Z", "the end of the rank")


@pytest.mark.parametrize("role", ["replay", "learner"])
def test_a_death_with_restarts_left_is_a_start_in_place(
    launcher: Launcher, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(launcher, f"_{role}_restarts").limit = 1
    before = launcher.processes[role]
    os.kill(launcher.replay.pid if role == "replay" else int((launcher.run_dir / "rank").read_text()), signal.SIGKILL)
    looks = iter(range(600))

    class Over(Exception):
        """Both run again."""

    def look(*_: object) -> None:
        now = launcher.processes[role]
        assert next(looks) is not None
        if now is not before and now.exit_code() is None:
            raise Over

    monkeypatch.setattr(launcher.view, "update", look)
    with pytest.raises(Over):
        launcher.watch()
    assert launcher.resume, "it goes on from its journal, or from its newest checkpoint"


def ended(code: int) -> Any:
    """A child that has, and what it noted."""
    return SimpleNamespace(exit_code=lambda: code, root_cause=lambda: "it died", ending=Ending(code, "it refuses"))


@pytest.mark.parametrize(
    ("role", "code", "settings", "is_over", "goes_on"),
    [
        ("learner", -9, [], False, True),
        ("learner", CANNOT_GO_ON, [], False, False),
        ("learner", -9, ["placement.rollout=node0:0", "placement.learner='node0:1; node1:0'"], False, False),
        ("learner", -9, [], True, False),
        ("replay", -9, [], False, True),
        ("replay", CANNOT_GO_ON, [], False, False),
        ("replay", 0, [], False, False),
    ],
)
def test_what_another_start_cannot_help_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, code: int, settings: list[str], is_over: bool,
    goes_on: bool,
) -> None:  # fmt: skip
    config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu", *settings])
    launcher, starts = Launcher(config, False, LiveView(config, "off"), address="tcp://127.0.0.1:9"), list[str]()
    launcher.replay, launcher.learner = ended(code), ended(code)
    monkeypatch.setattr(Launcher, "_learner_leaves", lambda _: False)
    monkeypatch.setattr(Launcher, "_replay_says_over", lambda *_: is_over)
    monkeypatch.setattr(Launcher, "_start_replay", lambda *_: starts.append("replay"))
    monkeypatch.setattr(Launcher, "_start_learner", lambda _: starts.append("learner"))
    monkeypatch.setattr(children, "stop", lambda _: None)
    with nullcontext() if goes_on else pytest.raises(RunFailed):
        launcher._learner_died(None) if role == "learner" else launcher._replay_died()  # type: ignore[arg-type]
    assert starts == [role] * goes_on
