"""Replay and the learner are killed in the middle of a run and go on in place; the journal makes the same weights."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SETTINGS = ("checkpoint.every_steps=3", "replay.journal_keep=all", "evaluation.every_steps=10")


def made(run):
    """What each step was, each time that it was made: {step: [(digest, groups), ...]}."""
    found = {}
    for line in run.ledger():
        found.setdefault(line["step"], []).append((line["digest"], line["groups"]))
    return found


def test_killed_processes_go_on_in_place_and_the_journal_reproduces_every_digest(launch):
    run = launch(*SETTINGS, steps=20)
    run.wait_for_step(8)
    os.kill(run.pids("learner.train")[-1], signal.SIGKILL)
    run.wait_until(lambda: len(run.ledger()) > 8 and max(made(run)) >= 11, "the learner to go on", 120)
    os.kill(run.pids("replay.main")[0], signal.SIGKILL)
    assert run.wait(200) == 0, run.text()[-3000:]
    text = run.text()
    assert re.search(
        r"learner rank \d \(pid \d+\) was killed by SIGKILL \[closed\]; restart 1 of 3 from its newest checkpoint", text
    )
    assert re.search(r"replay \(pid \d+\) died: killed by SIGKILL.*; restart 1 of 3 in place, from its journal", text)
    assert "rollout-0 (pid" not in text, "the rollout server stays up through both"
    steps = made(run)
    assert sorted(steps) == list(range(1, 21))
    assert any(len(each) > 1 for each in steps.values()), "steps after the checkpoint are made again"
    assert all(each == each[:1] * len(each) for each in steps.values()), "with the same groups and the same weights"
    groups = [tuple(group) for each in steps.values() for group in each[-1][1]]
    assert len(groups) == len(set(groups)), "none is trained twice"
    assert [row["step"] for row in run.steps()] == list(range(1, 21))

    played = subprocess.run(
        [sys.executable, "-m", "learner.main", "--replay", str(run.folder), "--set", "tracking.plot=false"],
        capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert played.returncode == 0, played.stderr[-2000:]
    result = json.loads(played.stdout.splitlines()[-1])
    assert (result["steps"], result["equal"]) == (20, 20)
    assert result["last_digest"] == steps[20][-1][0]


def test_a_playback_that_differs_says_which_step(launch):
    run = launch(*SETTINGS, steps=4)
    assert run.wait() == 0, run.text()[-3000:]
    played = subprocess.run(
        [sys.executable, "-m", "learner.main", "--replay", str(run.folder), "--set", "learner.lr=0.0001"],
        capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert played.returncode == 1
    result = json.loads(played.stdout.splitlines()[-1])
    assert (result["steps"], result["equal"], result["first_different"]) == (4, 0, 1)
    missing = subprocess.run(
        [sys.executable, "-m", "learner.main", "--replay", str(run.folder.parent)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert missing.returncode == 2 and "config.yaml is missing" in missing.stderr
