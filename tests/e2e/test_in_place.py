"""Replay and the learner are killed in the middle of a run and go on in place; the journal makes the same weights."""

import json
import os
import re
import signal

import pytest

from configs import load
from replay.journal import JournalReader
from slipstream.launch import earlier_run
from slipstream.runtime.hang import registry
from tests.support.runs import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GUARD = "limits.kl=skip above 1e-9 for 2, lower_lag above 1e-9 for 2"
"""Of a step's first update at lag 1, and of its later ones at any lag: they are skipped from the second step on."""
SETTINGS = ("checkpoint.every_steps=5", "replay.journal_keep=all", "evaluation.every_steps=9", GUARD)
SETTINGS += ("learner.deterministic=true", "limits.skipped_steps=0")
SETTINGS += ("learner.minibatches=2", "learner.epochs=2")
STEPS = 12
FRAGILE = '''"""A loss that is NaN the fourth and the fifth time in a run."""

from pathlib import Path

from learner.losses import LossInputs, LossOutput

TIMES = Path(__file__).with_name("times")


def fragile(inputs: LossInputs) -> LossOutput:
    with TIMES.open("ab") as times:
        times.write(b".")
    factor = float("nan") if TIMES.stat().st_size in (4, 5) else -1.0
    return LossOutput(loss=factor * inputs.advantages * inputs.log_ratio().exp())
'''


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
    return played.wait(), json.loads(played.text().splitlines()[-1])


def test_killed_processes_go_on_in_place_and_the_journal_reproduces_every_digest(launch, tmp_path, capsys):
    """Over two nodes: a rank of the other node, and replay, whose journal is on another disk than the run folder."""
    # a fixed port of the weight bus, as in every preset for several nodes: the next learner takes the same one
    fixed = (f"replay.journal_dir={tmp_path}", f"weight_bus.port={free_port()}")
    run, (other, servers) = launch.over_two_nodes(*SETTINGS, *fixed, steps=STEPS)
    run.wait_for_step(6)
    run.wait_until((run.folder / "checkpoints" / "step_5" / "COMPLETE").exists, "a checkpoint")
    noted = registry.member(run.folder, "learner-1")
    os.kill(noted.pid, signal.SIGKILL)
    run.wait_until(lambda: run.ledger()[-1]["incarnation"] == 2, "the learner to go on")
    run.kill("replay.main")
    assert run.wait() == 0, run.text()[-3000:]
    assert (other.wait(), servers.wait()) == (0, 0), other.text()[-3000:]
    text = run.text()
    killed = f"learner rank 1 (pid {noted.pid}) was killed by SIGKILL [closed]"
    assert f"{killed}; restart 1 of 3 from its newest checkpoint" in text
    assert "the learner starts again: ends ranks 1. start" in other.text()
    assert re.search(r"replay \(pid \d+\) died: killed by SIGKILL.*; restart 1 of 3 in place, from its journal", text)
    assert "rollout-node0-0 (pid" not in servers.text(), "the rollout server stays up through both"
    assert "incarnation 2 starts at version" in run.log("replay")
    steps = made(run)
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert any(len(each) > 1 for each in steps.values()), "steps after the checkpoint are made again"
    assert all(each == each[:1] * len(each) for each in steps.values()), "with the same groups and the same weights"
    groups = [tuple(group) for each in steps.values() for group in each[-1][1]]
    assert len(groups) == len(set(groups)), "none is trained twice"
    assert [row["step"] for row in run.steps()] == list(range(1, STEPS + 1))

    rows = run.steps()
    assert any(not row["training/update_applied"] for row in rows), "kills and playback repeat what guards skip"
    applied = [row["actor/updates"] for row in rows if row["training/update_applied"]]
    assert applied[0] == 4, "mini-batches times epochs"
    assert set(applied) == {1, 4}, "from then on the first of a step at lag 0 alone, whose policy has sampled"
    assert "guard: step 2: for 2 steps in a row (limits.kl) actor/ppo_kl_k3 is" in text
    assert run.log("replay").count("replay: the lag is 0 at most, it was 1") == 1
    assert rows[-1]["training/off_policy/trajectory_staleness/max"] == 0 and rows[-1]["guards/kl"] >= 1
    assert "deterministic kernels: on" in run.log("learner-1")

    assert (run.folder / "journal").readlink().parent == tmp_path
    here = ("placement.learner=null", "placement.rollout=null", "placement.split=1:2")
    code, result = play(launch, run, *(word for each in here for word in ("--set", each)))
    assert (code, result["steps"], result["equal"]) == (0, STEPS, STEPS)
    assert result["last_digest"] == steps[STEPS][-1][0]
    played = run.folder.with_name(f"{run.folder.name}-replay")
    lines = (played / "ledger.jsonl").read_text().splitlines()
    lines[6] = json.dumps(json.loads(lines[6]) | {"digest": "other"})
    (played / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    assert earlier_run.report(load(played / "config.yaml"), 0) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["equal"], result["first_different"]) == (STEPS - 1, 7), "a digest that differs is told"


def test_a_broken_stretch_is_rolled_back_and_its_groups_are_not_trained(launch, tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    run = launch(
        f"algorithm.loss={tmp_path}/fragile.py:fragile", "algorithm.i_know_this_is_biased=true",
        "limits.nonfinite=roll_back above 0 for 2", "checkpoint.every_steps=1", "replay.journal_keep=all", steps=9,
    )  # fmt: skip
    assert run.wait() == 0, run.text()[-3000:]
    text = run.text()
    assert (
        "(limits.nonfinite) a loss or gradient that is not finite: the update is not applied, and the run rolls" in text
    )
    assert "1 of 2); restart 1 of 3 from its newest checkpoint" in text
    (diverged,) = [
        record.fields for record in JournalReader(run.folder / "journal").records() if record.kind == "diverged"
    ]
    assert diverged["expected"] == diverged["found"] and len(diverged["dropped"]) == 2 * 16
    good = diverged["step"]
    assert run.log("replay").count(f"replay: the learner rolls back to version {good}: ") == 1

    lines = run.ledger()
    again = [line for line in lines if line["incarnation"] == 2]
    assert [line["step"] for line in again] == list(range(good + 1, 9 + 1))
    surviving = [line for line in lines if line["incarnation"] == 1 and line["step"] <= good] + again
    trained = [tuple(group) for line in surviving for group in line["groups"]]
    assert len(trained) == len(set(trained)) == 9 * 16
    assert not set(trained) & {tuple(group) for group in diverged["dropped"]}
    rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, 9 + 1)) and all(r["training/update_applied"] for r in rows)
    assert rows[-1]["guards/roll_backs"] == 1 and "guards/nonfinite" not in rows[-1]
    noted = json.loads((run.folder / "checkpoints" / "roll_back.json").read_text())
    assert (noted["count"], noted["first_bad"]) == (1, 0)
