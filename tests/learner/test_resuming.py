"""What a run goes on with: its own port, and never fewer steps than it has made."""

import argparse
import io
import json

import pytest
from rich.console import Console
from tiny_models import make_config

from configs.loading import ConfigError, add_arguments
from learner.launch.launcher import Launcher
from learner.launch.preflight import claim_run_dir
from learner.main import prepare
from learner.report.live_view import LiveView


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """`--resume` of a run from two terminals, as far as its configuration."""
    network = {"replay_port": 5757}
    config = make_config(
        tmp_path, run={"dir": str(tmp_path), "name": "run"}, network=network, placement={"local_rollouts": False}
    )
    claim_run_dir(config, new=True)
    monkeypatch.setattr("learner.main.check_files", lambda config, **_: None)

    def configuration(*arguments):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        parser.add_argument("--resume")
        return prepare(parser.parse_args(["--resume", str(tmp_path / "run"), *arguments]))

    return configuration


def ledger(tmp_path, *steps, torn=""):
    lines = [json.dumps({"step": step, "groups": []}) + "\n" for step in steps]
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(lines) + torn)


def test_a_resumed_run_is_found_where_it_was(resume):
    config = resume()
    assert config.network.replay_port == 5757 and not config.placement.local_rollouts
    assert resume("--set", "network.replay_port=5758").network.replay_port == 5758


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
        folder = tmp_path / "run" / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * size)
        (folder / "COMPLETE").write_text(json.dumps({"files": {"weights": 3}}))
    terminal = io.StringIO()
    config = resume()
    Launcher(config, True, LiveView(config, "plain", Console(file=terminal))).say_fallback()
    said = terminal.getvalue().splitlines()
    assert len(said) == (1 if older_is_whole else 2)
    assert said[0] == f"checkpoint step_4 is passed over: weights has 2 bytes, COMPLETE says 3; {words}"
