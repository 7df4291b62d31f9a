"""A run that learns from answers in its data: killed in the middle, played back, and where an RL run starts."""

import json

import pytest

from learner.record.metrics import evaluation_scores

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12


def test_an_sft_run_survives_kills_and_an_rl_run_starts_from_its_folder(launch, tmp_path):
    rows = [json.loads(line) for line in (launch.input.folder / "train.jsonl").read_text().splitlines()]
    taught = tmp_path / "taught.jsonl"
    taught.write_text("".join(json.dumps({"prompt": r["prompt"], "completion": r["answer"]}) + "\n" for r in rows))
    settings = ("learner.objective=sft", f"data.train={taught}", "learner.lr=2e-3", "checkpoint.every_steps=4")
    settings += ("replay.journal_keep=all", "evaluation.every_steps=12", "evaluation.sampled=false")
    run = launch(*settings, name="sft", steps=STEPS, split="1:2")
    run.wait_for_step(5)
    run.wait_until((run.folder / "checkpoints" / "step_4" / "COMPLETE").exists, "a checkpoint")
    run.kill("learner.train")
    run.wait_until(lambda: run.ledger()[-1]["incarnation"] == 2, "the learner to go on")
    run.kill("replay.main")
    assert run.wait() == 0, run.text()[-3000:]

    made: dict[int, list[tuple[str, list[list[int]]]]] = {}
    for line in run.ledger():
        made.setdefault(line["step"], []).append((line["digest"], line["groups"]))
    assert sorted(made) == list(range(1, STEPS + 1)) and any(len(each) > 1 for each in made.values())
    assert all(each == each[:1] * len(each) for each in made.values()), "steps that are made again are the same"
    groups = [tuple(group) for each in made.values() for group in each[-1][1]]
    assert len(groups) == len(set(groups)) == STEPS * 16
    losses = [row["sft/loss"] for row in run.steps()]
    assert losses[-1] < losses[0] - 0.2 and run.nothing_left()

    played = launch.start(["learner.main", "--replay", str(run.folder), "--set", "tracking.plot=false"], run.folder)
    assert played.wait() == 0, played.text()[-3000:]
    assert json.loads(played.text().splitlines()[-1])["equal"] == STEPS

    (after,) = [evaluation_scores(row) for row in run.rows() if row.get("version") == STEPS and evaluation_scores(row)]
    begins = launch(
        f"model.path={run.folder}", "evaluation.every_steps=1", "evaluation.sampled=false", name="rl", steps=1
    )
    assert begins.wait() == 0, begins.text()[-3000:]
    (before,) = [evaluation_scores(row) for row in begins.rows() if row.get("version") == 0 and evaluation_scores(row)]
    assert before == after, "the engine answers as the trained policy did"
    assert begins.steps()[-1]["training/global_step"] == 1


@pytest.mark.slow
def test_a_dpo_run_goes_through_its_pairs_twice_and_repeats_its_digests(launch, tmp_path):
    """The second pass reads what the reference gave in the first one, over a kill and a checkpoint between them."""
    rows = [json.loads(line) for line in (launch.input.folder / "train.jsonl").read_text().splitlines()][:48]
    pairs = tmp_path / "pairs.jsonl"
    shown = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["prompt"][:-1]} for row in rows]
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in shown))
    settings = ("learner.objective={dpo: {beta: 0.5}}", f"data.train={pairs}", "learner.lr=5e-4", "data.eval=null")
    settings += ("checkpoint.every_steps=2", "replay.journal_keep=all", "rollout.groups_per_step=16")
    run = launch(*settings, name="dpo", steps=8, split="1:2")
    run.wait_until((run.folder / "checkpoints" / "step_4" / "COMPLETE").exists, "a checkpoint of the second pass")
    run.kill("learner.train")
    assert run.wait() == 0, run.text()[-3000:]
    made: dict[int, set[str]] = {}
    for line in run.ledger():
        made.setdefault(line["step"], set()).add(line["digest"])
    assert {line["incarnation"] for line in run.ledger()} == {1, 2}
    assert sorted(made) == list(range(1, 9)) and all(len(digests) == 1 for digests in made.values())
    margins = [row["dpo/margin"] for row in run.steps()]
    assert abs(margins[0]) < 1e-5 and margins[-1] > 0.05 and run.nothing_left()
    played = launch.start(["learner.main", "--replay", str(run.folder), "--set", "tracking.plot=false"], run.folder)
    assert played.wait() == 0, played.text()[-3000:]
    assert json.loads(played.text().splitlines()[-1])["equal"] == 8
