"""Doctor: each planted fault is named within its time, cause and remedy in the first line; healthy machines pass."""

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from configs import load
from learner import main as launcher
from replay import keys as make_keys
from replay.channel import load_keys
from slipstream.check import checks, links, machine, memory
from slipstream.check.examination import of_places
from slipstream.check.finding import Finding, as_json, report, verdict
from slipstream.check.places import ProbeFailed, RunningProbe, ended
from slipstream.launch import doctor, here
from slipstream.launch.doctor import places_of
from tests.security import served_replay
from tests.support.namespaces import switched
from tests.support.runs import ROOT

pytestmark = [pytest.mark.e2e]
LIMIT_S = 30.0
SETTINGS = ("placement.device=cpu", "model.path=data/model", "data.train=data/train.jsonl", "evaluation.every_steps=0")


SIZES = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}


def model_in(folder: Path, words: str = "0 1 2 3 4 5 6 7 8 9") -> Path:
    """A model folder and prompts, as far as files and headers tell."""
    model = folder / "data" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **SIZES}))
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    vocabulary = {word: number for number, word in enumerate(["?", *words.split()])}
    Tokenizer(WordLevel(vocabulary, unk_token="?")).save(str(model / "tokenizer.json"))
    (folder / "data" / "train.jsonl").write_text('{"prompt": "3 1 2", "answer": "1 2 3"}\n')
    return folder


@pytest.fixture
def examine(tmp_path, monkeypatch, capsys):
    """Run doctor in this process, in a folder with a model; its exit code and lines."""
    monkeypatch.chdir(model_in(tmp_path / "here"))

    def run(*arguments: str, settings: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        words = ["--config", "quickstart"]
        for setting in [*SETTINGS, f"run.dir={tmp_path}/runs", *settings]:
            words += ["--set", setting]
        started = time.monotonic()
        code = doctor.main([*words, *arguments])
        assert time.monotonic() - started < LIMIT_S
        return code, capsys.readouterr().out.splitlines()

    return run


def interpreter(folder: Path, script: str) -> str:
    """A Python for rollout servers whose shell differs from the learner's by `script`."""
    file = folder / "python"
    file.write_text(f'#!/usr/bin/env bash\n{script}\nexec "{sys.executable}" "$@"\n')
    file.chmod(0o755)
    return str(file)


def first(lines: list[str], *words: str) -> None:
    """The first line names cause and remedy."""
    assert [word for word in words if word not in lines[0]] == [], lines[0]


# ---- one side differs -----------------------------------------------------------------------------------


def test_what_one_side_has_otherwise_is_named_with_both_values(examine, tmp_path):
    """Another CUMEM, another tokenizer and a clock that is ahead, at the rollout servers alone."""
    other = model_in(tmp_path / "other", words="nine 8 7 6 5 4 3 2 1 0")
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 90\n")
    script = f"export NCCL_CUMEM_ENABLE=1 PYTHONPATH={tmp_path}:{ROOT}; cd {other}"
    code, lines = examine("--backends", "none", "--rollout-python", interpreter(tmp_path, script))
    assert code == 1
    first(lines, "stop", "tokenizer differs", "learner of node0", "rollout of node0", "copy one model folder")
    (line,) = [line for line in lines if "NCCL_CUMEM_ENABLE is not set at learner of node0, 1 at rollout" in line]
    assert "--set 'network.env={NCCL_CUMEM_ENABLE: \"0\"}'" in line
    (line,) = [line for line in lines if "clock" in line]
    assert line.startswith("warn") and "s ahead of" in line and "set it by NTP" in line


def test_an_interpreter_without_slipstream_is_named(tmp_path):
    python = interpreter(tmp_path, "export PYTHONPATH=; cd /; set -- -I -S -c 'import learner'")
    config = load("quickstart", SETTINGS)
    (finding,), _ = of_places(config, places_of(config, None, python)[1:], [])
    assert finding.severity == "stop" and "rollout of node0" in finding.line
    assert "No module named 'learner'" in finding.line and "--rollout-python" in finding.mend


def test_a_shell_for_rollout_servers_with_another_cumem_is_named(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    over_nccl = ["weight_bus.backend=nccl", "placement.device=cuda"]
    (finding,) = checks.shell(load("quickstart", over_nccl), "stop")
    assert "NCCL_CUMEM_ENABLE is 1 in this shell and 0 in the run; unset NCCL_CUMEM_ENABLE here" in finding.line
    assert list(checks.shell(load("quickstart", [*over_nccl, "network.env={NCCL_CUMEM_ENABLE: '1'}"]))) == []
    here.run_servers(["--dry-run", *(word for setting in over_nccl for word in ("--set", setting))], "1")
    assert "environment: NCCL_CUMEM_ENABLE is 1 in this shell" in capsys.readouterr().err


def test_a_place_that_does_not_answer_is_named_and_its_probe_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.check.examination.START_S", 2.0)
    python = interpreter(tmp_path, f"echo $$ >{tmp_path}/pid; echo a line of no account; exec sleep 60")
    config = load("quickstart", SETTINGS)
    (finding,), _ = of_places(config, places_of(config, None, python)[1:], [])
    assert finding.severity == "stop" and "rollout of node0: no answer within 2 s [silent]" in finding.line
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


class Answers:
    """A probe whose answers are written down, for faults of hardware."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.place, self.answers = "rollout of node1", list(answers)
        self.orders: list[str] = []

    def ask(self, what: str, *_words: object, **_order: object) -> str:
        self.orders.append(what)
        return "10.0.0.1:4000"

    def send(self, what: str, **_order: object) -> None:
        self.orders.append(what)

    def answer(self, _limit_s: float) -> dict[str, Any]:
        answer = self.answers.pop()
        if "problem" in answer:
            raise ProbeFailed(answer["problem"])
        return answer


@pytest.mark.parametrize(
    ("backend", "answer", "severity", "words"),
    [
        ("gloo", {"form_s": 0.1, "intact": True}, "ok", "formed in 0.10 s"),
        (
            "gloo",
            {"form_s": 0.1, "intact": False},
            "stop",
            "bytes that arrived are others; look for faults",
        ),
        ("gloo", {"problem": "rank 1 did not come in 5.0 s [silent]"}, "stop", "rollout of node1: rank 1 did not come"),
        ("ucc", {"problem": "rank 1 did not come in 5.0 s [silent]"}, "warn", "UCX_NET_DEVICES in network.env"),
    ],
)
def test_a_group_that_does_not_form_or_brings_other_bytes(backend, answer, severity, words):
    config = load("quickstart", [*SETTINGS, "weight_bus.backend=gloo"])
    other = Answers(answer)
    finding = links.group(config, backend, Answers(answer), other)  # type: ignore[arg-type]
    assert finding.severity == severity and words in finding.line
    assert other.orders == ["prepare", "group"]  # imports torch before the first one waits for it


def test_nccl_between_two_processes_of_one_gpu_needs_no_switches():
    problem = {"problem": "epoch 1 with 2 members did not form: NCCL error, invalid usage [silent]"}
    shares = [*SETTINGS, "placement.device=cuda", "placement.split=1:1", "placement.share_gpus=true"]
    shares += ["rollout.engine=sglang"]
    finding = links.group(load("quickstart", shares), "nccl", Answers(problem), Answers(problem))  # type: ignore[arg-type]
    assert finding.severity == "warn" and finding.mend == links.SHARED_GPU
    apart = load("quickstart", [*SETTINGS, "placement.device=cuda"])
    finding = links.group(apart, "nccl", Answers(problem), Answers(problem))  # type: ignore[arg-type]
    assert "NCCL_DEBUG" in finding.mend


# ---- this machine ---------------------------------------------------------------------------------------


def test_a_taken_port_is_named_with_the_process_that_has_it(examine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, lines = examine("--brief", settings=(f"network.replay_port={port}",))
        assert code == 1
        first(lines, "stop", f"port: network.replay_port: {port} on 127.0.0.1", f"by pid {os.getpid()} (", "or 0 for a")
        (place, _) = places_of(load("quickstart", ["placement.device=cpu", f"weight_bus.port={port}"]), None, "python")
        problems = {"weight_bus.port": machine.problem_with_port("127.0.0.1", port)}
        (finding,) = machine.ports(place.ports, problems, "")
    assert finding.severity == "stop" and f"weight_bus.port: {port}" in finding.line and "--set weight" in finding.line


@pytest.fixture
def small_files():
    """A file of this process may have a mebibyte: the disk takes no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_stops_a_start(examine, small_files):
    code, lines = examine("--brief")
    assert code == 1
    assert any("ulimit -f unlimited" in line and line.startswith("stop  disk") for line in lines)


def test_a_full_disk_is_named_with_what_a_run_needs(examine, monkeypatch, tmp_path, capsys):
    real = os.statvfs
    monkeypatch.setattr(machine.os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 0, 0, *real(path)[5:]]))
    code, lines = examine("--brief")
    assert code == 1
    first(lines, "stop", "0.0 GiB free", "one checkpoint and the journal take 0.1 GiB", "run.dir")
    words = [word for setting in (*SETTINGS, f"run.dir={tmp_path}/runs") for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["learner.main", "--dry-run", *words])
    assert launcher.main() == 2, "every start looks at it"
    said = capsys.readouterr().err
    assert "refused: 0.0 GiB free" in said and "[SLIP-CONFIG-10]" in said


def test_a_model_that_is_too_big_is_named_with_its_figures(examine, tmp_path):
    sizes = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    }
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps({**sizes, "num_key_value_heads": 8, "vocab_size": 128256}))
    settings = (f"model.path={tmp_path}/big", "placement.device=cuda", "placement.gpu_gib=80", "rollout.engine=sglang")
    code, lines = examine("--brief", settings=settings)
    assert code == 1
    first(
        [line for line in lines if "gpu-memory" in line], "stop", "placement.tensor_parallel: 1", "131.4 GiB", "take 2"
    )
    with pytest.raises(ValueError, match="GiB"):
        memory.memory_budget(load("quickstart", ["placement.device=cuda", "placement.gpu_gib=80", settings[0]]))


def test_a_learning_rate_of_zero_is_named(examine):
    code, lines = examine("--brief", settings=("learner.lr=0",))
    assert code == 1
    first(lines, "stop", "--set learner.lr=0", "greater than 0", "value 0")
    code, lines = examine("--brief", settings=("learner.warmup_steps=99",))
    assert code == 0
    first(lines, "warn", "learning-rate", "learner.warmup_steps 99", "--set learner.warmup_steps=8")


def test_kernels_that_do_not_load_are_named(tmp_path, monkeypatch):
    (tmp_path / "sgl_kernel.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (_, place) = places_of(load("quickstart", ["placement.device=cpu"]), None, sys.executable)
    probe = RunningProbe.at(place)
    with ended([probe]):
        probe.answer(LIMIT_S)
        order = {"modules": ["sgl_kernel", "json"], "ports": {}, "is_first": False}
        found = probe.ask("look", LIMIT_S, **order)["kernels"]  # no other module is imported by an order
    assert found == {"sgl_kernel": "ImportError: libcudart.so.12: cannot open shared object file"}
    finding, *rest = machine.kernels({**found, "triton": ""}, None, "rollout of node0")
    assert finding.severity == "stop" and "libcudart.so.12" in finding.line and "install.sh" in finding.line
    assert [each.what for each in rest] == ["triton finds no C compiler (cc, gcc, CC)"]
    on_gpus = load("quickstart", ["placement.device=cuda", "rollout.engine=sglang", "learner.compile=true"])
    assert machine.needed_kernels(on_gpus, "rollout") == ["sgl_kernel", "triton"]
    assert machine.needed_kernels(on_gpus, "learner") == ["triton"]


# ---- a run elsewhere ------------------------------------------------------------------------------------


def test_a_port_that_does_not_answer_is_named(examine):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as queue:
        address = server.getsockname()
        for _ in range(3):  # the queue of connections is full: the kernel drops what comes
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        code, lines = examine("--replay", f"tcp://127.0.0.1:{address[1]}")
    assert code == 1
    first(lines, "stop", "link", "answers a connection within 3 s [silent]", "open the port")
    code, lines = examine("--replay", f"tcp://127.0.0.1:{address[1]}")
    first(lines, "stop", "Connection refused [closed]", "replay ready at")


def test_a_wrong_curve_key_is_named_and_the_right_one_passes(examine, tmp_path):
    make_keys.make(tmp_path / "keys", ["node1"], force=False)
    make_keys.make(tmp_path / "others", ["node1"], force=False)
    for name in ("keys", "others"):
        make_keys.export(tmp_path / name, "node1", tmp_path / f"{name}-1")
    (tmp_path / "others-1" / "server.key").write_bytes((tmp_path / "keys-1" / "server.key").read_bytes())
    with served_replay.served(load_keys(tmp_path / "keys")) as replay:
        code, lines = examine("--replay", replay.address, settings=(f"network.keys={tmp_path}/others-1",))
        assert code == 1
        first(lines, "stop", "link", "refused the key of this node, 'node1'", "python -m replay.keys")
        code, lines = examine("--replay", replay.address, settings=(f"network.keys={tmp_path}/keys-1",))
        assert code == 0 and "link: replay answers at" in "\n".join(lines)


# ---- all is well ----------------------------------------------------------------------------------------


def test_the_part_of_every_start_takes_less_than_a_second_and_loads_no_torch(tmp_path):
    """Of its own and its children's processor time; it has no connection to wait for."""
    program = (
        "import os, socket, sys; from configs import load; from slipstream.check import checks;"
        "config = load('quickstart', sys.argv[1:]); socket.socket = None; before = sum(os.times()[:4]);"
        "some = [one for one in checks.OF_THIS_MACHINE if one is not checks.port];"
        "found = list(checks.found(config, some)); took = sum(os.times()[:4]) - before;"
        "assert took < 1, took; assert 'torch' not in sys.modules;"
        "assert {each.severity for each in found} == {'ok'}, found"
    )
    words = [*SETTINGS, f"run.dir={tmp_path}"]
    folder, variables = model_in(tmp_path), {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, *words], cwd=folder, env=variables, check=True, timeout=150)


def test_a_start_says_what_is_to_be_looked_at_and_refuses_with_every_error(tmp_path):
    said: list[str] = []
    config = load("quickstart", ["placement.device=cpu", f"run.dir={tmp_path}", "learner.warmup_steps=99"])
    checks.require(config, said.append, [checks.learning_rate])
    assert len(said) == 1 and said[0].startswith("learning-rate: learner.warmup_steps 99")
    broken = ["placement.device=cpu", "weight_bus.backend=nccl", "algorithm.loss=none.py:loss"]
    with pytest.raises(ValueError, match=r"no file 'none\.py'") as refused:
        checks.require(load("quickstart", broken), said.append, [checks.algorithm, checks.bus])
    assert "weight_bus.backend: 'nccl' needs GPUs" in str(refused.value)


@pytest.mark.slow
def test_a_healthy_machine_passes_whole_with_groups_of_real_processes(examine, tmp_path):
    """Over the way of ssh as well, with a shell in its place."""
    code, lines = examine()
    assert code == 0 and any(
        "gloo-group: between learner of node0 and rollout of node0: formed" in line for line in lines
    )
    fake = tmp_path / "ssh"
    fake.write_text('#!/usr/bin/env bash\nexec bash -c "$2"\n')
    fake.chmod(0o755)
    (tmp_path / "hosts").write_text("node0 127.0.0.1 ssh=a\n")
    os.environ["SLIPSTREAM_SSH"] = str(fake)
    try:
        code, lines = examine("--hosts", str(tmp_path / "hosts"), "--json")
    finally:
        del os.environ["SLIPSTREAM_SSH"]
    found = json.loads(lines[0])
    assert code == found["stops"] == 0 and set(found["facts"]) == {"learner of node0", "rollout of node0"}
    assert {"gloo-group", "link", "clock", "versions"} <= {each["code"] for each in found["findings"]}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
def test_a_cut_network_between_two_machines_is_named(examine, tmp_path):
    with switched({"end1": "10.213.7.1", "end2": "10.213.7.2"}) as switch:
        (tmp_path / "names").write_text(switch.names())
        fake = tmp_path / "ssh"
        fake.write_text(
            f"#!/usr/bin/env bash\ncase $1 in a) ns={switch.host('end1')};; b) ns={switch.host('end2')};; esac\n"
            f'mount="mount --bind {tmp_path}/names /etc/hosts"\n'
            'exec ip netns exec $ns bash -c "$mount && $2"\n'
        )
        fake.chmod(0o755)
        (tmp_path / "hosts").write_text("node0 10.213.7.1 ssh=a\nnode1 10.213.7.2 ssh=b\n")
        os.environ["SLIPSTREAM_SSH"] = str(fake)
        settings = ("placement.split=null", "placement.learner=node0:0", "placement.rollout=node1:0")
        settings += ("network.insecure=true",)
        try:
            code, lines = examine("--hosts", str(tmp_path / "hosts"), settings=settings)
            assert code == 0, lines
            assert any("gloo-group: between learner of node0 and rollout of node1: formed" in line for line in lines)
            switch.cut("end1")
            code, lines = examine("--hosts", str(tmp_path / "hosts"), settings=settings)
        finally:
            del os.environ["SLIPSTREAM_SSH"]
    assert code == 1
    first(lines, "stop", "link", "rollout of node1", "open the port in the firewall")


def test_findings_are_sorted_wrapped_and_counted():
    found = [Finding("ok", "clock", "fine"), Finding("stop", "port", "5757 is taken " + "x" * 60, "why " * 9, "take 0")]
    whole = [line for _, line in report(found, None)]
    assert whole[0].startswith("stop  port: 5757 is taken") and whole[0].endswith("; take 0") and len(whole) == 3
    narrow = [line for _, line in report(found, 40)]
    assert max(map(len, narrow)) <= 40 and narrow[1].startswith("      ")
    assert verdict(found) == "a run would stop: 1 errors, 0 warnings, 1 passed"
    assert json.loads(as_json(found, {}))["findings"][0]["mend"] == "take 0"


@pytest.mark.slow
def test_the_public_key_of_another_server_is_named_in_time(examine, tmp_path):
    """Nothing says so on the wire: only handshakes that are closed again and again."""
    for name in ("keys", "others"):
        make_keys.make(tmp_path / name, ["node1"], force=False)
    make_keys.export(tmp_path / "keys", "node1", tmp_path / "node1")
    (tmp_path / "node1" / "server.key").write_bytes((tmp_path / "others" / "server.key").read_bytes())
    with served_replay.served(load_keys(tmp_path / "keys")) as replay:
        code, lines = examine("--replay", replay.address, settings=(f"network.keys={tmp_path}/node1",))
    assert code == 1
    first(lines, "stop", "link", "its key is not", "node1/server.key: copy that file from the learner's node")
