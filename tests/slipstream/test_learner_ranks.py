"""Learner ranks of one node and of several: their places, what they die of, and which start they belong to."""

import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import load
from slipstream.launch.learner.generations import NodeRanks, Start, read_ranks, write_ranks, write_start
from slipstream.launch.learner.node import LearnerNode, Terminal
from slipstream.launch.learner.ranks import RankGroup, cause
from slipstream.launch.servers import NodeAway, RunFailed
from slipstream.launch.terminal import Interrupted
from slipstream.runtime import ending, processes
from slipstream.runtime.ending import Ending
from slipstream.runtime.lifeline import CANNOT_GO_ON
from tests.support.waiting import until

FAILED, KILLED, ENDED = 1, -signal.SIGKILL, -signal.SIGTERM
RANKS = 'echo "$RANK $LOCAL_RANK $SLIPSTREAM_GENERATION $MASTER_PORT $*"; exec sleep 60'


@pytest.mark.parametrize(
    ("failures", "code", "rank"),
    [
        ([KILLED, FAILED], KILLED, 0),
        ([FAILED, KILLED], KILLED, 1),
        ([FAILED, ENDED], ENDED, 1),
        ([FAILED, FAILED], FAILED, 0),
        ([FAILED, CANNOT_GO_ON], CANNOT_GO_ON, 1),
        ([KILLED, CANNOT_GO_ON], CANNOT_GO_ON, 0),
    ],
)
def test_the_cause_is_the_rank_that_was_killed_or_refused_or_stopped_first(failures, code, rank):
    found = cause([Ending(its, "it stops", unix_s=number, rank=number) for number, its in enumerate(failures)])
    assert found is not None and (found.code, found.rank) == (code, rank)
    assert cause([]) is None


def places(*ranks: int) -> list[tuple[str, dict[str, str]]]:
    return [(f"learner-{rank}", {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in ranks]


def said(log: Path) -> list[str]:
    until(lambda: log.exists() and log.read_text().endswith("\n"), "what the rank says")
    return log.read_text().split()


def test_each_rank_has_its_place_and_a_killed_one_is_noted(tmp_path):
    group = RankGroup.start(3, ["sh", "-c", RANKS], places(0, 1), tmp_path)
    try:
        (*first, port), (*second, same) = (said(tmp_path / f"learner-{rank}.log") for rank in (0, 1))
        assert (first, second, port) == (["0", "0", "3"], ["1", "1", "3"], same)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", int(port)))
        with socket.socket() as store:  # of rank 0
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", int(port)))
            store.listen()
        os.kill(group.children[1].pid, signal.SIGKILL)
        until(lambda: group.children[1].exit_code() is not None, "its end")
        group.note_failures()
        (noted,) = ending.of_ranks(tmp_path)
        assert (noted.code, noted.rank, noted.generation, noted.symptom) == (KILLED, 1, 3, "closed")
        assert group.is_running and not group.is_done
    finally:
        group.end()
    assert not group.is_running


DYING = """
import os, sys
from pathlib import Path
from slipstream.launch.learner.ranks import RankGroup
rank = [sys.executable, "-c", "import os, time; from slipstream.runtime.lifeline import PARENT, die_with_parent;"
        "die_with_parent(int(os.environ[PARENT])); print(os.getpid(), flush=True); time.sleep(60)"]
RankGroup.start(1, rank, [("learner-0", {})], Path(sys.argv[1])).children[0].process.wait()
"""


def test_a_rank_dies_with_the_process_that_has_started_it(tmp_path):
    parent = RankGroup.start(1, [sys.executable, "-c", DYING, str(tmp_path)], [("parent", {})], tmp_path / "parent")
    rank = int(said(tmp_path / "learner-0.log")[0])
    parent.children[0].process.kill()
    until(lambda: (found := processes.of(rank)) is None or found.state == "Z", "the end of the rank")
    parent.end()


# ---- a learner node besides the first one -------------------------------------------------------------------


class Node(LearnerNode):
    """node1, whose replay answers or does not; one look is `_watch`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        nodes = ["placement.rollout=node2:0", "placement.learner='node0:0; node1:0'", "network.insecure=true"]
        own = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        config = load("quickstart", [f"run.dir={folder}", "run.name=run", "placement.device=cpu", *nodes, *own])
        self.said, self.answers = list[str](), True
        terminal = Terminal(lambda: None, lambda _: None, self.said.append)
        process = SimpleNamespace(command=("sh", "-c", RANKS, "rank"), of_ranks=places(1))
        plan = SimpleNamespace(replay="tcp://127.0.0.1:9", of=lambda *_: [process])
        super().__init__(SimpleNamespace(spec=SimpleNamespace(node="node1"), config=config, plan=plan), "run", terminal)

    def _replay_answers(self) -> bool:
        return self.answers

    @property
    def noted(self) -> NodeRanks:
        found = read_ranks(self.run_dir, "node1")
        assert found is not None
        return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    write_start(tmp_path / "run", Start(4, resumes=False))
    return tmp_path / "run"


def test_the_ranks_of_a_node_start_again_with_each_generation(run_dir):
    node = Node(run_dir.parent)
    node._take_place()
    assert node.noted.generation == 0
    node._watch()
    first = node._ranks.children[0]
    assert node.noted.generation == 4 and node.noted.ranks == {"learner-1": first.pid}
    assert said(run_dir / "logs" / "learner-1.log")[2] == "4"
    first.process.kill()
    first.process.wait()
    node._watch()
    assert [one.generation for one in ending.of_ranks(run_dir / "logs")] == [4], "the launcher reads it there"
    assert node._ranks.children == [first], "it decides when they start again"

    write_start(run_dir, Start(5, resumes=True))
    node.answers = False
    node._watch()
    assert node._ranks.children == [] and node.noted.generation == 4, "without the network ranks would not meet"
    node.answers = True
    node._watch()
    try:
        assert node.noted.generation == 5
        until(lambda: "--resume" in (run_dir / "logs" / "learner-1.log").read_text(), "what it was started with")
    finally:
        node._ranks.end()


def test_a_node_that_is_started_again_waits_for_another_generation(run_dir):
    """The others are in the midst of the present one."""
    write_ranks(run_dir, "node1", NodeRanks(4, {"learner-1": 1}, "an earlier process"))
    node = Node(run_dir.parent)
    node._take_place()
    node._watch()
    assert node.noted.generation == 0 and node._ranks.children == []
    write_start(run_dir, Start(5, resumes=True))
    node._watch()
    assert node.noted.generation == 5
    node._ranks.end()


@pytest.mark.parametrize(
    ("ended", "raised"),
    [
        (Ending(0, "finished"), None),
        (Ending(1, "run stopped: no room"), RunFailed),
        (Ending(130, "SIGTERM received"), Interrupted),
    ],
)
def test_a_node_ends_as_the_run_does(run_dir, ended, raised):
    node = Node(run_dir.parent)
    node._take_place()
    node._watch()
    ending.write_file(run_dir / ending.FILE, ended)
    if raised is None:
        assert node.run() == 0
    else:
        with pytest.raises(raised, match=ended.said):
            node.run()
    assert not node._ranks.is_running


def test_a_second_process_of_a_node_takes_the_place_of_the_first(run_dir):
    node, looks = Node(run_dir.parent), iter(range(2))

    def breathe() -> None:
        assert next(looks) is not None
        write_ranks(run_dir, "node1", NodeRanks(0, {}, "a later process"))

    node.terminal = node.terminal._replace(breathe=breathe)
    with pytest.raises(Interrupted, match="another process of node1"):
        node.run()


def test_a_node_gives_the_first_one_up_by_name(run_dir):
    (run_dir / "launch" / "start.json").unlink()
    node = Node(run_dir.parent, placement__give_up_after_s=0.1)
    node.answers = False
    with pytest.raises(NodeAway, match=r"0.1 s \(placement.give_up_after_s\)"):
        node.run()
