"""Over ssh: who is named when a node fails, that nothing outlives the start script, what a node does with its spec."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import configs
from configs.loading import ConfigError, dump
from configs.machine import count_gpus, torch_has_cuda, visible_devices
from configs.plan import Machine
from learner.launch import children
from learner.launch.children import Tail
from learner.launch.hosts import node
from learner.launch.hosts.here import environment_of
from learner.launch.hosts.key_files import write_keys
from learner.launch.hosts.node_spec import NodeSpec, read_spec, renumbered, resolve
from learner.launch.servers import LocalServers, RunFailed
from replay.channel import KeysError
from replay.lifeline import CANNOT_START, RUN_FAILED

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "SLIPSTREAM_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TWO = ["placement.learner='node0:0'", "placement.rollout='node1:0; node2:0'", "network.insecure=true"]
HOSTS = "node0 10.0.0.1 ssh=a\nnode1 10.0.0.2 ssh=b\nnode2 10.0.0.3 ssh=c\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a start script with a shell function in place of ssh: it gets TARGET and COMMAND as $1 and $2."""
    (tmp_path / "hosts").write_text(HOSTS)

    def popen(script: str, ssh: str, *settings: str) -> "subprocess.Popen[str]":
        fake = tmp_path / "ssh"
        fake.write_text(f"#!/usr/bin/env bash\n{ssh}\n")
        fake.chmod(0o755)
        words = ["bash", f"scripts/{script}.sh", "--hosts", str(tmp_path / "hosts")]
        for setting in [*TWO, f"run.dir={tmp_path}/runs", *settings]:
            words += ["--set", setting]
        environment = {**ENVIRONMENT, "SLIPSTREAM_SSH": str(fake)}
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        started.append(process)
        return process

    started: list[subprocess.Popen[str]] = []
    yield popen
    for process in started:
        process.kill()
        process.wait()


def said_by(process: "subprocess.Popen[str]", timeout: float = 60) -> str:
    return process.communicate(timeout=timeout)[0]


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


# ---- the start script -----------------------------------------------------------------------------------


def test_a_node_that_cannot_be_reached_is_named(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("start_learner", "echo 'no route to host' >&2; exit 255")
    said = said_by(process)
    assert process.returncode == 1
    assert "[node0] no route to host" in said
    assert "node0 (10.0.0.1) failed: ssh to a failed or lost its connection: no route to host" in said


def test_a_node_that_refuses_is_named_with_its_reason(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("start_learner", 'exec bash -c "$2"', "placement.device=cuda")
    said = said_by(process)
    assert process.returncode == 1
    assert "node0 (10.0.0.1) failed: exit code 2: slipstream: refused: placement.device: 'cuda'" in said


def test_one_rollout_node_that_fails_is_named_and_the_others_go_on_until_they_are_ended(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    stays = f"head -n 1 >{tmp_path}/order; cat; touch {tmp_path}/bye"
    process = start("start_rollout_nodes", f'[[ "$1" == b ]] && {{ echo broken; exit 3; }}; {stays}')
    assert process.stdout is not None
    lines = []
    while not lines or "node1 (10.0.0.2) failed" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    assert "exit code 3: broken; the run goes on with the servers of other nodes" in lines[-1]
    written = tmp_path / "order"
    wait_for(lambda: written.exists() and written.read_text().endswith("\n"), "the order of node2")
    assert read_spec(written.read_text()).node == "node2"
    assert process.poll() is None and not (tmp_path / "bye").exists()
    process.send_signal(signal.SIGINT)
    assert "SIGINT received: ending node1, node2" in said_by(process)
    assert process.returncode == 130 and (tmp_path / "bye").exists(), "its stdin has ended"


def test_kill_9_of_the_start_script_ends_what_it_started(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    # the launcher would wait for servers; replay and ranks are real processes on this machine
    process = start("start_rollout_nodes", 'exec bash -c "$2"', "placement.device=cpu", "rollout.wait_for_servers_s=60")
    needle = f"{tmp_path}/runs/"
    wait_for(lambda: len(pids(needle, "rollout_server.main")) == 2, "two rollout servers")
    process.kill()
    process.wait()
    wait_for(lambda: pids(needle) == [], "the end of everything", 40)


def pids(*needles: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if all(needle in command for needle in needles):
                found.append(int(entry.name))
    return found


# ---- a node and its spec --------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> NodeSpec:
    config = configs.load(
        "quickstart", [*TWO, "placement.device=cpu", f"run.dir={tmp_path}", "network.replay_port=5757"]
    )
    return NodeSpec(role="rollout", node="node1", config=dump(config), hosts=HOSTS, overrides=["run.seed=0"])


def test_an_order_survives_its_line(spec: NodeSpec) -> None:
    with_keys = spec.model_copy(update={"keys": {"server.key": "x\ny"}})
    assert read_spec(with_keys.line()) == with_keys


@pytest.mark.parametrize("line", ["", "hello\n", "[1]\n", '{"role": "learner"}\n'])
def test_what_is_no_order_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        read_spec(line)


@pytest.mark.parametrize(("field", "value"), [("role", "king"), ("node", 7), ("keys", {"a": 1}), ("overrides", [1])])
def test_an_order_with_a_wrong_field_is_refused(spec: NodeSpec, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        read_spec(json.dumps(spec.model_dump() | {field: value}))


def test_a_node_makes_its_part_of_the_plan_with_its_own_address(spec: NodeSpec, tmp_path: Path) -> None:
    assignment = resolve(spec)
    assert assignment.config.network.host == "10.0.0.2" and not assignment.is_first
    assert assignment.plan.replay == "tcp://10.0.0.1:5757"
    (process,) = assignment.plan.processes
    assert process.name == "rollout-node1-0" and "network.host=10.0.0.2" in process.command
    written = configs.load(process.command[process.command.index("--config") + 1])
    assert written == configs.load(
        "quickstart", [*TWO, "placement.device=cpu", f"run.dir={tmp_path}", "network.replay_port=5757"]
    )


def test_a_node_that_hears_no_order_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "learner.launch.hosts.node", "--stdin"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, input="", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "refused: stdin ended before the order was whole" in done.stdout


def test_key_files_are_for_their_owner_alone_and_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_keys(str(folder), {"server.key": "a", "clients/n.key_secret": "b"})
    write_keys(str(folder), {"server.key": "a", "clients/n.key_secret": "c"})
    assert (folder / "clients" / "n.key_secret").read_text() == "c"
    modes = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    assert modes == {"keys": 0o700, "clients": 0o700, "server.key": 0o600, "n.key_secret": 0o600}
    for name in ("../evil", "/evil", "clients/../../evil"):
        with pytest.raises(KeysError, match="no place"):
            write_keys(str(folder), {name: "x"})


def test_a_container_counts_its_own_gpus_from_zero() -> None:
    settings = ["placement.learner='n:6-7'", "placement.rollout='n:0-5'", "network.replay_port=5757"]
    config = configs.load("quickstart", [*settings, "placement.device=cuda"])
    spec = NodeSpec(role="learner", node="n", config="", hosts="")
    machine = renumbered(config, spec, Machine("10.0.0.1", gpus=2))
    assert machine.visible is not None and machine.visible[6:] == ("0", "1")
    spec = spec.model_copy(update={"role": "rollout"})
    machine = renumbered(config, spec, Machine("10.0.0.1", gpus=6, visible=tuple("abcdef")))
    assert machine.visible is not None and machine.visible[:6] == tuple("abcdef")
    with pytest.raises(ConfigError, match="n gives 6 GPUs to the rollout, this container has 2"):
        renumbered(config, spec, Machine("10.0.0.1", gpus=2))


def test_logs_are_followed_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    followed = Tail(log)
    assert followed.new_lines() == []
    log.write_bytes(b"one\ntwo\nthr")
    assert followed.new_lines() == ["one", "two"]
    with log.open("ab") as file:
        file.write(b"ee\n")
    assert followed.new_lines() == ["three"]


# ---- a job that is started again ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "resumes"),
    [
        ([], False),
        (["config.yaml"], False),
        (["config.yaml", "checkpoints/step_4/state.json"], False),
        (["journal/0.seg"], False),
        (["config.yaml", "journal/0.seg"], True),
        (["config.yaml", "checkpoints/step_4/COMPLETE"], True),
    ],
)
def test_a_start_of_a_job_resumes_the_run_folder_that_has_something_to_resume(
    tmp_path: Path, files: list[str], resumes: bool
) -> None:
    said: list[str] = []
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert node.decide(tmp_path, said.append) is resumes
    assert len(said) == 1 and str(tmp_path) in said[0] and ("resumes it" in said[0]) is resumes
    assert (tmp_path / "config.yaml").exists() is resumes, "a run that begins takes its own name"


@pytest.mark.parametrize("resumes", [False, True])
def test_the_other_learner_nodes_do_as_the_first_one_has_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    settings = ["placement.learner='node0:0; node1:0'", "placement.rollout='node2:0'", "placement.device=cpu"]
    settings += [f"run.dir={tmp_path}", "run.name=job-42", "network.replay_port=5757", "network.insecure=true"]
    spec = NodeSpec(role="learner", node="node1", config=dump(configs.load("quickstart", settings)), hosts=HOSTS)
    commands: list[Sequence[str]] = []

    def start_child(name: str, command: Sequence[str], log: Path, _: Mapping[str, str]) -> children.Child:
        commands.append(command)
        return children.start(name, ["true"], log, {})

    monkeypatch.setattr(node.Node, "_wait_for_run_name", lambda _: "job-42")
    monkeypatch.setattr(node.Node, "_child", lambda _, *words: start_child(*words))
    node.write_start(tmp_path / "job-42", resumes=resumes)
    (tmp_path / "job-42" / "config.yaml").write_text("")
    node.Node(resolve(spec), lifeline=False, resume_if_begun=True).run_learner()
    assert ("--resume" in commands[0]) is resumes


# ---- what the machine has -------------------------------------------------------------------------------


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n  MIG 1g.10gb Device 0:\\nGPU 1: NVIDIA H200 (UUID: GPU-2)\\n"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n[ -z \"$CUDA_VISIBLE_DEVICES\" ] && printf '{shown}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_gpus() == 2
    assert visible_devices(os.environ) == ("1",) and visible_devices({}) is None


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    program = "from configs.machine import torch_has_cuda as f; import sys; print(f(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    import torch

    assert done.stdout.split() == [str(torch.version.cuda is not None), "False"]
    assert torch_has_cuda() == (torch.version.cuda is not None)


# ---- restarts -------------------------------------------------------------------------------------------


def servers_that_exit_with(code: int, tmp_path: Path, said: list[str], restarts: int = 2) -> LocalServers:
    config = configs.load("quickstart", [f"rollout.restarts={restarts}", "rollout.restart_backoff_s=0"]).rollout

    def begin(name: str) -> children.Child:
        return children.start(name, ["sh", "-c", f"exit {code}"], tmp_path / f"{name}.log", {})

    servers = LocalServers(config, begin, said.append)
    servers.add("a")
    return servers


def watch_to_the_end(servers: LocalServers) -> None:
    deadline = time.monotonic() + 20
    while not servers.all_over and time.monotonic() < deadline:
        servers.watch(run_is_over=True)
        time.sleep(0.01)
    assert servers.all_over


def test_a_server_that_dies_is_started_again_and_given_up_at_last(tmp_path: Path) -> None:
    said: list[str] = []
    servers = servers_that_exit_with(1, tmp_path, said)
    watch_to_the_end(servers)
    assert [("restart 1 of 2" in line, "restart 2 of 2" in line) for line in said[:2]] == [(True, False), (False, True)]
    assert len(said) == 3 and "no restart left" in said[2] and servers.failures == ["a"]


@pytest.mark.parametrize(("code", "lines", "failures"), [(0, 0, []), (RUN_FAILED, 1, ["a"])])
def test_a_server_that_heard_of_the_end_is_not_started_again(
    tmp_path: Path, code: int, lines: int, failures: list[str]
) -> None:
    said: list[str] = []
    servers = servers_that_exit_with(code, tmp_path, said)
    watch_to_the_end(servers)
    assert (len(said), servers.failures) == (lines, failures)


def test_servers_that_cannot_start_are_the_cause(tmp_path: Path) -> None:
    servers = servers_that_exit_with(CANNOT_START, tmp_path, [])
    with pytest.raises(RunFailed, match=r"a .* died: exit code 78"):
        watch_to_the_end(servers)


# ---- one host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["placement.split=1:1", "placement.device=cpu"], 0, ["python -m rollout_server.main"]),
        (["placement.split=1:1", "placement.device=cuda"], 78, ["placement.device", "shows no GPU"]),
        (["placement.rollout=a:0", "placement.learner=b:0"], 78, ["start with --hosts FILE"]),
    ],
)
def test_a_server_of_this_host_gets_the_place_of_its_number(
    tmp_path: Path, settings: list[str], code: int, words: list[str]
) -> None:
    if count_gpus():
        pytest.skip("this machine has GPUs; the refusals are those of one without")
    command = [sys.executable, "-m", "learner.launch", "rollout", "--servers", "4", "--dry-run"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert [word for word in words if word not in done.stdout + done.stderr] == []
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


def test_a_rollout_host_needs_the_gpus_of_its_servers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\nGPU 2: c\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("learner.launch.machine.torch_has_cuda", lambda: True)
    settings = ["placement.split=4:4", "placement.tensor_parallel=2", "placement.device=cuda"]
    config = configs.load("quickstart", settings)
    assert environment_of(config, 0)["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ConfigError, match="rollout server 1 needs GPU 3, this machine has 3"):
        environment_of(config, 1)
    with pytest.raises(ConfigError, match="has 2 rollout servers"):
        environment_of(config, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert environment_of(config, 0)["CUDA_VISIBLE_DEVICES"] == "5,7"
