"""One small run through every process, looked at from all sides."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_run_trains_evaluates_checkpoints_and_leaves_nothing_behind(launch, sort6):
    run = launch("evaluation.every_steps=2", "checkpoint.every_steps=2", "tracking.plot=true", steps=5, split="1:2")
    assert run.wait() == 0, run.text()[-3000:]
    assert "finished 5 steps" in run.text()

    steps = run.steps()
    assert [row["training/global_step"] for row in steps] == [1, 2, 3, 4, 5]
    assert all(max(map(int, row["training/lag_histogram"])) <= 1 for row in steps)
    ledger = run.ledger()
    groups = [tuple(group) for line in ledger for group in line["groups"]]
    assert len(groups) == len(set(groups)) == 5 * 16
    syncs = [row for row in run.rows() if "weight_sync/digests_equal" in row]
    assert all(row["weight_sync/digests_equal"] for row in syncs) and syncs[-1]["weight_sync/members"] == 1

    evaluated = {row["version"] for row in run.rows() if any(key.startswith("val-core/") for key in row)}
    assert evaluated == {0, 2, 4, 5}
    rows = (run.folder / "evaluations" / "version_5_greedy.jsonl").read_text().splitlines()
    assert len(rows) == 64

    checkpoints = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert checkpoints == ["step_4", "step_5"], "checkpoint.keep is 2"
    assert (run.folder / "plots" / "summary.png").stat().st_size > 10_000
    deadline = time.monotonic() + 5
    while run.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.pids() == []


def test_the_exported_folder_answers_as_the_last_evaluation_says(launch):
    from learner.report.check_export import check

    run = launch("evaluation.every_steps=3", "evaluation.sampled=false", steps=3)
    assert run.wait() == 0, run.text()[-3000:]
    result = check(run.folder)
    assert (result["step"], result["prompts"]) == (3, 64)
    assert len(result["different"]) <= 1, result["different"]
    assert abs(result["greedy_exported"] - result["greedy_reported"]) <= 1 / 64


@pytest.mark.parametrize("split", ["1:1", "1:2"])
def test_five_lag_0_steps_equal_the_reference_loop(launch, sort6, split):
    """Parity of the whole multi-process system with a plain single-process loop, from the same groups."""
    from reference import Recorded, train
    from safetensors.torch import load_file

    from configs import load

    run = launch(
        "replay.async_lag=0",
        "rollout.temperature=0.7",
        "tracking.save_rollouts_every=1",
        steps=5,
        split=split,
        name=f"parity{split[-1]}",
    )
    assert run.wait() == 0, run.text()[-3000:]
    steps = []
    for step in range(1, 6):
        files = sorted((run.folder / "rollouts" / f"step_{step}").glob("rank_*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        steps.append(
            [
                Recorded(
                    prompt_ids=row["prompt_ids"],
                    response_ids=row["response_ids"],
                    loss_mask=row["loss_mask"],
                    logprobs=row["logprobs"],
                    versions=row["versions"],
                    reward=row["reward"],
                    group=row["group"][0] * 10**6 + row["group"][1],
                )
                for row in rows
            ]
        )
    expected = train(sort6.folder / "model", steps, load(run.folder / "config.yaml"))
    trained = load_file(run.folder / "checkpoints" / "step_5" / "hf" / "model.safetensors")
    worst = max(float((trained[name] - tensor).abs().max()) for name, tensor in expected.items())
    print(f"five lag-0 steps, split {split}: max |difference of a parameter| = {worst:.3g}")
    assert worst <= (1e-6 if split == "1:1" else 1e-5), worst

    for row in run.steps():
        assert row["training/lag_histogram"].keys() == {"0"}
        assert row["training/rollout_logprobs_diff_max"] <= 1e-4
        assert row["training/rollout_logprobs_diff_mean"] <= 1e-6


def test_resume_goes_on_from_the_newest_complete_checkpoint(launch):
    run = launch("checkpoint.every_steps=2", steps=40, name="resumed")
    run.wait_for_step(3)
    run.process.terminate()
    assert run.wait(30) == 130
    before = [line for line in run.ledger() if line["step"] <= 2]
    again = launch(name="resumed", steps=20, arguments=("--resume", str(run.folder)))
    assert again.wait() == 0, again.text()[-3000:]
    steps = [row["training/global_step"] for row in again.steps()]
    assert steps == sorted(set(steps)) and steps[-1] == 20
    kept = [line for line in again.ledger() if line["incarnation"] == 2]
    trained = [tuple(g) for line in [*before, *kept] for g in line["groups"]]
    first = kept[0]["step"]
    assert first >= 3 and len({tuple(g) for line in kept for g in line["groups"]}) == 16 * (20 - first + 1)
    assert len(trained) == len(set(trained)) if first == 3 else True
