"""Before any process starts: what is made, which folder a run has, what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_config

from configs import Config, ConfigError, load
from learner import main as launcher
from learner.examples import sort6
from learner.launch import preflight
from learner.launch.preflight import check_keys, check_run_dir, check_trackers, claim_run_dir, make_input
from replay import keys as make_keys
from replay.channel import KeysError


def config_in(folder: Path, **sections: dict[str, object]) -> Config:
    return make_config(folder, run={"dir": str(folder), "name": "same"}, **sections)


def test_a_dry_run_makes_nothing_and_says_what_a_run_would_make(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["learner.main", "--dry-run"])
    assert launcher.main() == 0
    shown = capsys.readouterr()
    assert "a run would first make the quick start's model and prompts in data/sort6" in shown.err
    assert "64 prompts × 8 = 512 trajectories a step" in shown.err and "-m replay.main" in shown.out
    assert list(tmp_path.iterdir()) == []


def test_the_quick_starts_input_is_made_where_it_is_missing(tmp_path, monkeypatch):
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, sort6.main(command[3:]), "", "")

    monkeypatch.setattr(sort6, "SFT_STEPS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(preflight.subprocess, "run", run)
    folder = tmp_path / "data" / "sort6"
    paths = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]
    config = load("quickstart", paths)
    assert make_input(config, "quickstart") and not make_input(config, "quickstart")
    assert [command[:3] for command in commands] == [[sys.executable, "-m", "learner.examples.sort6"]]
    assert (folder / "model" / "config.json").is_file() and (folder / "eval.jsonl").is_file()
    other = load("gsm8k-qwen2.5-1.5b-4gpu", [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl"])
    assert not make_input(other, "gsm8k-qwen2.5-1.5b-4gpu"), "other configurations are left alone"


# ---- the run folder -------------------------------------------------------------------------------------


def test_of_two_runs_that_checked_the_same_name_one_takes_the_next(tmp_path):
    config = config_in(tmp_path)
    other = config_in(tmp_path, learner={"lr": 1.0})
    claimed = [claim_run_dir(each, new=True) for each in (config, other, config)]
    assert [each.run.name for each in claimed] == ["same", "same-2", "same-3"]
    assert [load(tmp_path / each.run.name / "config.yaml") for each in claimed] == claimed


def test_a_resumed_run_keeps_its_folder(tmp_path):
    claim_run_dir(config_in(tmp_path), new=True)
    changed = config_in(tmp_path, learner={"total_steps": 20})
    assert claim_run_dir(changed, new=False) == changed == load(tmp_path / "same" / "config.yaml")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/proc/runs", "/proc is not writable"),  # by its permissions it has room for root
        ("/proc", "/proc is not writable"),
        ("{tmp}/file", "file is a file"),
        ("{tmp}/file/below", "file is a file"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path, place, why):
    (tmp_path / "file").touch()
    config = make_config(tmp_path, run={"dir": place.format(tmp=tmp_path), "name": "run"})
    with pytest.raises(ConfigError, match=rf"^run.dir: .*{why}.*name a folder"):
        check_run_dir(config)
    with pytest.raises(ConfigError, match=r"^run.dir: .*name a folder"):
        claim_run_dir(config, new=True)


def test_a_run_dir_that_can_be_written_to_is_left_as_it_was(tmp_path):
    check_run_dir(load("quickstart", [f"run.dir={tmp_path}/not/there/yet"]))
    assert list(tmp_path.iterdir()) == []


# ---- keys and trackers ----------------------------------------------------------------------------------


def test_keys_that_cannot_serve_are_refused(tmp_path):
    def check(folder: Path) -> None:
        check_keys(load("quickstart", [f"network.keys={folder}"]))

    folder = tmp_path / "keys"
    make_keys.make(folder, ["node1"], force=False)
    check(folder)
    check_keys(load("quickstart"))
    with pytest.raises(KeysError, match=r"network\.keys: no folder"):
        check(tmp_path / "nowhere")
    make_keys.export(folder, "node1", tmp_path / "node1")
    with pytest.raises(KeysError, match=r"node1/server\.key_secret is missing"):
        check(tmp_path / "node1")
    (folder / "clients" / "learner.key").unlink()
    with pytest.raises(ConfigError, match=r"admits node1, but not the key 'learner'"):
        check(folder)
    (folder / "server.key_secret").chmod(0o644)
    with pytest.raises(KeysError, match=r"chmod 600 .*server\.key_secret"):
        check(folder)


def test_an_empty_wandb_mode_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "")
    with pytest.raises(ConfigError, match="unset WANDB_MODE"):
        check_trackers(make_config(tmp_path, tracking={"wandb": "offline"}))
    check_trackers(make_config(tmp_path))
