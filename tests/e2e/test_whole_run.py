"""One small run, looked at from all sides; and what goes on from its folder."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 5
LAG_0 = ("replay.async_lag=0", "rollout.temperature=0.7", "tracking.save_rollouts_every=1")


@pytest.fixture(scope="module")
def clean(tmp_path_factory, sort6, zygote):
    """A run on two ranks that has finished: evaluations, checkpoints, trackers, plot, every trajectory saved."""
    runs = Runs(tmp_path_factory.mktemp("clean"), sort6, zygote)
    settings = (
        "evaluation.every_steps=3",
        "checkpoint.every_steps=2",
        "tracking.plot=true",
        "tracking.tensorboard=true",
    )
    run = runs(*LAG_0, *settings, steps=STEPS, split="1:2", name="clean")
    assert run.wait() == 0, run.text()[-3000:]
    yield run
    runs.close()


def test_a_run_trains_evaluates_checkpoints_and_leaves_nothing_behind(clean):
    assert f"finished {STEPS} steps" in clean.text()
    assert [row["training/global_step"] for row in clean.steps()] == list(range(1, STEPS + 1))
    groups = clean.groups()
    assert len(groups) == len(set(groups)) == STEPS * 16
    syncs = [row for row in clean.rows() if "weight_sync/digests_equal" in row]
    assert all(row["weight_sync/digests_equal"] for row in syncs) and syncs[-1]["weight_sync/members"] == 1

    evaluated = {row["version"] for row in clean.rows() if any(key.startswith("val-core/") for key in row)}
    assert evaluated == {0, 3, STEPS}
    rows = (clean.folder / "evaluations" / f"version_{STEPS}_greedy.jsonl").read_text().splitlines()
    assert len(rows) == 64

    checkpoints = sorted(path.name for path in (clean.folder / "checkpoints").iterdir())
    assert checkpoints == ["step_4", "step_5"], "checkpoint.keep is 2"
    assert (clean.folder / "plots" / "summary.png").stat().st_size > 10_000
    assert clean.nothing_left()


def test_the_exported_folder_answers_as_the_last_evaluation_says(clean):
    from learner.report.check_export import check

    result = check(clean.folder)
    assert (result["step"], result["prompts"]) == (STEPS, 64)
    assert len(result["different"]) <= 1, result["different"]
    assert abs(result["greedy_exported"] - result["greedy_reported"]) <= 1 / 64


def test_tensorboard_gets_every_step(clean):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(clean.folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    rewards = {event.step: event.value for event in events.Scalars("critic/rewards/mean")}
    assert rewards == pytest.approx({row["step"]: row["critic/rewards/mean"] for row in clean.steps()})
    assert set(rewards) == set(range(1, STEPS + 1))
    assert any(tag.startswith("val-core/") for tag in tags) and "training/lag_histogram/0" in tags
    greedy = next(tag for tag in tags if tag.startswith("val-core/") and tag.endswith("greedy"))
    assert {event.step for event in events.Scalars(greedy)} == {0, 3, STEPS}


@pytest.mark.parametrize("split", ["1:1", "1:2"])
def test_five_lag_0_steps_equal_the_reference_loop(clean, launch, split):
    """Parity of the whole multi-process system with a plain single-process loop, from the same groups."""
    run = clean if split == "1:2" else launch(*LAG_0, steps=STEPS)
    assert run.wait() == 0, run.text()[-3000:]
    expected, trained = reference_loop(run)
    worst = max(float((trained[name] - tensor).abs().max()) for name, tensor in expected.items())
    print(f"five lag-0 steps, split {split}: max |difference of a parameter| = {worst:.3g}")
    assert worst <= (1e-6 if split == "1:1" else 1e-5), worst

    for row in run.steps():
        assert row["training/lag_histogram"].keys() == {"0"}
        assert row["training/rollout_logprobs_diff_max"] <= 1e-4
        assert row["training/rollout_logprobs_diff_mean"] <= 1e-6


def reference_loop(run):
    """Weights that a plain loop makes of the run's groups, and those that the run made."""
    from reference import Recorded, train
    from safetensors.torch import load_file

    from configs import load

    config = load(run.folder / "config.yaml")
    last = config.learner.total_steps
    steps = []
    for step in range(1, last + 1):
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
    expected = train(Path(config.model.path), steps, config)
    trained = load_file(run.folder / "checkpoints" / f"step_{last}" / "hf" / "model.safetensors")
    return expected, trained


def test_a_resumed_run_goes_on_from_the_newest_whole_checkpoint_and_says_so(clean, launch, tmp_path):
    """The newest is cut short: the steps since the one before come again from the journal, with the same weights."""
    folder = tmp_path / "resumed"
    shutil.copytree(clean.folder, folder)
    cut = folder / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    run = launch.resume(folder, "--steps", str(STEPS + 2))
    assert run.wait() == 0, run.text()[-3000:]
    assert f"checkpoint step_{STEPS} is passed over: hf/model.safetensors has " in run.text()
    assert "the learner goes on from step_4" in run.text()
    assert [row["training/global_step"] for row in run.steps()] == list(range(1, STEPS + 3))
    before, after = clean.ledger(), run.ledger()[STEPS:]
    assert [(line["step"], line["incarnation"]) for line in after] == [(step, 2) for step in (5, 6, 7)]
    assert [(line["digest"], line["groups"]) for line in after[:1]] == [
        (line["digest"], line["groups"]) for line in before[4:]
    ]
    trained = [tuple(group) for line in [*before[:4], *after] for group in line["groups"]]
    assert len(trained) == len(set(trained)) == (STEPS + 2) * 16
