"""Whole runs of a tiny random Qwen2-VL about pictures: three steps; learning, resume and replay of the journal."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.pictures import main
from tests.support.runs import Input, Run, Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TURNS = Path(__file__).with_name("picture_turns.py")
SMALL = ("data.max_prompt_tokens=128", "rollout.max_new_tokens=1", "learner.lr=1e-3", "learner.warmup_steps=0")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "data"
    assert main(["--out", str(folder)]) == 0
    return folder


def differences(run: Run) -> list[float]:
    """Largest difference of a step's logprobs between engine and learner."""
    return [row["training/rollout_logprobs_diff_max"] for row in run.steps() if row["training/loss_tokens"]]


def test_three_steps_about_pictures(tmp_path, pictures, zygote):
    """Engine and learner see the same pictures: their logprobs agree while the weights move."""
    runs = Runs(tmp_path, Input(pictures), zygote)
    try:
        run = runs(*SMALL, "rollout.group_size=16", "replay.async_lag=0", "rollout.on_new_weights=drain", steps=3)
        assert run.wait() == 0, run.text()[-3000:]
        assert len(differences(run)) == 3 and max(differences(run)) < 1e-5
        assert all(row["training/update_applied"] for row in run.steps())
        assert max(row["actor/grad_norm"] for row in run.steps()) > 0
    finally:
        runs.close()


@pytest.mark.slow
def test_three_steps_of_episodes_about_pictures(tmp_path, pictures, zygote):
    """Two turns each, of which both ends see the picture."""
    runs = Runs(tmp_path, Input(pictures), zygote)
    try:
        turns = (f"environment.function={TURNS}:ask_again", "environment.turn_timeout_s=30")
        lag = ("replay.async_lag=0", "rollout.on_new_weights=drain", "algorithm.drop_zero_advantage=false")
        run = runs(*SMALL, *lag, *turns, "rollout.group_size=16", "rollout.max_new_tokens=24", steps=3)
        assert run.wait() == 0, run.text()[-3000:]
        assert len(differences(run)) == 3 and max(differences(run)) < 1e-5
        assert all(row["episode/turns"] == 2 for row in run.steps())
    finally:
        runs.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang-cpu")
def test_three_steps_with_sglang_on_a_cpu(tmp_path, pictures):
    """SGLang is given our pixels; its updates carry the decoder alone, and its digests prove them."""
    runs = Runs(tmp_path, Input(pictures), None)
    try:
        lag = ("rollout.engine=sglang", "replay.async_lag=0", "rollout.on_new_weights=drain")
        run = runs(*SMALL, *lag, "rollout.group_size=16", "rollout.max_running=32", steps=3)
        assert run.wait() == 0, run.text()[-3000:]
        assert len(differences(run)) == 3 and max(differences(run)) < 1e-4
    finally:
        runs.close()


@pytest.mark.slow
def test_colours_are_learnt_and_a_killed_run_goes_on_alike(tmp_path, pictures, zygote):
    runs = Runs(tmp_path, Input(pictures), zygote)
    try:
        keeps = ("checkpoint.every_steps=10", "replay.journal_keep=all", "evaluation.sampled=false")
        run = runs(*SMALL, *keeps, "rollout.group_size=16", "evaluation.every_steps=20", steps=40)
        run.wait_for_step(15)
        run.kill("learner.train")
        assert run.wait() == 0, run.text()[-3000:]
        played = runs.start(["learner.main", "--replay", str(run.folder)], run.folder)
        assert played.wait() == 0, played.text()[-3000:]
        (found,) = [json.loads(line) for line in played.text().splitlines() if line.startswith("{")]
        assert found["equal"] == found["steps"] == 40, found
        scores = [row["val-core/eval/greedy"] for row in run.rows() if "val-core/eval/greedy" in row]
        print(scores)
        assert scores[-1] >= 0.8
    finally:
        runs.close()
