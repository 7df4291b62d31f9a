"""Several hosts: network namespaces behind a switch, the start scripts' --hosts path, CURVE keys, and a cut.

`SLIPSTREAM_SSH` is a command that enters the namespace of a host, as ssh would enter the host, and gives it a folder of
keys of its own. Everything else is what runs on real machines.
"""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import switched
from tests.support.runs import ROOT, Run, environment, left_over, patient_reward, processes, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HOSTS = {f"node{number}": f"10.213.0.1{number}" for number in range(4)}
STEPS = 40
CANARY = "hunter2-canary"
ENTER = """#!/usr/bin/env bash
# TARGET COMMAND, as ssh: the command runs in the namespace of that name, with keys of its own at the path of all.
# Names of addresses come from a file, because torch asks for them and there is no name server.
unset CANARY
exec ip netns exec "$1" bash -c 'mount --bind "$0" "$1" && mount --bind {names} /etc/hosts && exec bash -c "$2"' \\
  {keys_of}/"$1" {keys} "$2"
"""


@pytest.fixture
def switch():
    with switched(HOSTS) as made:
        yield made


FOUR_HOSTS = f"""
rollout.groups_per_step=8 rollout.max_running=32 evaluation.every_steps=0 tracking.live=plain
run.name=run network.replay_port=5757 network.heartbeat_s=0.5 network.silent_after_s=3 weight_bus.heartbeat_s=0.5
weight_bus.collective_timeout_s=2 weight_bus.deadline_s=8 rollout.restart_backoff_s=0.5 learner.total_steps={STEPS}
tracking.plot=false tracking.trackers=[tensorboard]
"""


def settings_of(tmp_path, untrained, own):
    values = [*untrained.settings, f"run.dir={tmp_path}", f"network.keys={tmp_path}/keys", *own]
    return [word for value in values for word in ("--set", value)]


@contextlib.contextmanager
def started(tmp_path, switch, arguments):
    """A run by the two start scripts: (it, its rollout nodes, their output)."""
    make_keys = [sys.executable, "-m", "replay.keys", "--out", str(tmp_path / "keys"), "--clients", "node1,node2,node3"]
    subprocess.run(make_keys, cwd=ROOT, check=True, capture_output=True, timeout=150)
    for node in HOSTS:
        (tmp_path / "keys-of" / switch.host(node)).mkdir(parents=True, mode=0o700)
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {node}\n" for node, address in HOSTS.items()))
    enter = tmp_path / "enter"
    enter.write_text(ENTER.format(keys_of=tmp_path / "keys-of", keys=tmp_path / "keys", names=names))
    enter.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{node} {address} ssh={switch.host(node)}\n" for node, address in HOSTS.items()))
    ends = {"environment": {**environment(), "SLIPSTREAM_SSH": str(enter), "CANARY": CANARY}, "patience_s": 40}
    said, rollouts_said = tmp_path / "learner.out", tmp_path / "rollouts.out"
    over = ("--hosts", str(hosts), "--forward-env", "CANARY", *arguments)
    with (
        terminal(rollouts_said, "bash", "scripts/start_rollout_nodes.sh", *over, **ends) as rollouts,
        terminal(said, "bash", "scripts/start_learner.sh", *over, **ends) as learner,
    ):
        yield Run(learner, tmp_path / "run-2", said), rollouts, rollouts_said


def key_files(tmp_path, switch, node):
    folder = tmp_path / "keys-of" / switch.host(node)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check_processes(tmp_path):
    """Each process of the run has the canary in its environment, and none on this machine in its arguments."""
    running = processes()
    for module, count in {"replay.main": 1, "learner.train": 2, "rollout_server.main": 2}.items():
        pids = [pid for pid, command in running if str(tmp_path) in command and module in command]
        variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        assert len(pids) >= count and all(f"CANARY={CANARY}".encode() in each for each in variables), module
    assert [command for _, command in running if CANARY in command] == []


def check_files(tmp_path):
    """The canary is in no file of the run, its terminals or its hosts."""
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for kind in ("events.out.tfevents.*", "hang-*.txt", "replay.log", "config.yaml", "learner.out"):
        assert any(path.match(kind) for path in files), kind
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def groups_of(run, node):
    return run.steps()[-1].get(f"rollout/groups/rollout-{node}-0", 0)


def test_a_run_over_four_hosts_goes_on_while_one_is_cut_off_and_comes_back(tmp_path, untrained, switch):
    """Two learner nodes, whose ranks agree on a run name although the wanted one is taken, and two rollout nodes."""
    go_on, taken = tmp_path / "go-on", tmp_path / "run" / "config.yaml"
    taken.parent.mkdir()
    taken.touch()
    own = [f"reward.function={patient_reward(tmp_path, go_on, pause_s=0.06)}", *FOUR_HOSTS.split()]
    own += ["placement.learner=node0:0; node3:0", "placement.rollout=node1:0; node2:0"]
    with started(tmp_path, switch, settings_of(tmp_path, untrained, own)) as (run, rollouts, said):
        run.wait_until(lambda: run.steps() and groups_of(run, "node1") and groups_of(run, "node2"), "both servers", 120)
        # both may have answered with the first weights before an update found both on the bus
        run.wait_until(lambda: max(row["weight_sync/members"] for row in run.steps()) == 2, "both on the bus", 120)

        check_processes(tmp_path)

        switch.cut("node2")
        before = run.steps()[-1]["training/global_step"]
        run.wait_until(lambda: re.search(r"lost 'rollout-node2-0'.*\[silent\]", run.log("replay")), "the loss", 60)
        run.wait_for_step(before + 5, 120)  # with the other server alone
        assert re.search(r"rollout-node2-0.*\[(silent|closed)\]", run.log("learner-0")), "the bus names it as well"
        after = groups_of(run, "node1")

        switch.heal("node2")
        run.wait_until(lambda: len(re.findall(r"'rollout-node2-0' \(pid", run.log("replay"))) > 1, "its return", 120)
        returned = groups_of(run, "node2")
        run.wait_until(lambda: groups_of(run, "node2") > returned, "a trained group of its second life", 60)
        assert groups_of(run, "node1") > after
        go_on.touch()
        assert run.wait(120) == 0, run.text()[-3000:]
        assert rollouts.wait(60) == 0, said.read_text()[-3000:]

    told = said.read_text()
    assert re.search(
        r"^\[node2\] .*rollout-node2-0.* died: .*\[silent\] \[SLIP-NET-02\]; restart 1 of 3", told, re.MULTILINE
    ), told
    assert "[node0]" in run.text() and f"finished {STEPS} steps" in run.text()
    assert re.search(r"^\[node3\] .*learner-1 INFO", run.text(), re.MULTILINE)
    assert "rank 1 starts at version 0" in run.log("learner-1")
    assert len(list((run.folder / "checkpoints" / f"step_{STEPS}" / "dcp").glob("__*_0.distcp"))) == 2

    steps = run.steps()
    assert [row["training/global_step"] for row in steps] == list(range(1, STEPS + 1))
    reported = [row["weight_sync/digests_equal"] for row in steps if "weight_sync/digests_equal" in row]
    assert reported[-1] is True, "of a version that no newer one has taken the place of"
    waited = max(row["timing_s/publish_wait"] for row in steps)
    assert waited <= 8 + 5, "no step waits longer than the deadline, and what a busy machine adds"
    assert len(run.groups()) == len(set(run.groups())) == STEPS * 8, "nothing is trained twice"
    lags = {int(lag) for row in steps for lag in row["training/lag_histogram"]}
    assert max(lags) <= 1, lags

    shared = {"server.key", "clients/learner.key", *(f"clients/{node}.key" for node in ("node1", "node2", "node3"))}
    secrets = {"server.key_secret", "clients/learner.key_secret"}
    assert key_files(tmp_path, switch, "node0") == shared | secrets
    for node in ("node1", "node2", "node3"):
        own = shared | {f"clients/{node}.key_secret"}  # public keys prove who asks a teacher there
        assert key_files(tmp_path, switch, node) == own, "its own key, and no secret of anybody else"
    assert left_over(str(tmp_path)) == []
    check_files(tmp_path)
