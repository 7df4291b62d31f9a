"""What a run goes on with: its own port, and never fewer steps than it has made."""

import argparse
import json

import pytest
from tiny_models import make_config

from configs.loading import add_arguments
from learner.launch.preflight import PreflightError, claim_run_dir
from learner.main import prepare


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """`--resume` of a run from two terminals, as far as its configuration."""
    network = {"replay_port": 5757}
    config = make_config(
        tmp_path, run={"dir": str(tmp_path), "name": "run"}, network=network, placement={"local_rollouts": False}
    )
    claim_run_dir(config, new=True)
    monkeypatch.setattr("learner.main.check_files", lambda config: None)

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
    with pytest.raises(PreflightError, match=r"has made 4 steps, learner.total_steps is 3; give at least 4 with --st"):
        resume("--steps", "3")
    assert resume("--steps", "4").learner.total_steps == 4


def test_steps_that_a_crash_took_back_do_not_count(resume, tmp_path):
    ledger(tmp_path, 1, 2, 3, 4, 2)
    assert resume("--steps", "2").learner.total_steps == 2
