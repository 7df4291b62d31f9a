"""Ranks and nodes of a learner over two and three hosts fail and go on in place; the journal makes the same weights.

Hosts are network namespaces behind a switch, with links of 200 Mbit/s. Each fault is measured from its beginning to the
first step that no learner had made before. The last line is JSON.

By default: tests/slipstream/test_launcher_deaths.py and test_learner_ranks.py (what begins another start of the ranks),
tests/e2e/test_namespaces.py (a rank of another node is killed).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support.namespaces import Switch, ip, switched
from tests.support.runs import Run, environment, left_over, patient_reward, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

RANK_S = 60
"""Within so many seconds a run goes on when a rank was killed; a lost node has GIVE_UP_S more."""
GIVE_UP_S = 60
PATIENCE_S = GIVE_UP_S + RANK_S
SETTINGS = f"""
rollout.groups_per_step=8 rollout.max_running=32 evaluation.every_steps=0 tracking.live=plain tracking.plot=false
run.name=run learner.total_steps=10000 learner.deterministic=true learner.restarts=20 checkpoint.every_steps=4
replay.journal_keep=all network.insecure=true network.replay_port=5757 network.heartbeat_s=1 network.silent_after_s=6
weight_bus.heartbeat_s=1 weight_bus.collective_timeout_s=4 weight_bus.deadline_s=20 rollout.restart_backoff_s=0.5
placement.device=cpu placement.give_up_after_s={GIVE_UP_S} placement.rollout=rollouts:0
"""
ENTER = """#!/usr/bin/env bash
exec ip netns exec "$1" bash -c 'mount --bind {names} /etc/hosts && exec bash -c "$1"' - "$2"
"""


class Fleet:
    """A run over hosts, from one command."""

    def __init__(self, run: Run, switch: Switch, nodes: list[str]) -> None:
        self.run, self.switch, self.first, self.last, self.ranks = run, switch, nodes[0], nodes[-1], len(nodes)
        self.seconds: dict[str, float] = {}

    def pids(self, node: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.switch.host(node)], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def signal_all(self, node: str, number: signal.Signals) -> None:
        """All processes of a host, and those that they start meanwhile."""
        for _ in range(2):
            for pid in self.pids(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_rank(self, rank: int) -> None:
        os.kill(json.loads((self.run.folder / "processes" / f"learner-{rank}.json").read_text())["pid"], signal.SIGKILL)

    def newest(self) -> int:
        return max((line["step"] for line in self.run.ledger()), default=0)

    def until_said(self, words: str, before: str) -> None:
        """Something that was not in the terminal when a fault began."""
        self.run.wait_until(lambda: words in self.run.text()[len(before) :], words, PATIENCE_S)

    def measure(self, fault: str) -> None:
        """Plant it, and wait for a step that no learner had made."""
        made, began, before = self.newest(), time.monotonic(), self.run.text()
        match fault:
            case "first rank killed":
                self.kill_rank(0)
            case "last rank killed":
                self.kill_rank(self.ranks - 1)
            case "node stands still":
                self.signal_all(self.last, signal.SIGSTOP)
                self.until_said(f"waits for node {self.last}", before)
                self.signal_all(self.last, signal.SIGCONT)
            case "node killed":
                self.signal_all(self.last, signal.SIGKILL)
            case "first node killed":
                self.signal_all(self.first, signal.SIGKILL)
            case "node cut off":
                self.switch.cut(self.last)
                self.until_said("the learner stopped: ", before)
                self.switch.heal(self.last)
        self.run.wait_until(lambda: self.newest() > made, f"a step after: {fault}", PATIENCE_S)
        self.seconds[fault] = round(time.monotonic() - began, 1)
        limit = RANK_S if "rank" in fault else PATIENCE_S
        assert self.seconds[fault] < limit, (fault, self.seconds)


FAULTS = (
    "last rank killed",
    "first rank killed",
    "node stands still",
    "node killed",
    "node cut off",
    "first node killed",
)


@contextlib.contextmanager
def started(tmp_path, untrained, switch, nodes):
    names, enter, hosts = tmp_path / "names", tmp_path / "enter", tmp_path / "hosts"
    names.write_text(switch.names())
    enter.write_text(ENTER.format(names=names))
    enter.chmod(0o755)
    hosts.write_text("".join(f"{node} {its} ssh={switch.host(node)}\n" for node, its in switch.hosts.items()))
    learner = ";".join(f"{node}:0" for node in nodes)
    own = [*untrained.settings, f"reward.function={patient_reward(tmp_path, tmp_path / 'never', pause_s=0.03)}"]
    own += [f"run.dir={tmp_path}", f"placement.learner={learner}", *SETTINGS.split()]
    words = [sys.executable, "-m", "slipstream.launch", "run", "--hosts", str(hosts)]
    words += [word for setting in own for word in ("--set", setting)]
    variables = {**environment(), "SLIPSTREAM_SSH": str(enter)}
    with terminal(tmp_path / "run.out", *words, environment=variables, patience_s=60) as process:
        yield Fleet(Run(process, tmp_path / "run", tmp_path / "run.out"), switch, nodes)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_and_nodes_that_fail_go_on_in_place(tmp_path, untrained, launch, capsys, count):
    if shutil.which("tc") is None:
        pytest.skip("no `tc` command (iproute2)")
    nodes = [f"node{number}" for number in range(count)]
    with switched({node: f"10.214.0.1{number}" for number, node in enumerate([*nodes, "rollouts"])}) as switch:
        for node in switch.hosts:
            ip("netns", "exec", switch.host(node), "tc", "qdisc", "add", "dev", "net0", "root", "tbf",
               "rate", "200mbit", "burst", "256kb", "latency", "100ms")  # fmt: skip
        with started(tmp_path, untrained, switch, nodes) as fleet:
            run = fleet.run
            run.wait_until(lambda: fleet.newest() > 4, "the first steps", 200)
            for fault in FAULTS:
                fleet.measure(fault)
            began, before = time.monotonic(), run.text()
            if count == 2:
                run.process.send_signal(signal.SIGINT)
                assert run.wait(90) == 130
                assert "SIGINT received: ending" in run.text()[len(before) :]
            else:
                switch.cut(fleet.last)
                assert run.wait(PATIENCE_S) == 1
                assert f"learner node {fleet.last} did not come within {GIVE_UP_S} s" in run.text()[len(before) :]
            fleet.seconds["end"] = round(time.monotonic() - began, 1)
    assert left_over(str(tmp_path)) == []

    made: dict[int, list[tuple]] = {}
    for line in run.ledger():
        made.setdefault(line["step"], []).append((line["digest"], line["groups"]))
    assert all(each == each[:1] * len(each) for each in made.values()), "the same groups and the same weights again"
    groups = [tuple(group) for each in made.values() for group in each[-1][1]]
    assert len(groups) == len(set(groups)) == 8 * len(made), "none is trained twice"
    here = ["placement.learner=null", "placement.rollout=null", f"placement.split=1:{count}", "network.host=127.0.0.1"]
    words = ["--replay", str(run.folder), *(word for each in here for word in ("--set", each))]
    played = launch.start(["learner.main", *words], run.folder)
    assert played.wait(400) == 0, played.text()[-3000:]
    result = json.loads(played.text().splitlines()[-1])
    assert result["equal"] == result["steps"] == len(made)
    again = sum(len(each) > 1 for each in made.values())
    with capsys.disabled():
        print("\n" + json.dumps({"learner_nodes": count, "seconds": fleet.seconds, "made_again": again, **result}))
