"""Runs whose reward is a model: the launcher starts a reward server, and again when it dies."""

import json
import os
import re
import signal
import time

import pytest

from rollout_server.tasks import load_tokenizer
from tests.support.reward_folders import alone, save_reward_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SETTINGS = ("reward.function=model", "tracking.save_rollouts_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("rewards") / "qwen2")


def trained(run):
    """Every trajectory that was trained on, as it was saved."""
    files = sorted((run.folder / "rollouts").glob("step_*/rank_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def worst(run, folder):
    """Largest distance of a trained reward from what transformers says of the prompt and the answer."""
    tokenizer = load_tokenizer(str(folder))
    rows = trained(run)
    texts = [tokenizer.decode(row["prompt_ids"] + row["response_ids"], skip_special_tokens=True) for row in rows]
    scores = alone(folder, [tokenizer(text).input_ids for text in texts])
    return max(abs(score - row["score"]) for score, row in zip(scores, rows, strict=True))


def test_no_group_is_lost_when_the_reward_server_is_killed_in_the_middle_of_a_batch(launch, folder):
    small = ("rollout.groups_per_step=4", "rollout.restart_backoff_s=0.1")
    run = launch(*SETTINGS, *small, f"reward.model.path={folder}", steps=8)
    run.wait_for_step(1)
    (pid,) = run.pids("rollout_server.reward_model.main")
    os.kill(pid, signal.SIGSTOP)  # whatever it has been asked from here on it takes to its grave
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.text()[-3000:]
    assert re.search(r"reward-0 \(pid \d+\) died: killed by SIGKILL \[closed\].*; restart 1 of 3", run.text())
    assert run.log("reward-0").count("the reward model is loaded") == 2
    groups = run.groups()
    assert len(groups) == len(set(groups)) == 8 * 4
    assert "reward_error" not in run.log("replay") and "lost '" not in run.log("replay")
    largest = worst(run, folder)
    print(f"{len(trained(run))} trained answers: largest distance from transformers' score {largest:.3g}")
    assert largest <= 1e-5
    row = run.steps()[-1]
    assert abs(row["reward/model_score"] - row["critic/score/mean"]) < 1e-5 and row["reward/error_rate"] == 0
    assert run.nothing_left()


@pytest.mark.slow  # by default: tests/learner/test_children.py
def test_a_reward_server_that_keeps_dying_ends_the_run_with_its_name(launch, folder):
    run = launch(*SETTINGS, f"reward.model.path={folder}", "rollout.restarts=0", steps=1000)
    run.wait_until(lambda: run.pids("rollout_server.reward_model.main"), "the reward server")
    run.wait_until(lambda: "listens at" in run.log("reward-0"), "its socket")
    run.kill("rollout_server.reward_model.main")
    assert run.wait() == 1
    assert re.search(r"run stopped: reward-0 \(pid \d+\) died: killed by SIGKILL", run.text())
    assert run.nothing_left()


@pytest.mark.slow
def test_the_quick_start_learns_with_a_reward_model_beside_its_function(tmp_path, sort6, folder):
    """Every process for real, evaluations included; the default run has the tests above."""
    from tests.support.runs import Runs

    runs = Runs(tmp_path, sort6, None)
    settings = (f"reward.model.path={folder}", "reward.model.weight=0.01", "reward.function=exact")
    try:
        run = runs(*settings, "evaluation.every_steps=20", "rollout.groups_per_step=64", split="1:2", steps=40)
        assert run.wait(280) == 0, run.text()[-3000:]
        rows = run.steps()
        assert all(
            abs(row["reward/function_score"] + 0.01 * row["reward/model_score"] - row["critic/score/mean"]) < 1e-4
            for row in rows
        )
        assert rows[-1]["reward/function_score"] > rows[0]["reward/function_score"] + 0.1
        assert {row["version"] for row in run.rows() if any(key.startswith("val-core/") for key in row)} == {0, 20, 40}
    finally:
        runs.close()
