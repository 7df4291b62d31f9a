"""The checker on journals that tests write: what is in order, what is damage. Rules that are broken: test_planted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.chaos.checker import check
from scripts.chaos.checker.journal import Tail, read
from tests.chaos.written_journal import Journal, a_run, boots, groups_of, record, wire_message

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_in_order(tmp_path, resumed):
    report = check(a_run(resumed=resumed).write(tmp_path / "run"))
    assert report.in_order, report.as_json()
    assert (report.acked, report.trained, report.buffered) == (9, 8, 1)
    assert report.repeated_steps == (2 if resumed else 0)


def leased_once_more(journal):
    journal.on_stale = "drop"
    journal.add("stale", group=[0, 99], min_version=4)


def above_the_bound_under_mask(journal):
    journal.on_stale = "mask"
    journal.edit("group", 4, wire_message((2, 2, 0)))


def a_lower_bound_at_the_resume(journal):
    boots(journal, 2)
    boots(journal, 1, where=1)
    journal.edit("group", 4, wire_message(0))
    journal.metrics[3]["training/lag_histogram"]["2"] = 1


def a_lease_that_is_older_than_a_lower_bound(journal):
    journal.edit("lease", 4, async_lag=1)
    records, i = journal.at("take", 2)
    records.insert(i, ("lag", {"step": 2, "async_lag": 0, "configured": 1}, ()))
    journal.edit("group", 4, wire_message(1))
    for step in (1, 2, 3):
        journal.edit("take", step, async_lag=1)
    journal.edit("take", 5, async_lag=0)
    del journal.metrics[-1]["training/lag_histogram"]["1"]


def masked_at_the_first_start_alone(journal):
    boots(journal, 1, on_stale="mask")
    boots(journal, 1, where=1, on_stale="wait")
    journal.edit("group", 4, wire_message(0))
    for step in range(5):
        journal.edit("take", step, masked=True)


ALLOWED = {
    "a bound that a resume has lowered": (a_lower_bound_at_the_resume, {}),
    "a bound that a guard has lowered": (a_lease_that_is_older_than_a_lower_bound, {}),
    "masks that a resume takes away": (masked_at_the_first_start_alone, {}),
    "a group that was superseded": (lambda j: j.ack((0, 56), status="superseded"), {"acked": 9}),
    "a group that was rejected": (lambda j: j.ack((0, 57), status="rejected"), {"acked": 9}),
    "a drop, counted by its reason": (
        lambda j: j.add("drop", group=[0, 99], reason="poison"),
        {"dropped": {"poison": 1}, "buffered": 0},
    ),
    "a stale group, leased once more": (leased_once_more, {"buffered": 0, "leased_again": 1}),
    "an old token outside the loss": (lambda j: j.edit("group", 4, wire_message((2, 2, 0), mask=(1, 1, 0))), {}),
    "an old token under mask, where the learner's own count tells": (above_the_bound_under_mask, {}),
    "a torn end of the last file": (lambda j: setattr(j, "tail", record("take", 999, {"step": 5})[:-3]), {}),
}


@pytest.mark.parametrize(("change", "expected"), ALLOWED.values(), ids=ALLOWED)
def test_what_may_be(tmp_path, change, expected):
    journal = a_run()
    change(journal)
    report = check(journal.write(tmp_path / "run"))
    assert report.in_order, report.as_json()
    assert {key: getattr(report, key) for key in expected} == expected


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8, "torn", "missing"])
def test_bytes_that_are_no_record_before_the_end_are_damage(tmp_path, place):
    folder = a_run().write(tmp_path / "run")
    first, second = sorted((folder / "journal").iterdir())
    if place == "missing":
        first.unlink()
    elif place == "torn":
        first.write_bytes(first.read_bytes() + b"SJR1\0\0")
    else:
        data = bytearray(second.read_bytes())
        data[int(len(data) * place)] ^= 1
        second.write_bytes(data)
    assert ("follows record 0" if place == "missing" else "records follow") in check(folder).violations[0]


def test_producers_that_record_no_ack_are_not_in_order(tmp_path):
    (report,) = check(a_run().write(tmp_path / "run"), acks=[]).violations
    assert "no producer has recorded an ack" in report


def diverged(step, **more):
    return {"step": step, "incarnation": 2, "expected": "a", "found": "b", "superseded": [], **more}


def test_groups_of_a_divergence_are_not_lost(tmp_path):
    journal = a_run()
    journal.add("diverged", **diverged(4, superseded=[[0, 99]]))
    journal.lease((0, 99), attempt=2)
    report = check(journal.write(tmp_path / "run"))
    assert len(report.violations) == 1 and "step 4 diverged" in report.violations[0]
    assert not report.lost and report.leased_again == 1


def test_steps_after_a_divergence_are_new_ones(tmp_path):
    journal = a_run()
    records, i = journal.at("take", 4)  # step 3 of the second incarnation
    groups = [list(group) for group in groups_of(3)][::-1]
    records.insert(i, ("diverged", diverged(2), ()))
    journal.edit("take", 4, groups=groups)
    journal.edit("commit", 4, again=False)
    journal.ledger[4]["groups"] = groups
    report = check(journal.write(tmp_path / "run"))
    assert len(report.violations) == 1 and "step 2 diverged" in report.violations[0], report.as_json()


def test_a_step_that_was_taken_and_not_committed_is_taken_again_as_it_was(tmp_path):
    journal = Journal()
    journal.learner(1, 0)
    for group in (*groups_of(1), *groups_of(2)):
        journal.lease(group)
        journal.group(group, 0)
    journal.add("take", step=1, incarnation=1, groups=[list(g) for g in groups_of(1)])
    journal.learner(2, 0)
    journal.step(1, 2, groups_of(2))
    wrong = check(journal.write(tmp_path / "run")).as_json()["wrong"]
    assert any("step 1 is taken again with other groups" in line for line in wrong)


def test_a_torn_ledger_line_of_a_killed_learner_is_passed_over(tmp_path):
    folder = a_run().write(tmp_path / "run")
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"step": 5, "inc')
    assert check(folder).in_order


@pytest.mark.parametrize("lost", [0, 1])
def test_the_command_tells_what_is_wrong_and_shares_no_code_with_what_it_checks(tmp_path, lost):
    program = (
        "import sys; from scripts.chaos.checker.__main__ import main; code = main();"
        "ours = {name.split('.')[0] for name in sys.modules} & {'replay', 'learner', 'weight_bus', 'rollout_server'};"
        "sys.exit(str(ours) if ours else code)"
    )
    journal = a_run()
    for group in [(0, 55)] * lost:
        journal.ack(group)
    command = [sys.executable, "-c", program, str(journal.write(tmp_path / "run"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr, json.loads(done.stdout)["lost"]) == (lost, "", lost)


def test_a_tail_yields_records_once_they_are_whole(tmp_path):
    folder = a_run().write(tmp_path / "run") / "journal"
    whole, _ = read(folder)
    data = (folder / "000002.seg").read_bytes()
    (folder / "000002.seg").write_bytes(data[:-5])
    tail = Tail(folder)
    assert len(list(tail.poll())) == len(whole) - 1
    (folder / "000002.seg").write_bytes(data[:-5] + b"??")  # half a record that replay then cuts
    assert list(tail.poll()) == []
    (folder / "000002.seg").write_bytes(data)
    assert [r.number for r in tail.poll()] == [len(whole)]
    assert list(tail.poll()) == []
