"""Over ssh: which node's failure is named, that nothing outlives the start script, what a node does with its spec."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

import configs
from configs import ConfigError
from configs.loading import dump
from configs.machine import count_gpus, torch_has_cuda, visible_devices
from replay.channel import ChannelError, KeysError
from replay.status_client import StatusReply
from slipstream.launch import children, fleet, here, node
from slipstream.launch.host_file import Host
from slipstream.launch.key_files import write_keys
from slipstream.launch.learner import node as learner_node
from slipstream.launch.learner.generations import Start, write_start
from slipstream.launch.node_spec import NodeSpec, read_spec, renumbered, resolve
from slipstream.launch.reach.commands import Commands
from slipstream.launch.servers import EndedForGood, NoneCanStart, RunFailed
from slipstream.plan.processes import Machine
from slipstream.runtime import ending
from tests.support.runs import ROOT, environment, left_over, processes
from tests.support.waiting import until

NODES = ["placement.learner='node0:0'", "placement.rollout='node1:0; node2:0'", "network.insecure=true"]
HOSTS = "node0 10.0.0.1 ssh=a\nnode1 10.0.0.2 ssh=b\nnode2 10.0.0.3 ssh=c\n"


@pytest.fixture
def start(tmp_path):
    """Start a start script with a shell function in place of ssh: it gets TARGET and COMMAND as $1 and $2."""
    (tmp_path / "hosts").write_text(HOSTS)
    started = []

    def popen(script, ssh, *settings, **options):
        fake = tmp_path / "ssh"
        fake.write_text(f"#!/usr/bin/env bash\n{ssh}\n")
        fake.chmod(0o755)
        words = ["bash", f"scripts/{script}.sh", "--hosts", str(tmp_path / "hosts")]
        words += [word for each in [*NODES, f"run.dir={tmp_path}/runs", *settings] for word in ("--set", each)]
        variables = {**environment(), "PYTHONPATH": str(ROOT), "SLIPSTREAM_SSH": str(fake)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(words, cwd=ROOT, env=variables, text=True, **pipes, **options))
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("ssh", "settings", "reason"),
    [
        ("echo 'no route to host' >&2; exit 255", [], "ssh to a failed or lost its connection: no route to host"),
        ('exec bash -c "$2"', ["placement.device=cuda"], "exit code 2: slipstream: refused: placement.device: 'cuda'"),
        ('exec bash -c "$2" </dev/null', [], "exit code 2: slipstream: refused: stdin ended before the order"),
    ],
)
def test_a_node_that_fails_is_named_with_its_reason(start, ssh, settings, reason):
    process = start("start_learner", ssh, *settings)
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 1
    assert f"[node0] {reason.partition(': ')[2]}" in said
    assert f"node0 (10.0.0.1) failed: {reason}" in said


def test_an_address_that_is_a_loopback_one_on_its_node_is_refused_there(start, tmp_path):
    """127.0.1 stands for a name that the node's /etc/hosts has in its loopback line, as Debian writes it."""
    (tmp_path / "hosts").write_text(HOSTS.replace("10.0.0.1", "127.0.1"))
    began = time.monotonic()
    process = start("start_learner", 'exec bash -c "$2"', "placement.device=cpu")
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 1 and time.monotonic() - began < 30
    line = said.splitlines()[-1]
    assert line.startswith(
        "slipstream: node0 (127.0.1) failed: exit code 2: slipstream: refused: host file: '127.0.1'"
    ), said
    assert "is 127.0.0.1 on that machine, where no other node reaches it; write the machine's address" in line
    assert line.endswith("[SLIP-CONFIG-12]")


def test_an_address_is_looked_at_only_where_other_nodes_need_it(monkeypatch):
    several, one = ([*NODES, "network.host=127.0.1"], ["network.host=127.0.1", "network.insecure=true"])
    with pytest.raises(ConfigError, match=r"'127.0.1', the address of node1, is 127.0.0.1 on that machine"):
        node.check_address(configs.load("quickstart", several), "node1")
    node.check_address(configs.load("quickstart", one), "node0")

    def late(*_, **__):
        raise socket.gaierror("no name server yet")

    monkeypatch.setattr(node.socket, "getaddrinfo", late)
    node.check_address(configs.load("quickstart", several), "node1")


def test_one_rollout_node_that_fails_is_named_and_the_others_go_on_until_they_are_ended(start, tmp_path):
    order = tmp_path / "order"
    stays = f"head -n 1 >{order}; cat; touch {tmp_path}/bye"
    process = start("start_rollout_nodes", f'[[ "$1" == b ]] && {{ echo broken; exit 3; }}; {stays}')
    while "node1 (10.0.0.2) failed" not in (line := process.stdout.readline()):
        assert line, "the output has ended"
    assert "exit code 3: broken; the run goes on with the servers of other nodes" in line
    until(lambda: order.exists() and order.read_text().endswith("\n"), "the order of node2")
    assert read_spec(order.read_text()).node == "node2"
    assert process.poll() is None and not (tmp_path / "bye").exists()
    process.send_signal(signal.SIGINT)
    assert "SIGINT received: ending node1, node2" in process.communicate(timeout=150)[0]
    assert process.returncode == 130 and (tmp_path / "bye").exists(), "its stdin has ended"


def test_kill_9_of_the_start_script_ends_what_it_started(start, tmp_path):
    process = start("start_rollout_nodes", 'exec bash -c "$2"', "placement.device=cpu", "rollout.wait_for_servers_s=60")
    needle = f"{tmp_path}/runs/"
    servers = re.compile(f"rollout_server.main.*{needle}")
    until(lambda: sum(bool(servers.search(command)) for _, command in processes()) == 2, "two rollout servers")
    process.kill()
    process.wait()
    assert left_over(needle) == []


# ---- a node and its spec --------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path):
    settings = [*NODES, "placement.device=cpu", f"run.dir={tmp_path}", "network.replay_port=5757"]
    config = dump(configs.load("quickstart", settings))
    return NodeSpec(role="rollout", node="node1", config=config, hosts=HOSTS)


def test_an_order_survives_its_line_and_what_is_none_is_refused(spec):
    with_keys = spec.model_copy(update={"keys": {"server.key": "x\ny"}})
    assert read_spec(with_keys.line()) == with_keys
    wrong = [{"role": "king"}, {"node": 7}, {"keys": {"a": 1}}]
    for line in ["", "[1]\n", '{"role": "learner"}\n', *(json.dumps(spec.model_dump() | each) for each in wrong)]:
        with pytest.raises(ConfigError, match="not valid"):
            read_spec(line)


def test_a_node_makes_its_part_of_the_plan_with_its_own_address(spec):
    assignment = resolve(spec)
    assert assignment.config.network.host == "10.0.0.2" and not assignment.is_first
    assert assignment.plan.replay == "tcp://10.0.0.1:5757"
    (process,) = assignment.plan.processes
    assert process.name == "rollout-node1-0" and "network.host=10.0.0.2" in process.command
    written = configs.load(process.command[process.command.index("--config") + 1])
    assert dump(written) == spec.config


def test_key_files_are_for_their_owner_alone_and_stay_in_their_folder(tmp_path):
    folder = tmp_path / "keys"
    write_keys(str(folder), {"server.key": "a", "clients/n.key_secret": "b"})
    write_keys(str(folder), {"server.key": "a", "clients/n.key_secret": "c"})
    assert (folder / "clients" / "n.key_secret").read_text() == "c"
    modes = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    assert modes == {"keys": 0o700, "clients": 0o700, "server.key": 0o600, "n.key_secret": 0o600}
    for name in ("../evil", "/evil", "clients/../../evil"):
        with pytest.raises(KeysError, match="no place"):
            write_keys(str(folder), {name: "x"})
    serving = {"server.key": "a", "server.key_secret": "b", "clients/learner.key_secret": "c", "clients/n.key": "d"}
    write_keys(str(folder), {**serving, "clients/gone.key": "e"})
    write_keys(str(folder), serving)
    assert not (folder / "clients" / "gone.key").exists(), "a client that was removed is not admitted any more"
    write_keys(str(folder), {"server.key": "a", "clients/n.key": "d", "clients/n.key_secret": "f"})
    assert (folder / "clients" / "learner.key_secret").exists(), "keys are handed out from here"


def test_a_container_counts_its_own_gpus_from_zero():
    settings = ["placement.learner='n:6-7'", "placement.rollout='n:0-5'", "network.replay_port=5757"]
    config = configs.load("quickstart", [*settings, "placement.device=cuda"])

    def visible(role, **machine):
        return renumbered(
            config, NodeSpec(role=role, node="n", config="", hosts=""), Machine("10.0.0.1", **machine)
        ).visible

    assert visible("learner", gpus=2)[6:] == ("0", "1")
    assert visible("rollout", gpus=6, visible=tuple("abcdef"))[:6] == tuple("abcdef")
    with pytest.raises(ConfigError, match="n gives 6 GPUs to the rollout, this container has 2"):
        visible("rollout", gpus=2)


# ---- a job that is started again ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "resumes"),
    [
        ("", False),
        ("config.yaml", False),
        ("config.yaml checkpoints/step_4/state.json", False),
        ("journal/0.seg", False),
        ("config.yaml journal/0.seg", True),
        ("config.yaml checkpoints/step_4/COMPLETE", True),
    ],
)
def test_a_start_of_a_job_resumes_the_run_folder_that_has_something_to_resume(tmp_path, files, resumes):
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    said = []
    assert node.decide(tmp_path, said.append) is resumes
    assert len(said) == 1 and str(tmp_path) in said[0] and ("resumes it" in said[0]) is resumes
    assert (tmp_path / "config.yaml").exists() is resumes, "a run that begins takes its own name"


@pytest.mark.parametrize("resumes", [False, True])
def test_all_learner_nodes_do_as_the_first_one_has_decided_with_the_configuration_of_their_job(
    tmp_path, monkeypatch, resumes
):
    """The run folder of a job that is started again has another one, of an earlier start."""
    settings = ["placement.learner='node0:0; node1:0'", "placement.rollout='node2:0'", "placement.device=cpu"]
    settings += [f"run.dir={tmp_path}", "run.name=job-42", "network.replay_port=5757", "network.insecure=true"]
    config, before = (dump(configs.load("quickstart", [*settings, f"learner.lr={lr}"])) for lr in (2e-3, 1e-3))
    commands = []

    def start_child(_self, name, command, log, _environment):
        commands.append(command)
        write_start(tmp_path / "job-42", Start(1, "--resume" in command))  # as the launcher
        return children.start(name, ["true"], log, {})

    def start_ranks(generation, command, _places, _logs):
        commands.append(command)
        ending.write(tmp_path / "job-42", 0, "finished")
        return learner_node.RankGroup(generation)

    monkeypatch.setattr(node.Node, "_wait_for_run_name", lambda _: "job-42")
    monkeypatch.setattr(node.Node, "_child", start_child)
    monkeypatch.setattr(learner_node, "ask_replay", lambda *_: True)
    monkeypatch.setattr(learner_node.RankGroup, "start", start_ranks)
    (tmp_path / "job-42" / "journal").mkdir(parents=True)
    (tmp_path / "job-42" / "config.yaml").write_text(before)
    if resumes:
        (tmp_path / "job-42" / "journal" / "0.seg").touch()
    for name in ("node0", "node1"):
        spec = NodeSpec(role="learner", node=name, config=config, hosts=HOSTS, resume_if_begun=True)
        node.Node(resolve(spec), lifeline=False).run_learner()
        (tmp_path / "job-42" / "config.yaml").write_text(before)
        command = commands.pop()
        assert ("--resume" in command) is resumes
        assert configs.load(command[command.index("--config") + 1]).learner.lr == 2e-3


def test_a_node_that_replay_never_answers_leaves_a_hang_report(tmp_path, monkeypatch):
    settings = ["placement.learner='node0:0; node1:0'", "placement.rollout='node2:0'", "placement.device=cpu"]
    settings += [f"run.dir={tmp_path}", "run.name=job", "network.replay_port=5757", "network.insecure=true"]
    config = dump(configs.load("quickstart", [*settings, "placement.give_up_after_s=0.2"]))
    spec = NodeSpec(role="learner", node="node1", config=config, hosts=HOSTS)
    monkeypatch.setattr(node, "ask_replay", lambda *_: None)
    with pytest.raises(ChannelError, match=r"node1 waited 0.2 s for replay at tcp://10.0.0.1:5757 .*; hang report: "):
        node.Node(resolve(spec), lifeline=False).run_learner()
    (path,) = (tmp_path / "job").glob("hang-*.txt")
    said = "node-node1 waited 0.2 s for replay at tcp://10.0.0.1:5757 from replay (placement.give_up_after_s)"
    assert path.read_text().splitlines()[1] == said and "STACKS OF node-node1" in path.read_text()


def test_a_node_replaces_a_server_that_replay_hears_no_more(tmp_path, capsys, monkeypatch):
    settings = ["placement.learner='node0:0'", "placement.rollout='node1:0'", "placement.device=cpu"]
    settings += [f"run.dir={tmp_path}", "network.insecure=true", "network.replay_port=5757"]
    settings += ["network.silent_after_s=0.1", "network.heartbeat_s=0.1", "rollout.restart_backoff_s=0"]
    spec = NodeSpec(role="rollout", node="node1", config=dump(configs.load("quickstart", settings)), hosts=HOSTS)
    started = []

    def start_child(_self, name, _command, log, _environment):
        started.append(children.start(name, ["true"] if started else ["sleep", "600"], log, {}))
        return started[-1]

    def silent(*_):
        if not asked.pop():
            raise ChannelError("its keys are refused", "closed")
        server = {"name": "rollout-node1-0", "pid": started[0].pid, "host": socket.gethostname()}
        return StatusReply("job", {"silent": [server]})

    asked = [*[True] * 99, False]
    monkeypatch.setattr(node.Node, "_child", start_child)
    monkeypatch.setattr(node, "ask_replay", silent)
    assert node.Node(resolve(spec), lifeline=False).run_servers() == 0
    assert [child.exit_code() for child in started] == [-signal.SIGKILL, 0]
    assert "[silent]" in (said := capsys.readouterr().out) and "restart 1 of 3" in said


@pytest.mark.parametrize(("silent", "code", "said"), [(True, 75, "waited 0.2 s"), (False, 2, "launcher (pid")])
def test_a_scheduler_learns_what_another_start_would_refuse_again(tmp_path, capsys, monkeypatch, silent, code, said):
    """Kubernetes ends the JobSet at exit code 2: replay may be a pod that waits for its machine, data never comes."""
    settings = ["placement.learner='node0:0; node1:0'", "placement.rollout='node2:0'", "placement.device=cpu"]
    settings += [f"run.dir={tmp_path}", "run.name=job", "network.replay_port=5757", "network.insecure=true"]
    settings += ["model.path=missing", "placement.give_up_after_s=0.2"]
    (tmp_path / "config.yaml").write_text(dump(configs.load("quickstart", settings)))
    (tmp_path / "hosts").write_text(HOSTS)
    words = ["--role", "learner", "--node", "node1" if silent else "node0", "--hosts", str(tmp_path / "hosts")]
    monkeypatch.setattr(node, "ask_replay", lambda *_: None)
    monkeypatch.setattr(node, "catch_signals", lambda: None)
    monkeypatch.setattr(node, "ignore_signals", lambda: None)
    monkeypatch.setattr("sys.argv", ["node", *words, "--config", str(tmp_path / "config.yaml")])
    assert node.main() == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert said in last and "refused" not in last


@pytest.mark.parametrize(("failure", "code"), [(NoneCanStart, 2), (EndedForGood, 3), (RunFailed, 1)])
def test_a_rollout_node_tells_servers_that_cannot_start_from_those_that_were_ended(spec, monkeypatch, failure, code):
    def run_servers(_):
        raise failure("given up")

    monkeypatch.setattr(node, "catch_signals", lambda: None)
    monkeypatch.setattr(node, "first_line", spec.line)
    monkeypatch.setattr(node.Node, "run_servers", run_servers)
    monkeypatch.setattr("sys.argv", ["node", "--stdin"])
    assert node.main() == code


class Way(Commands):
    """Runs the command of each node, again at each start, in place of the node's process."""

    def __init__(self, **commands):
        self.commands, self.starts = commands, []

    def command(self, host, words):
        self.starts.append(host.name)
        return ["bash", "-c", self.commands[host.name]]


def run_fleet(tmp_path, *settings, rollouts=(), **commands):
    """Exit code of a fleet over these commands, and its way; those of `rollouts` are no learner nodes."""
    way, config = Way(**commands), configs.load("quickstart", [f"run.dir={tmp_path}", "run.name=job", *settings])
    made = fleet.Fleet(way, config)
    try:
        for name in commands:
            spec = NodeSpec(role="rollout" if name in rollouts else "learner", node=name, config="", hosts="")
            made.add(spec, Host(name, "10.0.0.1", name, None))
        return made.watch(), way
    finally:
        made.stop()


def test_the_first_learner_node_has_its_time_to_report_after_the_others_have_ended_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fleet, "FAREWELL_S", 0.3)
    assert run_fleet(tmp_path, node0="sleep 1.5", node1="true")[0] == 0
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize("ended", ["true", "false"])
def test_nodes_that_do_not_end_leave_a_hang_report(tmp_path, monkeypatch, capsys, ended):
    monkeypatch.setattr(fleet, "FAREWELL_S", 0.3)
    commands = [("node0", ended), ("node1", "cat")]
    assert run_fleet(tmp_path, **dict(commands if ended == "true" else commands[::-1]))[0] == 1
    (path,) = (tmp_path / "job").glob("hang-*.txt")
    said = "launch waited 0.3 s for the end of the nodes from node1 (a fixed deadline)"
    assert path.read_text().splitlines()[1] == said
    assert f"node1 still run 0.3 s after another node has ended; hang report: {path} [slow]" in capsys.readouterr().err


UP = r"printf '\036up\n'"


def once(folder: Path, name: str, *, first: str, then: str) -> str:
    """For bash: `first` at the first start of a node, `then` at each later one."""
    return f"if mkdir {folder}/{name} 2>/dev/null; then {first}; else {then}; fi"


@pytest.mark.parametrize(
    ("first", "is_learner", "code", "said"),
    [
        (f"{UP}; kill -9 $$", True, 0, "failed: killed by SIGKILL [closed]; restart 1 of 3"),
        (f"{UP}; kill -9 $$", False, 0, "failed: killed by SIGKILL [closed]; restart 1 of 3"),
        (f"{UP}; echo Node failure", False, 0, "failed: the way to it has ended: Node failure"),  # as srun ends
        (f"{UP}; echo taken; exit 75", True, 0, "failed: exit code 75: taken; it is started again every"),
        ("echo no route; exit 255", False, 0, "failed: exit code 255: no route; it is started again every"),
        ("echo no route; exit 255", True, 1, "failed: exit code 255: no route"),
        (f"{UP}; echo lr is 0; exit 3", True, 1, "failed: exit code 3: lr is 0"),
        (f"{UP}; echo the learner ended; exit 3", False, 0, ""),
        (f"{UP}; echo refused; exit 2", False, 0, "exit code 2: refused; the run goes on with the servers of other"),
    ],
)
def test_a_node_that_is_lost_is_started_again_and_one_that_ended_by_intent_is_not(
    tmp_path, monkeypatch, capsys, first, is_learner, code, said
):
    monkeypatch.setattr(fleet, "RETRY_S", 0.1)
    back = tmp_path / "back"
    node1 = once(tmp_path, "began", first=first, then=f"{UP}; touch {back}; exec cat")
    is_final = code != 0 or "goes on" in said
    seen = tmp_path / "began" if is_final else back
    ends = f"for each in {{1..600}}; do [[ -e {seen} ]] && break; sleep 0.05; done; sleep {int(is_final)}"
    commands = {"node0": f"{UP}; exec timeout 5 cat" if code else ends, "node1": node1}
    monkeypatch.setattr(fleet, "FAREWELL_S", 0.2)
    ended, way = run_fleet(tmp_path, rollouts=() if is_learner else ("node1",), **commands)
    assert way.starts == ["node0", "node1"] if is_final else way.starts == ["node0", "node1", "node1"]
    assert said in (told := capsys.readouterr().err), told
    assert ended == (1 if is_learner else 0), "a second learner node that still runs at the end did not end well"


def test_a_learner_node_that_does_not_come_back_ends_the_run_and_a_rollout_node_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fleet, "RETRY_S", 0.1)
    monkeypatch.setattr(fleet, "FAREWELL_S", 0.2)
    again = "echo no route; exit 255"
    lost = {
        "a": once(
            tmp_path, "a", first=f"{UP}; until [[ -e {tmp_path}/lost ]]; do sleep 0.05; done; exit 255", then=again
        ),
        "b": once(tmp_path, "b", first=f"{UP}; exit 255", then=f"touch {tmp_path}/lost; {again}"),
    }
    both = {"node0": f"{UP}; exec timeout 5 cat", **lost}
    code, way = run_fleet(tmp_path, "placement.give_up_after_s=1.5", rollouts=("b",), **both)
    told = capsys.readouterr().err
    assert code == 75 and way.starts.count("a") > 2 and way.starts.count("node0") == 1
    assert "a (10.0.0.1) has been lost for 1.5 s (placement.give_up_after_s): exit code 255: no route; mend its" in told
    assert "b (10.0.0.1) has been lost for 1.5 s (placement.give_up_after_s): the run goes on without it" in told


# ---- this machine ---------------------------------------------------------------------------------------


def shown_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A machine whose nvidia-smi lists these GPUs, unless CUDA_VISIBLE_DEVICES reaches it."""
    lines = "".join(f"GPU {index}: {name}\\n  MIG 1g.10gb Device 0:\\n" for index, name in enumerate(names))
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n[ -z \"$CUDA_VISIBLE_DEVICES\" ] && printf '{lines}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ("placement.split=1:1 placement.device=cpu", 0, ["-m rollout_server.main", "tcp://10.0.0.1:5757"]),
        ("placement.split=1:1 placement.device=cuda", 2, ["placement.device", "shows no GPU"]),
        ("placement.rollout=a:0 placement.learner=b:0", 2, ["start with --hosts FILE"]),
    ],
)
def test_servers_of_this_host(tmp_path, monkeypatch, capsys, settings, code, words):
    shown_gpus(tmp_path, monkeypatch)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    options = ["--servers", "4", "--dry-run", "--config", "quickstart", "--replay", "tcp://10.0.0.1:5757"]
    options += [word for each in settings.split() for word in ("--set", each)]
    assert here.run_servers(options, "5757") == code
    said = "".join(capsys.readouterr())
    assert [word for word in words if word not in said] == [], said
    assert list((tmp_path / "work").iterdir()) == [], "a dry run writes nothing"


def test_a_host_that_joins_has_the_configuration_of_the_run_and_its_own_place(monkeypatch):
    settings = [*NODES[:2], "placement.tensor_parallel=1", "network.keys=theirs", "learner.lr=3e-5"]
    text = dump(configs.load("quickstart", [*settings, "network.host=10.0.0.1", "network.replay_port=5757"]))
    monkeypatch.setattr(here, "ask_replay", lambda *_: StatusReply("job", {"config": text}))
    config = here.joined("tcp://127.0.0.1:5757", 2, ["network.keys=mine"])
    assert (config.learner.lr, config.placement.split, config.placement.rollout) == (3e-5, "2:1", None)
    assert (config.network.host, config.network.keys) == ("127.0.0.1", "mine")
    monkeypatch.setattr(here, "ask_replay", lambda *_: None)
    with pytest.raises(ChannelError, match=r"replay at tcp://10.0.0.1:1 has not answered .*\[silent\]"):
        here.joined("tcp://10.0.0.1:1", 1, [])


def test_gpus_are_counted_whatever_is_visible(tmp_path, monkeypatch):
    shown_gpus(tmp_path, monkeypatch, "NVIDIA H200 (UUID: GPU-1)", "NVIDIA H200 (UUID: GPU-2)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (count_gpus(), visible_devices(os.environ), visible_devices({})) == (2, ("1",), None)
    assert torch_has_cuda() is (torch.version.cuda is not None)


def test_a_rollout_host_needs_the_gpus_of_its_servers_alone(tmp_path, monkeypatch):
    shown_gpus(tmp_path, monkeypatch, "a", "b", "c")
    monkeypatch.setattr("slipstream.launch.machine.torch_has_cuda", lambda: True)
    settings = ["placement.split=4:4", "placement.tensor_parallel=2", "placement.device=cuda", "rollout.engine=sglang"]
    config = configs.load("quickstart", settings)
    assert here.environment_of(config, 0)["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ConfigError, match="rollout server 1 needs GPU 3, this machine has 3"):
        here.environment_of(config, 1)
    with pytest.raises(ConfigError, match="has 2 rollout servers"):
        here.environment_of(config, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert here.environment_of(config, 0)["CUDA_VISIBLE_DEVICES"] == "5,7"
