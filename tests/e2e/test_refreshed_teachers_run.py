"""A whole run whose teacher is an average over its own policies: killed in a refresh, then the learner; played back."""

import json
import re
import signal

import numpy as np
import pytest

from replay.journal import JournalReader
from tests.e2e.test_in_place import made, play

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EVERY, STEPS = 2, 30
TEACHER = json.dumps({"mean": {"of": "average", "every": EVERY, "decay": 0.5}})
SETTINGS = (
    f"teachers={TEACHER}",
    "algorithm.distillation=sampled_advantage",
    "checkpoint.every_steps=5",
    "replay.journal_keep=all",
)


def sent(run):
    """Versions of the teacher and their digests, in the order in which learners have published them."""
    return re.findall(r"teacher 'mean' is version (\d+), digest (\w+)", run.log("learner-0"))


def held(text):
    """The same as a process of the teacher has proven them."""
    return re.findall(r"scores with version (\d+), digest (\w+)", text)


@pytest.mark.slow
def test_every_refresh_is_proven_after_teachers_and_a_learner_were_killed(launch):
    """Of two processes of the teacher one dies in the middle of a refresh; the other is killed and started again."""
    run = launch(*SETTINGS, steps=STEPS, split="1:1")
    words = ["--config", str(run.folder / "config.yaml"), "--replay", run.replay_address(), "--teacher", "mean"]
    words = ["tests.e2e.faulty_teacher", "die", "2", *words, "--process-name", "mortal"]
    mortal = launch.start(words, run.folder)
    assert mortal.wait(200) == -signal.SIGKILL
    (torn,) = re.findall(r"planting die in v(\d+)", mortal.text())
    run.wait_until(lambda: re.search(rf"v{torn} .*'mortal'.*removed", run.log("learner-0")), "its death is named")
    run.wait_until(lambda: torn in dict(held(run.log("teacher-mean"))), "the other has that version")
    run.kill("rollout_server.teacher")
    run.wait_until((run.folder / "checkpoints" / "step_5" / "COMPLETE").exists, "a checkpoint")
    last = len(sent(run))
    run.wait_until(lambda: len(sent(run)) > last, "another refresh")
    run.kill("learner.train")
    assert run.wait(300) == 0, run.text()[-3000:]

    steps, published, proven = made(run), sent(run), held(run.log("teacher-mean"))
    assert sorted(steps) == list(range(1, STEPS + 1)) and any(len(each) > 1 for each in steps.values())
    assert all(each == each[:1] * len(each) for each in steps.values())
    digests = dict(published)
    assert set(digests.items()) == set(published) and len(published) > len(digests), "a resumed learner made them again"
    everywhere = {*proven, *held(mortal.text())}
    assert everywhere <= set(published)
    assert proven[-1] == published[-1] == (str(STEPS), digests[str(STEPS)])
    assert {int(version) % EVERY for version in digests} == {0} and len(set(digests.values())) == len(digests)
    rows = [row for row in run.rows() if "teacher/mean/version" in row]
    assert {str(row["teacher/mean/version"]) for row in rows} <= set(digests) and len(rows) > STEPS // EVERY - 4
    assert all(row["teacher/mean/digests_equal"] and row["teacher/mean/members"] == 1 for row in rows[-5:])

    reader = JournalReader(run.folder / "journal")
    groups = [reader.read(record.location) for record in reader.records() if record.kind == "group"]
    named = {name for group in groups for name in group.teachers}
    assert named <= {f"mean@{version}" for version, _ in everywhere} and len(named) > STEPS // EVERY - 4
    assert all(np.isfinite(group.teacher_logprobs).all() and group.teacher_logprobs.any() for group in groups)
    code, result = play(launch, run)
    assert (code, result["steps"], result["equal"]) == (0, STEPS, STEPS), "without teacher and engine"
    print(f"torn v{torn}; published {published}; proven {proven}; scored {sorted(named)}")
