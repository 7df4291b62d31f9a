"""Replay and the learner are killed in the middle of a run and go on in place; the journal makes the same weights."""

import json
import re

import pytest

from tests.support.runs import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SETTINGS = ("checkpoint.every_steps=3", "replay.journal_keep=all", "evaluation.every_steps=9")
STEPS = 10


def made(run):
    """What each step was, each time that it was made: {step: [(digest, groups), ...]}."""
    found = {}
    for line in run.ledger():
        found.setdefault(line["step"], []).append((line["digest"], line["groups"]))
    return found


def play(launch, run, *arguments):
    """Exit code and last line of a playback of the run's journal."""
    words = ["--replay", str(run.folder), "--set", "tracking.plot=false", *arguments]
    played = launch.start(["learner.main", *words], run.folder)
    return played.wait(200), json.loads(played.text().splitlines()[-1])


def test_killed_processes_go_on_in_place_and_the_journal_reproduces_every_digest(launch):
    # a fixed port of the weight bus, as in every preset for several nodes: the next learner takes the same one
    run = launch(*SETTINGS, f"weight_bus.port={free_port()}", steps=STEPS, split="1:2")
    run.wait_for_step(4)
    run.kill("learner.train")
    run.wait_until(lambda: len(run.ledger()) > 4 and max(made(run)) >= 6, "the learner to go on", 120)
    run.kill("replay.main")
    assert run.wait(200) == 0, run.text()[-3000:]
    text = run.text()
    assert re.search(
        r"learner rank \d \(pid \d+\) was killed by SIGKILL \[closed\]; restart 1 of 3 from its newest checkpoint", text
    )
    assert re.search(r"replay \(pid \d+\) died: killed by SIGKILL.*; restart 1 of 3 in place, from its journal", text)
    assert "rollout-0 (pid" not in text, "the rollout server stays up through both"
    assert "incarnation 2 starts at version" in run.log("replay")
    steps = made(run)
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert any(len(each) > 1 for each in steps.values()), "steps after the checkpoint are made again"
    assert all(each == each[:1] * len(each) for each in steps.values()), "with the same groups and the same weights"
    groups = [tuple(group) for each in steps.values() for group in each[-1][1]]
    assert len(groups) == len(set(groups)), "none is trained twice"
    assert [row["step"] for row in run.steps()] == list(range(1, STEPS + 1))

    code, result = play(launch, run)
    assert (code, result["steps"], result["equal"]) == (0, STEPS, STEPS)
    assert result["last_digest"] == steps[STEPS][-1][0]
    code, result = play(launch, run, "--set", "learner.lr=0.0001")
    assert (code, result["steps"], result["equal"], result["first_different"]) == (1, STEPS, 0, 1)


def test_a_folder_that_is_no_run_cannot_be_played(launch, tmp_path):
    missing = launch.start(["learner.main", "--replay", str(tmp_path)], tmp_path / "none")
    assert missing.wait(100) == 2 and "config.yaml is missing" in missing.text()
