"""Before any process starts: what is made, which folder a run has, what it goes on with, what is refused."""

import argparse
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from configs import Config, ConfigError, load
from configs.loading import add_arguments, dump
from examples import sort6
from learner import main as launcher
from learner.main import prepare
from learner.optimizer import lr_at
from learner.record.ledger import Ledger
from replay import keys as make_keys
from replay.journal import FolderLock
from replay.state.snapshot import settings_of
from slipstream.check import checks
from slipstream.launch import earlier_run, quickstart
from slipstream.launch.launcher import Launcher
from slipstream.launch.quickstart import make_input
from slipstream.launch.run_folder import claim_run_dir
from slipstream.plan.processes import Machine, assign
from slipstream.runtime.lifeline import TRY_AGAIN
from slipstream.view.live_view import LiveView
from tests.learner.tiny_models import make_config, save_model


def run(check, config: Config) -> list[str]:
    """Severities of what one check finds; raises what would stop the run."""
    return [finding.severity for finding in check(checks.Subject(config))]


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


def test_a_dry_run_of_a_gpu_preset_needs_no_gpu_and_says_what_it_could_not_check(tmp_path, monkeypatch, capsys):
    for module in ("slipstream.launch.machine.count_gpus", "configs.machine.count_gpus"):
        monkeypatch.setattr(module, lambda: 0)
    for module in ("slipstream.check.memory", "learner.policy.memory"):
        monkeypatch.setattr(f"{module}.gpu_bytes", lambda: None)
    save_model(tmp_path, max_position_embeddings=16384)
    sort6.save_tokenizer(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "312=", "answer": "123"}\n')
    given = [f"data.{one}={tmp_path}/rows.jsonl" for one in ("train", "eval")] + [f"model.path={tmp_path}"]
    words = [word for each in (*given, f"run.dir={tmp_path}/runs") for word in ("--set", each)]
    command = ["learner.main", "--config", "gsm8k-qwen2.5-0.5b-1gpu", *words]
    monkeypatch.setattr(sys, "argv", [*command, "--dry-run"])
    assert launcher.main() == 0
    shown = capsys.readouterr()
    assert "without a usable GPU here: gpu, kernels, gpu-memory (set placement.gpu_gib)" in shown.err
    assert "CUDA_VISIBLE_DEVICES=0" in shown.out and not (tmp_path / "runs").exists()


def test_the_quick_starts_input_is_made_where_it_is_missing(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[:3])
        return subprocess.CompletedProcess(command, sort6.main(command[3:]), "", "")

    monkeypatch.setattr(sort6, "SFT_STEPS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(quickstart.subprocess, "run", run)
    folder = tmp_path / "data" / "sort6"
    paths = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]
    config = load("quickstart", paths)
    assert make_input(config, "quickstart") and not make_input(config, "quickstart")
    assert commands == [[sys.executable, "-m", "examples.sort6"]]
    assert (folder / "model" / "config.json").is_file() and (folder / "eval.jsonl").is_file()
    other = "gsm8k-qwen2.5-1.5b-4gpu"
    assert not make_input(load(other, [f"model.path={tmp_path}/m", f"data.train={tmp_path}/t.jsonl"]), other)


def test_prompts_of_your_own_leave_the_quick_starts_model_to_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for settings, is_missing in (
        (["data.train=mine.py:Rows"], True),
        (["model.path=m/mine", "data.train=a.jsonl"], False),
    ):
        assert quickstart.input_is_missing(load("quickstart", settings), "quickstart") == is_missing


def test_an_input_that_is_never_ready_is_refused_with_its_command(tmp_path, monkeypatch):
    slow, paths = tmp_path / "python", [f"model.path={tmp_path}/m/model", f"data.train={tmp_path}/m/train.jsonl"]
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(quickstart, "INPUT_S", 0.3)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/m was not ready after 0\.3 s; see .* --out {tmp_path}/m --seed"
    ):
        make_input(load("quickstart", paths), "quickstart")


# ---- the run folder -------------------------------------------------------------------------------------


def test_of_two_runs_that_checked_the_same_name_one_takes_the_next(tmp_path):
    config = config_in(tmp_path)
    other = config_in(tmp_path, learner={"lr": 1.0})
    claimed = [claim_run_dir(each, new=True) for each in (config, other, config)]
    assert [each.run.name for each in claimed] == ["same", "same-2", "same-3"]
    assert [load(tmp_path / each.run.name / "config.yaml") for each in claimed] == claimed


def test_a_disk_that_is_full_at_a_resume_takes_nothing_of_the_run(tmp_path):
    claim_run_dir(config_in(tmp_path), new=True)
    ledger(tmp_path, *range(1, 9))
    kept = {path: path.read_bytes() for path in (tmp_path / "same").glob("*")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            claim_run_dir(config_in(tmp_path, learner={"total_steps": 20}), new=False)
        Ledger(tmp_path / "same", resume_version=4)  # takes no room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in kept} == kept


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
        run(checks.run_folder, config)
    with pytest.raises(ConfigError, match=r"^run.dir: .*name a folder"):
        claim_run_dir(config, new=True)


@pytest.mark.parametrize("part", ["checkpoints", "ledger.jsonl", "journal/000001.seg"])
def test_a_part_of_the_run_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch, part):
    """As that of another user is: the administrator, as whom tests may run, may write to everything."""
    config = config_in(tmp_path)
    for name in ("checkpoints", "journal"):
        (tmp_path / "same" / name).mkdir(parents=True)
    for name in ("ledger.jsonl", "journal/000001.seg"):
        (tmp_path / "same" / name).touch()
    run(checks.run_folder, config)
    monkeypatch.setattr(checks.os, "access", lambda path, _: path != tmp_path / "same" / part)
    with pytest.raises(ConfigError, match=rf"^run.dir: this user may not write to {tmp_path}/same/{part}, and the run"):
        run(checks.run_folder, config)


# ---- keys and trackers ----------------------------------------------------------------------------------


def test_keys_that_cannot_serve_are_refused(tmp_path):
    folder = tmp_path / "keys"
    make_keys.make(folder, ["node1"], force=False)
    make_keys.export(folder, "node1", tmp_path / "node1")
    run(checks.keys, load("quickstart", [f"network.keys={folder}"]))
    (folder / "clients" / "learner.key").unlink()
    for given, match in (("node1", r"node1/server\.key_secret is missing"), ("keys", "but not the key 'learner'")):
        with pytest.raises(checks.REFUSALS, match=match):
            run(checks.keys, load("quickstart", [f"network.keys={tmp_path}/{given}"]))


def test_an_empty_wandb_mode_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "")
    with pytest.raises(ConfigError, match="unset WANDB_MODE"):
        run(checks.trackers, make_config(tmp_path, tracking={"trackers": ["wandb"]}))
    run(checks.trackers, make_config(tmp_path))


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """`--resume` of a run from two terminals, as far as its configuration."""
    claim_run_dir(config_in(tmp_path, network={"replay_port": 5757}, placement={"local_rollouts": False}), new=True)
    monkeypatch.setattr(checks, "require", lambda *_, **__: None)

    def configuration(*arguments):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        parser.add_argument("--resume")
        parser.add_argument("--dry-run", action="store_true")
        return prepare(parser.parse_args(["--resume", str(tmp_path / "same"), *arguments]))

    return configuration


def ledger(tmp_path, *steps, torn=""):
    lines = [json.dumps({"step": step, "groups": []}) + "\n" for step in steps]
    (tmp_path / "same" / "ledger.jsonl").write_text("".join(lines) + torn)


def test_a_resumed_run_is_found_where_it_was(resume):
    config = resume()
    assert config.network.replay_port == 5757 and not config.placement.local_rollouts
    assert resume("--set", "network.replay_port=5758").network.replay_port == 5758


def test_a_resume_from_another_folder_finds_what_the_run_found(resume, tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    config = config_in(tmp_path, model={"path": "model"})
    (tmp_path / "same" / "config.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    claim_run_dir(config, new=True)
    monkeypatch.chdir("elsewhere")
    config = resume("--resume", "../same")
    assert Path(config.run_dir) == tmp_path / "same" and Path(config.model.path).is_dir()
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[0]


def test_what_a_resume_changes_is_shown_and_logged(resume, tmp_path, capsys):
    changed = ["--set", "learner.lr=2e-5", "--set", "evaluation={every_steps: 4}", "--set", "learner.warmup_steps=2"]
    config = resume(*changed)
    said = ["learner.lr: 0.0005 -> 2e-05", "evaluation.every_steps: 10 -> 4"]
    shown = capsys.readouterr().err
    assert [line for line in said if f"changed: {line}" not in shown] == []
    found = earlier_run.changes(tmp_path / "same", changed[1::2], config)
    assert earlier_run.described(found) == said
    earlier_run.log_changes(tmp_path / "same", found)
    log = (tmp_path / "same" / "config.changes.log").read_text().splitlines()
    assert [line.partition(" --resume: ")[2] for line in log] == said
    assert earlier_run.described(earlier_run.changes(tmp_path / "same", [], config)) == said


@pytest.mark.parametrize("ends", [False, True])
def test_a_resume_of_a_run_that_goes_on_changes_nothing_in_its_folder(resume, tmp_path, monkeypatch, capsys, ends):
    lock, before = FolderLock(tmp_path / "same" / "journal"), (tmp_path / "same" / "config.yaml").read_text()
    monkeypatch.setattr(earlier_run, "ENDS_S", 0.3)
    monkeypatch.setattr(sys, "argv", ["main", "--resume", str(tmp_path / "same"), "--set", "learner.lr=0.5"])
    monkeypatch.setattr(launcher, "run", lambda made: int(not made.resume))
    monkeypatch.setattr(earlier_run.time, "sleep", lambda _: lock.close() if ends else None)
    assert launcher.main() == (0 if ends else TRY_AGAIN)
    text = (tmp_path / "same" / "config.yaml").read_text()
    assert (text != before) is (tmp_path / "same" / earlier_run.CHANGES).exists() is ends
    assert ("journal: another replay is writing this journal; let that run end" in capsys.readouterr().err) is not ends
    lock.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("run.seed=1", "--resume: run.seed: .*/same was begun with 0, and its journal depends on it; leave --set"),
        ("rollout.group_size=2", "--resume: rollout.group_size: .* was begun with 4"),
        ("rollout.groups_per_step=8", "--resume: rollout.groups_per_step: .* was begun with 4"),
        ("rollout.temperature=0.5", "--resume: rollout.temperature: .* was begun with 1.0"),
        ("data.shuffle=false", "--resume: data.shuffle: .* was begun with True"),
    ],
)
def test_what_the_journal_depends_on_cannot_change(resume, changed, words):
    with pytest.raises(ConfigError, match=words):
        resume("--set", changed)


def test_a_resume_goes_on_with_the_teachers_of_its_journal(resume, tmp_path):
    """Groups in it hold their scores, with so many ids of each token."""
    small, big = ({name: {"path": name, "rows": {"size": name}}} for name in ("small", "big"))
    begun = {"algorithm": {"distillation": {"top_k": {"k": 4}}}, "teachers": small}
    (tmp_path / "same" / "config.yaml").write_text(dump(load("quickstart", [f"{k}={v}" for k, v in begun.items()])))
    for changed, words in (
        (f"teachers={big}", r"--resume: teachers: .* was begun with \['small'\]"),
        (f"teachers={small | big}", r"--resume: teachers: .* was begun with \['small'\]"),
        ("algorithm.distillation={top_k: {k: 5}}", "--resume: algorithm.distillation: .* was begun with 'k 4'"),
        ("algorithm.distillation=sampled", "--resume: algorithm.distillation: .* was begun with 'k 4'"),
    ):
        with pytest.raises(ConfigError, match=words):
            resume("--set", changed)
    assert resume("--set", "teachers.small.timeout_s=3").teachers["small"].timeout_s == 3


def test_a_teacher_of_the_same_name_is_the_same_model(resume, tmp_path):
    (tmp_path / "small").mkdir()
    begun = {"algorithm": {"distillation": "sampled_advantage"}, "teachers": {"one": {"path": str(tmp_path / "small")}}}
    (tmp_path / "same" / "config.yaml").write_text(dump(load("quickstart", [f"{k}={v}" for k, v in begun.items()])))
    for changed, words in (
        ("teachers.one.path=other", "--resume: teachers.one.path: .* was begun with .*small"),
        ("teachers.one={of: lagged}", "--resume: teachers.one.of: .* was begun with None"),
        ("teachers.one={url: 'http://127.0.0.1:1/v1', model: other}", "--resume: teachers.one.model: .* with None"),
        ("teachers.one.context='{prompt} in short'", "--resume: teachers.one.context: .* was begun with None"),
    ):
        with pytest.raises(ConfigError, match=words):
            resume("--set", changed)
    (tmp_path / "small").rmdir()
    assert resume("--set", "teachers.one.path=moved").teachers["one"].path == "moved"


def test_another_model_is_refused_and_the_same_elsewhere_is_not(resume, tmp_path, monkeypatch):
    prints = {str(tmp_path): {"tokenizer": "a", "architecture": "b"}, "moved": {"tokenizer": "a", "architecture": "b"}}
    prints["other"] = {"tokenizer": "a", "architecture": "c"}
    monkeypatch.setattr(earlier_run, "model_fingerprint", lambda path, template: prints[path])
    assert resume("--model", "moved").model.path == "moved"
    with pytest.raises(ConfigError, match=r"--resume: model.path: other has another architecture than .*--model"):
        resume("--model", "other")


def test_fewer_steps_than_were_made_are_refused(resume, tmp_path):
    ledger(tmp_path, 1, 2, 3, 4, torn='{"step": 5, "gro')
    with pytest.raises(ConfigError, match=r"has made 4 steps, learner.total_steps is 3; give at least 4 with --st"):
        resume("--steps", "3")
    assert resume("--steps", "4").learner.total_steps == 4


def test_steps_that_a_crash_took_back_do_not_count(resume, tmp_path):
    ledger(tmp_path, 1, 2, 3, 4, 2)
    assert resume("--steps", "2").learner.total_steps == 2


@pytest.mark.parametrize(
    ("older_is_whole", "words"),
    [(True, "the learner goes on from step_2"), (False, "the learner goes on without a checkpoint")],
)
def test_the_terminal_says_which_checkpoint_is_passed_over(resume, tmp_path, older_is_whole, words):
    for step, size in ((2, 3 if older_is_whole else 2), (4, 2)):
        folder = tmp_path / "same" / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * size)
        (folder / "COMPLETE").write_text(json.dumps({"files": {"weights": 3}}))
    terminal = io.StringIO()
    config = resume()
    Launcher(config, True, LiveView(config, "plain", Console(file=terminal))).say_fallback()
    said = terminal.getvalue().splitlines()
    assert len(said) == (1 if older_is_whole else 2)
    assert said[0] == f"checkpoint step_4 is passed over: weights has 2 bytes, COMPLETE says 3; {words}"


@pytest.mark.parametrize(
    ("made", "kept", "said"),
    [
        (0, None, ["no checkpoint", "starts at step 0"]),
        (12, None, ["no checkpoint", "starts at step 0", "trains the 12 steps"]),
        (12, 8, ["goes on at step 8", "trains the 4 steps after it again"]),
        (12, 12, ["goes on at step 12"]),
    ],
)
def test_what_a_resume_repeats_is_said_exactly(made, kept, said, tmp_path, monkeypatch):
    lines = [json.dumps({"step": step, "groups": []}) + "\n" for step in range(1, made + 1)]
    (tmp_path / "ledger.jsonl").write_text("".join(lines))
    found = None if kept is None else tmp_path / "checkpoints" / f"step_{kept}"
    monkeypatch.setattr(earlier_run, "latest_complete", lambda folder: (found, []))
    text = earlier_run.goes_on(tmp_path)
    assert [part for part in said if part not in text] == [] and ("again" in text) == (made != (kept or 0))


def test_a_playback_makes_the_steps_of_the_surviving_line(monkeypatch):
    records = [("commit", 1), ("commit", 2), ("commit", 3), ("diverged", 1), ("commit", 2)]
    journal = SimpleNamespace(records=lambda: [SimpleNamespace(kind=k, fields={"step": n}) for k, n in records])
    monkeypatch.setattr(earlier_run, "JournalReader", lambda _: journal)
    assert earlier_run._last_step(Path("run")) == 2


@pytest.mark.parametrize(
    ("made", "code", "exit_code"), [("ab", 0, 0), ("ab", 3, 3), ("a", 0, 1), ("ax", 0, 1), ("ax", 3, 3)]
)
def test_a_playback_ends_well_with_every_digest_of_the_journal(tmp_path, capsys, made, code, exit_code):
    (tmp_path / "same").mkdir()
    pairs = enumerate(zip(made, "ab", strict=False), start=1)
    lines = [{"step": n, "groups": [], "digest": digest, "expected": expected} for n, (digest, expected) in pairs]
    (tmp_path / "same" / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert earlier_run.report(config_in(tmp_path, learner={"total_steps": 2}), code) == exit_code
    assert json.loads(capsys.readouterr().out)["first_different"] == (2 if "x" in made else None)


def test_a_run_that_was_ended_early_is_played_back_with_its_own_learning_rates(tmp_path, monkeypatch):
    own = config_in(tmp_path, learner={"schedule": "cosine", "total_steps": 20, "warmup_steps": 2})
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "config.yaml").write_text(dump(own))
    monkeypatch.setattr(earlier_run, "_last_step", lambda _: 7)
    played = earlier_run.played_back(tmp_path / "same", [])
    assert played.learner.total_steps == 7
    rates = [[lr_at(step, config.learner) for step in range(1, 8)] for config in (own, played)]
    assert rates[0] == rates[1] and settings_of(own)["deciding"] == settings_of(played)["deciding"]


def test_a_run_over_several_hosts_is_played_back_on_one(tmp_path, monkeypatch):
    several = {"learner": "node0:0-1; node1:0-1", "rollout": "node2:0", "split": None, "device": "cpu"}
    taught = {"teachers": {"big": {"path": "big", "devices": "node0:2"}}, "algorithm": {"distillation": "sampled"}}
    own = config_in(tmp_path, placement=several, network={"host": "10.0.0.1", "insecure": True}, **taught)
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "config.yaml").write_text(dump(own))
    monkeypatch.setattr(earlier_run, "_last_step", lambda _: 7)
    played = earlier_run.played_back(tmp_path / "same", [])
    plan = assign(played, {"node0": Machine(played.network.host, gpus=0)}, config_file="")
    assert (plan.nodes("learner"), played.num_learner_ranks) == (["node0"], 4) and plan.nodes("rollout") == []
