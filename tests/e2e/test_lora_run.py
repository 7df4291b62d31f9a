"""Whole runs that train adapters: they learn, they resume, and their journal makes the same digests again."""

import pytest

from learner.record.summary import summarize
from slipstream.view.check_export import check
from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LORA = ("learner.lora.rank=16", "learner.lora.alpha=32", "learner.lr=5e-3")


def test_sort6_is_learnt_by_adapters_alone(tmp_path, sort6, zygote):
    """The quick start at its own size, twice as long: greedy accuracy from .26 to .92, .93, .96; .84 after 120."""
    runs = Runs(tmp_path, sort6, zygote)
    whole = ("rollout.groups_per_step=64", "rollout.max_running=512", "evaluation.every_steps=20")
    run = runs(*LORA, *whole, "evaluation.num_prompts=512", steps=160, split="1:2")
    try:
        assert run.wait(350) == 0, run.text()[-3000:]
        found = summarize(run.folder, None)
        print(found, {row["weight_sync/bytes"] for row in run.rows() if "weight_sync/bytes" in row})
        assert found["greedy_after"] >= 0.85 and found["digests_equal"] and found["groups_trained_twice"] == 0, found
        exported = check(run.folder)
        assert len(exported["different"]) <= 1, exported
    finally:
        runs.close()
