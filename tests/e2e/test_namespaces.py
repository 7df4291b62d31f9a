"""Several hosts: three network namespaces behind a switch, the start scripts' --hosts path, CURVE keys, and a cut.

`SLIPSTREAM_SSH` is a command that enters the namespace of a host, as ssh would enter the host, and gives it a folder of
keys of its own. Everything else is what runs on real machines.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Run, environment, left_over, patient_reward, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HOSTS = {"node0": "10.213.0.10", "node1": "10.213.0.11", "node2": "10.213.0.12"}
ENTER = """#!/usr/bin/env bash
# TARGET COMMAND, as ssh: the command runs in the namespace of that name, with keys of its own at the path of all.
# Names of addresses come from a file, because torch asks for them and there is no name server.
exec ip netns exec "$1" bash -c 'mount --bind "$0" "$1" && mount --bind {names} /etc/hosts && exec bash -c "$2"' \\
  {keys_of}/"$1" {keys} "$2"
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def why_not():
    """Why this machine cannot make network namespaces, or an empty string."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    name = f"slip{os.getpid()}-try"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()[:100]}"
    try:
        ip("-n", name, "link", "add", "br0", "type", "bridge")
        ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        command = ["ip", "netns", "exec", name, "mount", "--bind", "/tmp", "/mnt"]
        subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        return f"no bridge, veth or bind mount here: {error.stderr.strip()[:100]}"
    finally:
        ip("netns", "del", name)
    return ""


class Switch:
    """A bridge in a namespace of its own, with a port for each host; hosts know no other network."""

    def __init__(self):
        self.prefix = f"slip{os.getpid()}"
        self.name = f"{self.prefix}-switch"
        self.made = []

    def __enter__(self):
        self._namespace(self.name)
        ip("-n", self.name, "link", "add", "br0", "type", "bridge")
        ip("-n", self.name, "link", "set", "br0", "up")
        for node, address in HOSTS.items():
            self._namespace(self.host(node))
            ip("-n", self.name, "link", "add", node, "type", "veth", "peer", "name", "net0", "netns", self.host(node))
            ip("-n", self.name, "link", "set", node, "master", "br0", "up")
            ip("-n", self.host(node), "addr", "add", f"{address}/24", "dev", "net0")
            ip("-n", self.host(node), "link", "set", "net0", "up")
        return self

    def __exit__(self, *_):
        for name in reversed(self.made):
            ip("netns", "del", name)

    def host(self, node):
        return f"{self.prefix}-{node}"

    def cut(self, node):
        ip("-n", self.name, "link", "set", node, "down")

    def heal(self, node):
        ip("-n", self.name, "link", "set", node, "up")

    def _namespace(self, name):
        ip("netns", "add", name)
        self.made.append(name)
        ip("-n", name, "link", "set", "lo", "up")


@pytest.fixture
def switch():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Switch() as made:
        yield made


def settings_of(tmp_path, untrained, go_on, *more):
    values = [
        *untrained.settings,
        f"run.dir={tmp_path}",
        "run.name=three-hosts",
        f"reward.function={patient_reward(tmp_path, go_on, pause_s=0.03)}",
        "placement.learner='node0:0'",
        "placement.rollout='node1:0; node2:0'",
        f"network.keys={tmp_path}/keys",
        "network.replay_port=5757",
        "network.heartbeat_s=0.5",
        "network.silent_after_s=3",
        "weight_bus.heartbeat_s=0.5",
        "weight_bus.collective_timeout_s=2",
        "weight_bus.deadline_s=8",
        "rollout.wait_for_servers_s=60",
        "rollout.restart_backoff_s=0.5",
        "rollout.groups_per_step=8",
        "rollout.max_running=32",
        "learner.total_steps=60",
        "learner.batch_deadline_s=60",
        "evaluation.every_steps=0",
        "tracking.live=plain",
        "tracking.plot=false",
        *more,
    ]
    return [word for value in values for word in ("--set", value)]


def make_keys(tmp_path):
    """Keys on the machine of the start scripts, and an empty folder in their place on each host."""
    command = [sys.executable, "-m", "replay.keys", "--out", str(tmp_path / "keys"), "--clients", "node1,node2"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)


def start_scripts(tmp_path, switch, arguments):
    """(environment, learner command, rollout command)."""
    for node in HOSTS:
        (tmp_path / "keys-of" / switch.host(node)).mkdir(parents=True, mode=0o700)
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {node}\n" for node, address in HOSTS.items()))
    enter = tmp_path / "enter"
    enter.write_text(ENTER.format(keys_of=tmp_path / "keys-of", keys=tmp_path / "keys", names=names))
    enter.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{node} {address} ssh={switch.host(node)}\n" for node, address in HOSTS.items()))
    variables = {**environment(), "SLIPSTREAM_SSH": str(enter)}
    over = ("--hosts", str(hosts), *arguments)
    return (
        variables,
        ("bash", "scripts/start_learner.sh", *over),
        ("bash", "scripts/start_rollout_nodes.sh", *over),
    )


def key_files(tmp_path, switch, node):
    folder = tmp_path / "keys-of" / switch.host(node)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def is_ready(run, tmp_path, switch, node):
    """What Kubernetes would ask, on that host."""
    words = ["--role", "rollout", "--node", node, "--hosts", str(tmp_path / "hosts")]
    words += ["--config", str(run.folder / "config.yaml")]
    line = shlex.join([sys.executable, "-m", "learner.launch.hosts.ready", *words])
    command = [str(tmp_path / "enter"), switch.host(node), f"cd {ROOT} && {line}"]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def groups_of(run, node):
    return run.steps()[-1].get(f"rollout/groups/rollout-{node}-0", 0)


def test_three_hosts_train_and_one_is_cut_off_and_comes_back(tmp_path, untrained, switch):
    go_on = tmp_path / "go-on"
    arguments = settings_of(tmp_path, untrained, go_on)
    make_keys(tmp_path)
    variables, learner_script, rollout_script = start_scripts(tmp_path, switch, arguments)
    said, rollouts_said = tmp_path / "learner.out", tmp_path / "rollouts.out"

    with (
        terminal(rollouts_said, *rollout_script, environment=variables, patience_s=40) as rollouts,
        terminal(said, *learner_script, environment=variables, patience_s=40) as learner,
    ):
        run = Run(learner, tmp_path / "three-hosts", said)
        run.wait_until(lambda: run.steps() and groups_of(run, "node1") and groups_of(run, "node2"), "both servers", 120)
        assert max(row["weight_sync/members"] for row in run.steps()) == 2

        assert is_ready(run, tmp_path, switch, "node1") and is_ready(run, tmp_path, switch, "node2")

        switch.cut("node2")
        before = run.steps()[-1]["training/global_step"]
        run.wait_until(lambda: re.search(r"lost 'rollout-node2-0'.*\[silent\]", run.log("replay")), "the loss", 60)
        run.wait_for_step(before + 5, 60)  # with the other server alone
        assert re.search(r"rollout-node2-0.*\[(silent|closed)\]", run.log("learner-0")), "the bus names it as well"
        after = groups_of(run, "node1")
        assert not is_ready(run, tmp_path, switch, "node2")

        switch.heal("node2")
        run.wait_until(lambda: len(re.findall(r"'rollout-node2-0' \(pid", run.log("replay"))) > 1, "its return", 60)
        returned = groups_of(run, "node2")
        run.wait_until(lambda: groups_of(run, "node2") > returned, "a trained group of its second life", 60)
        assert groups_of(run, "node1") > after
        go_on.touch()
        assert run.wait(120) == 0, run.text()[-3000:]
        assert rollouts.wait(60) == 0, rollouts_said.read_text()[-3000:]

    told = rollouts_said.read_text()
    assert re.search(r"^\[node2\] .*rollout-node2-0.* died: .*\[silent\]; restart 1 of 3", told, re.MULTILINE), told
    assert "[node0]" in run.text() and "finished 60 steps" in run.text()

    steps = run.steps()
    assert [row["training/global_step"] for row in steps] == list(range(1, 61))
    assert steps[-1]["weight_sync/digests_equal"] is True
    assert max(row["timing_s/publish_wait"] for row in steps) <= 8 + 1, "no step waits longer than the deadline"
    groups = [tuple(group) for line in run.ledger() for group in line["groups"]]
    assert len(groups) == len(set(groups)) == 60 * 8, "nothing is trained twice"
    lags = {int(lag) for row in steps for lag in row["training/lag_histogram"]}
    assert max(lags) <= 1, lags

    shared = {"server.key", "clients/learner.key", "clients/node1.key", "clients/node2.key"}
    secrets = {"server.key_secret", "clients/learner.key_secret"}
    assert key_files(tmp_path, switch, "node0") == shared | secrets
    for node in ("node1", "node2"):
        own = {"server.key", f"clients/{node}.key", f"clients/{node}.key_secret"}
        assert key_files(tmp_path, switch, node) == own, "its own key, and no secret of anybody else"
    assert left_over(str(tmp_path)) == []


def test_a_learner_over_two_hosts(tmp_path, untrained, switch):
    """torchrun's ranks meet at the first learner node; all agree on a run name, although the wanted one is taken."""
    go_on = tmp_path / "go-on"
    go_on.touch()
    taken = tmp_path / "three-hosts" / "config.yaml"
    taken.parent.mkdir()
    taken.touch()
    more = ["placement.learner='node0:0; node2:0'", "placement.rollout='node1:0'", "learner.total_steps=4"]
    arguments = settings_of(tmp_path, untrained, go_on, *more)
    make_keys(tmp_path)
    variables, learner_script, rollout_script = start_scripts(tmp_path, switch, arguments)
    said, rollouts_said = tmp_path / "learner.out", tmp_path / "rollouts.out"
    with (
        terminal(rollouts_said, *rollout_script, environment=variables, patience_s=40) as rollouts,
        terminal(said, *learner_script, environment=variables, patience_s=40) as learner,
    ):
        run = Run(learner, tmp_path / "three-hosts-2", said)
        assert run.wait(180) == 0, run.text()[-3000:]
        assert rollouts.wait(60) == 0, rollouts_said.read_text()[-3000:]
    assert len(run.steps()) == 4 and run.steps()[-1]["weight_sync/digests_equal"] is True
    assert "rank 1 starts at version 0" in run.log("learner-1")
    assert len(list((run.folder / "checkpoints" / "step_4" / "dcp").glob("__*_0.distcp"))) == 2
    assert re.search(r"^\[node2\] .*learner-1 INFO", run.text(), re.MULTILINE)
    assert left_over(str(tmp_path)) == []


@pytest.mark.slow  # tests/e2e/test_learner_restart.py is the cheaper witness
def test_the_two_node_preset_goes_on_after_the_death_of_a_learner_rank(tmp_path, untrained, switch):
    """Its node names, ports and keys; two CPU devices a node and a tiny model."""
    settings = [
        *untrained.settings,
        f"run.dir={tmp_path}",
        f"network.keys={tmp_path}/keys",
        "placement.device=cpu",
        "placement.learner='node0:0-1'",
        "placement.rollout='node1:0-1'",
        "data.max_prompt_tokens=16",
        "rollout.engine=torch",
        "rollout.dtype=float32",
        "rollout.group_size=8",
        "rollout.groups_per_step=8",
        "rollout.max_new_tokens=10",
        "rollout.max_running=32",
        "learner.compute_dtype=float32",
        "learner.total_steps=10000",
        "weight_bus.backend=gloo",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=5",
        "tracking.live=plain",
        "tracking.plot=false",
    ]
    arguments = ["--config", "qwen3-8b-2nodes", *(word for value in settings for word in ("--set", value))]
    make_keys(tmp_path)
    variables, learner_script, rollout_script = start_scripts(tmp_path, switch, arguments)
    said, rollouts_said = tmp_path / "learner.out", tmp_path / "rollouts.out"
    with (
        terminal(rollouts_said, *rollout_script, environment=variables, patience_s=40),
        terminal(said, *learner_script, environment=variables, patience_s=40) as learner,
    ):
        run = Run(learner, tmp_path / "qwen3-8b-2nodes", said)
        run.wait_for_step(7, 150)
        (rank,) = (
            pid for pid in run.pids("learner.train") if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        os.kill(rank, signal.SIGKILL)
        before = run.steps()[-1]["training/global_step"]
        run.wait_for_step(before + 3, 60)
        assert "incarnation 2 starts at version" in run.log("replay")
    assert left_over(str(tmp_path)) == []
