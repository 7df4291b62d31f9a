"""Bad inputs that a user could give, each to the real command: exit code, no traceback, and words that help."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys

import pytest

from learner import main as launcher
from tests.support.runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def refused(tmp_path, untrained, monkeypatch, capsys):
    """Give the command something bad, in this process; returns what it said, which has the words that help."""

    def give(*arguments, settings=(), words=()):
        given = ["--dry-run", "--name", "bad"]
        for setting in [*untrained.settings, f"run.dir={tmp_path}", *settings]:
            given += ["--set", setting]
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["learner.main", *given, *arguments])
        capsys.readouterr()
        try:
            code = launcher.main()
        except SystemExit as end:
            code = end.code
        said = "".join(capsys.readouterr())
        message = said.strip().splitlines()[-1] if said.strip() else ""
        assert code == 2, (code, said)
        assert "Traceback" not in said, said
        assert message.startswith("slipstream: refused: "), said
        assert [word for word in words if word not in message] == [], message
        assert not (tmp_path / "bad").exists(), "a refused command leaves no run folder"

    return give


def test_a_process_that_refuses_ends_with_code_2_and_one_line():
    command = [sys.executable, "-m", "learner.main", "--dry-run", "--set", "replay.async_lags=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "did you mean 'replay.async_lag'?" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["--split", "two:two"], [], ["placement.split", "'two:two'", "'R:L', such as '6:2'"]),
        (["--async-lag", "4"], ["algorithm.loss=policy_gradient"], ["'policy_gradient'", "i_know_this_is_biased=true"]),
        ([], ["rollout.max_new_tokens=100"], ["max_new_tokens: 100", "116 tokens", "max_position_embeddings 64"]),
        (["--split", "1:2"], ["learner.mesh.expert=2"], ["learner.mesh.expert", "qwen3", "no experts; take 1"]),
        ([], ["model.path=no/such/model"], ["model.path", "'no/such/model'", "give a Hugging Face folder"]),
        ([], ["data.train=no/such/rows.jsonl"], ["no/such/rows.jsonl", "no such file", "data.train"]),
        (["--resume", "no/such/run"], [], ["--resume", "no/such/run/config.yaml", "name the folder of a run"]),
        (["--replay", "no/such/run"], [], ["--replay", "no/such/run/config.yaml", "name the folder of a run"]),
        ([], ["run.dir=/proc/runs"], ["run.dir", "/proc is not writable", "name a folder"]),
    ],
)
def test_a_bad_setting_is_refused(refused, arguments, settings, words):
    refused(*arguments, settings=settings, words=words)


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("file", "size", "words"),
    [
        (WEIGHTS, 0, ["model.path", "no *.safetensors file", "download the folder again"]),
        (WEIGHTS, 100_000, [f"{WEIGHTS} is broken", "download the file again"]),
        ("config.json", 1, ["config.json", "not readable as JSON", "copy the model"]),
        ("tokenizer.json", 0, ["tokenizer.json", "missing", "save the tokenizer"]),
    ],
)
def test_a_bad_model_folder_is_refused(refused, untrained, tmp_path, file, size, words):
    """A file of it is missing, or cut."""
    model = tmp_path / "model"
    shutil.copytree(untrained.folder / "model", model)
    os.truncate(model / file, size) if size else (model / file).unlink()
    refused(settings=[f"model.path={model}"], words=[str(model), *words])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "12', ["row 4", "not readable as JSON", "put one JSON object on each line"]),
        ('{"prompt": [{"role": "boss", "content": "x"}], "answer": ""}', ["row 4", "'boss'", "take one of system"]),
    ],
)
def test_a_bad_row_is_refused(refused, untrained, tmp_path, line, words):
    good = (untrained.folder / "train.jsonl").read_text().splitlines()[:3]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*good, line, good[0]]) + "\n")
    refused(settings=[f"data.train={file}"], words=[str(file), *words])


def test_a_taken_port_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [f"network.replay_port: {port} on 127.0.0.1", "choose another port, or 0"]
        refused(settings=[f"network.replay_port={port}"], words=words)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nopackage.module:reward", ["No module named 'nopackage'", "install it"]),
        ("{folder}/mine.py:reword", ["mine.py has no function 'reword'", "did you mean 'reward'?"]),
    ],
)
def test_a_reward_function_that_is_not_there_is_refused(refused, tmp_path, spec, words):
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return 1.0\n")
    refused(settings=[f"reward.function={spec.format(folder=tmp_path)}"], words=["reward.function", *words])


def test_a_reward_function_that_always_raises_stops_the_run_and_is_named(launch, tmp_path):
    """Before any step, and without restarts."""
    (tmp_path / "mine.py").write_text("def reward(sample):\n    raise KeyError('no such column')\n")
    run = launch(f"reward.function={tmp_path}/mine.py:reward")
    assert run.wait() == 1
    assert "restart" not in run.text() and "Traceback" not in run.text() and run.steps() == []
    said = run.text().splitlines()[-1]
    assert "run stopped" in said and f"'{tmp_path}/mine.py:reward' failed for" in said
    assert "reward.max_error_rate 0.2" in said and "KeyError: 'no such column'" in said and "mine.py:2" in said


@pytest.mark.parametrize(
    ("package", "setting", "key", "extra"),
    [
        ("wandb", "trackers=[wandb]", "trackers: wandb", "wandb"),
        ("comet_ml", "trackers=[tensorboard,comet_ml]", "trackers: comet_ml", "comet-ml"),
        ("prometheus_client", "prometheus=127.0.0.1", "prometheus: 127.0.0.1", "prometheus"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(refused, monkeypatch, package, setting, key, extra):
    """The package is hidden where it is installed, so that this says the same on every machine."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    expected = f"tracking.{key}, and {package} is not installed"
    refused(settings=[f"tracking.{setting}"], words=[expected, f"pip install 'slipstream-rl[{extra}]'"])
