"""Deaths of replay and of a learner rank as the launcher sees them: stub children, which do nothing but run.

Whole runs that lose them and go on: tests/e2e/test_in_place.py.
"""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import load
from slipstream.launch import launcher as launcher_module
from slipstream.launch.launcher import Launcher
from slipstream.launch.learner.generations import NodeRanks, Start, read_start, write_ranks
from slipstream.launch.servers import NodeAway, RunFailed
from slipstream.plan.processes import Plan, Process
from slipstream.runtime import ending, processes
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
RANKS = "echo $$ > {0}/rank.tmp; mv {0}/rank.tmp {0}/rank; exec sleep 600"


class Stubbed(Launcher):
    """A launcher whose plan has shell commands in place of our processes."""

    def plan(self) -> Plan:
        commands = {"replay": REPLAY.format(self.run_dir), "learner": RANKS.format(self.run_dir)}
        stubs = [Process(n, n, self.node, ("sh", "-c", text, n), {}, ranks=range(1)) for n, text in commands.items()]
        return dataclasses.replace(super().plan(), processes=tuple(stubs))


@pytest.fixture(autouse=True)
def _nothing_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub replay answers nothing."""
    monkeypatch.setattr(launcher_module, "OVER_S", 0.0)


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


@pytest.mark.parametrize(("role", "said"), [("replay", "replay (pid "), ("learner", "learner rank 0 (pid ")])
def test_a_death_without_restarts_left_ends_the_run_by_name_and_leaves_nothing(
    launcher: Launcher, role: str, said: str
) -> None:
    rank = int((launcher.run_dir / "rank").read_text())
    os.kill(launcher.replay.pid if role == "replay" else rank, signal.SIGKILL)
    with pytest.raises(RunFailed) as failed:
        launcher.watch()
    assert failed.value.code == "SLIP-RUN-01" and said in str(failed.value)
    launcher.stop()
    assert [child.name for child in launcher.processes.values() if child.exit_code() is None] == []
    until(lambda: (found := processes.of(rank)) is None or found.state == "Z", "the end of the rank")


@pytest.mark.parametrize(("role", "name"), [("replay", "replay"), ("learner", "learner-0")])
def test_a_death_with_restarts_left_is_a_start_in_place(
    launcher: Launcher, role: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(launcher, f"_{role}_restarts").limit = 1
    before = launcher.processes[name]
    os.kill(before.pid, signal.SIGKILL)
    go_on(launcher, lambda: (now := launcher.processes[name]) is not before and now.exit_code() is None, monkeypatch)
    assert launcher.resume, "it goes on from its journal, or from its newest checkpoint"


def go_on(launcher: Launcher, until_: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher watch until something is so."""
    looks = iter(range(300))

    class Over(Exception):
        """It is."""

    def look(*_: object) -> None:
        assert next(looks) is not None
        if until_():
            raise Over

    with monkeypatch.context() as patched, pytest.raises(Over):
        patched.setattr(launcher.view, "update", look)
        launcher.watch()


@pytest.mark.parametrize(
    ("role", "code", "is_over", "goes_on"),
    [
        ("learner", -9, False, True),
        ("learner", CANNOT_GO_ON, False, False),
        ("learner", -9, True, False),
        ("replay", -9, False, True),
        ("replay", CANNOT_GO_ON, False, False),
        ("replay", 0, False, False),
    ],
)
def test_what_another_start_cannot_help_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, code: int, is_over: bool, goes_on: bool
) -> None:
    config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu"])
    launcher, starts = Launcher(config, False, LiveView(config, "off"), address="tcp://127.0.0.1:9"), list[str]()
    launcher.replay = SimpleNamespace(exit_code=lambda: code, root_cause=lambda: "it died")  # type: ignore[assignment]
    monkeypatch.setattr(Launcher, "_failure", lambda _: Ending(code, "it refuses"))
    monkeypatch.setattr(Launcher, "_learner_leaves", lambda _: False)
    monkeypatch.setattr(Launcher, "_replay_says_over", lambda *_: is_over)
    monkeypatch.setattr(Launcher, "_start_replay", lambda *_: starts.append("replay"))
    monkeypatch.setattr(Launcher, "_begin_generation", lambda _: starts.append("learner"))
    with nullcontext() if goes_on else pytest.raises(RunFailed):
        for _ in range(2):  # the restart is at once
            launcher._watch_learner(None) if role == "learner" else launcher._replay_died()  # type: ignore[arg-type]
            launcher.replay.exit_code = lambda: code  # type: ignore[method-assign]
            if starts:
                break
    assert starts == [role] * goes_on


# ---- several learner nodes ------------------------------------------------------------------------------

TWO_NODES = "placement.rollout=node0:0 placement.learner=node0:1;node1:0 network.host=10.0.0.1 network.replay_port=5757"


@pytest.fixture
def over_two_nodes(tmp_path: Path) -> Iterator[Launcher]:
    """The first learner node's launcher; what the other one would write, tests write."""
    settings = [
        "placement.local_rollouts=false",
        "network.insecure=true",
        "network.silent_after_s=5",
        *TWO_NODES.split(),
    ]
    config = load("quickstart", [f"run.dir={tmp_path}", "placement.device=cpu", *settings])
    made = Stubbed(config, False, LiveView(config, "off"))
    made.start()
    yield made
    made.stop()


def comes(launcher: Launcher, generation: int) -> None:
    """Ranks of node1 are there, in a process of its own for each generation."""
    noted = NodeRanks(generation, {"learner-1": 100 + generation}, f"node1 {generation} 0")
    write_ranks(launcher.run_dir, "node1", noted)


def is_there(launcher: Launcher, generation: int) -> Callable[[], bool]:
    return lambda: launcher.learner.generation == generation and launcher.learner.is_running


def test_the_ranks_of_a_node_wait_for_those_of_the_others(
    over_two_nodes: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, said = over_two_nodes, list[str]()
    assert read_start(launcher.run_dir) == Start(1, resumes=False) and not launcher.learner.children
    monkeypatch.setattr(launcher_module, "ABSENT_S", 0.0)
    monkeypatch.setattr(launcher.view, "event", said.append)
    go_on(launcher, lambda: bool(said), monkeypatch)
    assert "node node1" in said[0] and "placement.give_up_after_s" in said[0] and not launcher.learner.children
    comes(launcher, 1)
    go_on(launcher, is_there(launcher, 1), monkeypatch)


def test_a_node_that_stays_away_ends_the_run_by_name(over_two_nodes: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = over_two_nodes
    monkeypatch.setattr(launcher, "_began", time.monotonic() - 601)
    with pytest.raises(NodeAway, match=r"node1 did not come within 600 s \(placement.give_up_after_s\)"):
        go_on(launcher, lambda: False, monkeypatch)


def killed(launcher: Launcher) -> None:
    """Node1 has seen its rank end."""
    path = launcher.run_dir / "logs" / "learner-1.exit.json"
    ending.write_file(path, Ending(-9, "learner rank 1 was killed", rank=1, generation=1))


def silent(launcher: Launcher) -> None:
    """Replay hears nothing of rank 1 any more."""
    peer = {"name": "learner-1", "pid": 101, "silent_s": 6.0}
    launcher._status = {"peers": [peer], "silent": [], "ended": None}


def forgotten(launcher: Launcher) -> None:
    """It has forgotten it, because its connection was closed."""
    launcher._status = {"peers": [], "silent": [{"name": "learner-1", "pid": 101, "host": "b"}], "ended": None}


def started_again(launcher: Launcher) -> None:
    write_ranks(launcher.run_dir, "node1", NodeRanks(0, {}, "node1 7 0"))


@pytest.mark.parametrize("fails", [killed, silent, forgotten, started_again])
def test_all_nodes_start_their_ranks_again_when_one_has_failed(
    over_two_nodes: Launcher, monkeypatch: pytest.MonkeyPatch, fails: Callable[[Launcher], None]
) -> None:
    """And what is left of the generation before is no failure of the next one."""
    launcher = over_two_nodes
    monkeypatch.setattr(launcher_module, "LEAVES_S", 0.0)
    comes(launcher, 1)
    go_on(launcher, is_there(launcher, 1), monkeypatch)
    fails(launcher)
    before = launcher.learner
    go_on(launcher, lambda: launcher.learner is not before, monkeypatch)
    assert read_start(launcher.run_dir) == Start(2, resumes=True) and not before.is_running
    fails(launcher)
    comes(launcher, 2)
    go_on(launcher, is_there(launcher, 2), monkeypatch)
    go_on(launcher, is_there(launcher, 2), monkeypatch)
    assert launcher._learner_restarts.count == 1
