"""Whole runs that train adapters: they learn, they resume, and their journal makes the same digests again."""

import json

import pytest

from learner.record.summary import summarize
from slipstream.view.check_export import check
from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

LORA = ("learner.lora.rank=16", "learner.lora.alpha=32", "learner.lr=5e-3")


def test_sort6_is_learnt_by_adapters_alone(tmp_path, sort6, zygote):
    """The quick start at its own size, longer: 80 steps took greedy accuracy from .26 to .89."""
    runs = Runs(tmp_path, sort6, zygote)
    whole = ("rollout.groups_per_step=64", "rollout.max_running=512", "evaluation.every_steps=20")
    run = runs(*LORA, *whole, "evaluation.num_prompts=512", steps=120, split="1:2")
    try:
        assert run.wait(350) == 0, run.text()[-3000:]
        found = summarize(run.folder, None)
        print(found, {row["weight_sync/bytes"] for row in run.rows() if "weight_sync/bytes" in row})
        assert found["greedy_after"] >= 0.85 and found["digests_equal"] and found["groups_trained_twice"] == 0, found
        exported = check(run.folder)
        assert len(exported["different"]) <= 1, exported
    finally:
        runs.close()


def test_a_run_of_adapters_is_resumed_and_its_journal_trained_again(launch):
    run = launch(*LORA, "checkpoint.every_steps=2", "replay.journal_keep=all", steps=3, split="1:2")
    assert run.wait() == 0, run.text()[-3000:]
    again = launch.resume(run.folder, "--steps", "5")
    assert again.wait() == 0, again.text()[-3000:]
    assert [line["step"] for line in run.ledger()] == [1, 2, 3, 4, 5]
    played = launch.start(["learner.main", "--replay", str(run.folder)], run.folder)
    assert played.wait() == 0, played.text()[-3000:]
    (found,) = [json.loads(line) for line in played.text().splitlines() if line.startswith("{")]
    assert found["equal"] == found["steps"] == 5, found
