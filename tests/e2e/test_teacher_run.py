"""A whole run that learns from teachers: one and replay killed, then played back without teacher or engine."""

import json

import pytest

from learner.record.summary import summarize
from replay.journal.reader import JournalReader
from replay.messages import Group
from tests.support.runs import Runs, untrained_input

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TEACHERS = {
    "even": {"path": "{}/model", "rows": {"half": 0}},
    "odd": {"path": "{}/other", "rows": {"half": 1}},
}


def test_a_run_with_two_teachers_survives_the_loss_of_one_and_plays_back(tmp_path, zygote):
    from examples.sort6 import build_model, save_tokenizer

    folder = tmp_path / "data"
    given = untrained_input(folder)
    build_model(1).save_pretrained(folder / "other")
    save_tokenizer(folder / "other")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "half": number % 2}) + "\n" for number, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(lines))
    teachers = json.dumps(TEACHERS).replace("{}", str(folder))
    settings = [f"teachers={teachers}", "algorithm.distillation={top_k: {k: 4}}", "replay.journal_keep=all"]
    runs = Runs(tmp_path, given, zygote)
    try:
        run = runs(*settings, steps=10)
        run.wait_for_step(3)
        run.kill("--teacher odd")
        run.wait_for_step(5)
        run.kill("replay.main")
        assert run.wait() == 0, run.text()[-3000:]
        found, steps = summarize(run.folder, None), run.steps()
        assert found["digests_equal"] and found["groups_trained_twice"] == 0, found
        for step in steps:
            assert step["distill/share/even"] + step["distill/share/odd"] == pytest.approx(1)
        groups = [record for record in JournalReader(run.folder / "journal").records() if record.kind == "group"]
        reader = JournalReader(run.folder / "journal")
        for record in groups:
            group = reader.read(record.location)
            assert isinstance(group, Group)
            assert set(group.teachers) == {["even@0", "odd@0"][group.index % 2]}
            assert group.teacher_ids.size == group.teacher_top.size == 4 * group.token_ids.size
        (folder / "other").rename(folder / "gone")
        again = runs.start(["learner.main", "--replay", str(run.folder)], tmp_path / "run-replay")
        assert again.wait() == 0 and '"equal": 10' in again.text(), again.text()[-3000:]
        assert not (tmp_path / "run-replay" / "logs" / "teacher-odd.log").exists()
    finally:
        runs.close()
