"""Each rule of the checker, with a journal that breaks it; journals are written by the tests (written_journal.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from written_journal import Journal, a_run, groups_of, record, wire_message

from scripts.chaos.checker import check
from scripts.chaos.checker.journal import Tail, read

ROOT = Path(__file__).parents[2]


def checked(journal, tmp_path):
    return check(journal.write(tmp_path / "run"))


def wrong(journal, tmp_path):
    return checked(journal, tmp_path).as_json()["wrong"]


def position(journal, kind, nth=0):
    """(file, index) of the nth record of a kind."""
    found = [(f, i) for f, records in enumerate(journal.files) for i, r in enumerate(records) if r[0] == kind]
    return found[nth]


def change(journal, kind, nth=0, **fields):
    f, i = position(journal, kind, nth)
    old = journal.files[f][i]
    journal.files[f][i] = (old[0], {**old[1], **fields}, old[2])


def remove(journal, kind, nth=0):
    f, i = position(journal, kind, nth)
    del journal.files[f][i]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_in_order(tmp_path, resumed):
    report = checked(a_run(resumed=resumed), tmp_path)
    assert report.in_order, report.as_json()
    assert (report.acked, report.trained, report.buffered) == (9, 8, 1)
    assert report.repeated_steps == (2 if resumed else 0)


def test_a_torn_end_of_the_last_file_is_no_damage(tmp_path):
    journal = a_run()
    journal.tail = record("take", 999, {"step": 5})[:-3]
    assert checked(journal, tmp_path).in_order


def test_a_torn_end_of_another_file_is_damage(tmp_path):
    folder = a_run().write(tmp_path / "run")
    with (folder / "journal" / "000001.seg").open("ab") as file:
        file.write(b"SJR1\0\0")
    assert "records follow" in check(folder).violations[0]


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_flipped_byte_before_the_end_is_damage(tmp_path, place):
    folder = a_run().write(tmp_path / "run")
    path = folder / "journal" / "000002.seg"
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    assert "records follow" in check(folder).violations[0]


def test_an_acked_group_that_is_not_in_the_journal_is_lost(tmp_path):
    journal = a_run()
    journal.ack((0, 55))
    report = checked(journal, tmp_path)
    assert report.lost == ["group [0, 55] attempt 1 was acked and is not in the journal"]
    assert not report.violations


def test_producers_that_record_no_ack_are_not_in_order(tmp_path):
    folder = a_run().write(tmp_path / "run")
    (report,) = check(folder, acks=[]).violations
    assert "no producer has recorded an ack" in report


def test_another_attempt_than_the_acked_one_is_not_the_group(tmp_path):
    journal = a_run()
    journal.ack((0, 99), attempt=2)
    assert "attempt 2 was acked" in checked(journal, tmp_path).lost[0]


def test_groups_that_were_not_kept_need_no_record(tmp_path):
    journal = a_run()
    journal.ack((0, 56), status="superseded")
    journal.ack((0, 57), status="rejected")
    assert checked(journal, tmp_path).in_order


def test_a_group_that_is_leased_again_after_its_ack_was_lost(tmp_path):
    journal = a_run()
    journal.lease((0, 99), attempt=2)
    assert "[0, 99] was leased again" in checked(journal, tmp_path).lost[0]


def test_an_accepted_group_that_is_passed_over_is_lost(tmp_path):
    journal = a_run()
    f, i = position(journal, "lease", 2)
    journal.files[f][i:i] = [
        ("lease", {"group": [0, 88], "attempt": 1, "min_version": 0, "server": "rollout-0"}, ()),
        ("group", {"group": [0, 88], "attempt": 1, "server": "rollout-0"}, wire_message(1)),
    ]
    report = checked(journal, tmp_path)
    assert len(report.lost) == 1 and "[0, 88] was accepted at version 1, must be trained by step 3" in report.lost[0]


def test_a_group_in_two_steps_is_trained_twice(tmp_path):
    journal = a_run(resumed=False)
    change(journal, "take", 2, groups=[list(groups_of(2)[0]), list(groups_of(3)[1])])
    report = checked(journal, tmp_path)
    assert report.trained_twice == ["group [0, 4] is in 2 steps"]


def test_repeated_steps_of_a_dead_incarnation_are_not_trained_twice(tmp_path):
    report = checked(a_run(resumed=True), tmp_path)
    assert not report.trained_twice and report.trained == 8


def test_a_dropped_group_that_is_trained(tmp_path):
    journal = a_run()
    journal.add("drop", group=[0, 4], reason="poison")
    assert "group [0, 4] was dropped (poison) and is trained" in wrong(journal, tmp_path)


def test_a_group_that_is_dropped_twice(tmp_path):
    journal = a_run()
    journal.add("drop", group=[0, 99], reason="poison")
    journal.add("drop", group=[0, 99], reason="too_slow")
    report = checked(journal, tmp_path)
    assert dict(report.dropped) == {"poison": 1} and "dropped 2 times" in report.violations[0]


def test_drops_are_counted_by_reason(tmp_path):
    journal = a_run()
    journal.add("drop", group=[0, 99], reason="poison")
    report = checked(journal, tmp_path)
    assert report.in_order and dict(report.dropped) == {"poison": 1} and report.buffered == 0


def test_a_stale_group_is_leased_once_more(tmp_path):
    journal = a_run()
    journal.on_stale = "drop"
    journal.add("stale", group=[0, 99], min_version=4)
    report = checked(journal, tmp_path)
    assert report.in_order and (report.buffered, report.leased_again) == (0, 1)


@pytest.mark.parametrize("on_stale", ["wait", "mask"])
def test_a_stale_group_where_none_is_leased_again(tmp_path, on_stale):
    journal = a_run()
    journal.on_stale = on_stale
    journal.add("stale", group=[0, 99], min_version=4)
    assert f"on_stale is {on_stale}" in wrong(journal, tmp_path)[0]


def test_a_stale_group_that_was_not_there(tmp_path):
    journal = a_run()
    journal.on_stale = "drop"
    journal.add("stale", group=[0, 98], min_version=4)
    assert "group [0, 98] is not in the buffer" in wrong(journal, tmp_path)[0]


def test_a_token_above_the_lag_bound(tmp_path):
    journal = a_run()
    f, i = position(journal, "group", 4)
    journal.files[f][i] = (*journal.files[f][i][:2], wire_message((2, 2, 0)))
    assert any("lag 2 of group [0, 6] is above 1" in line for line in wrong(journal, tmp_path))


def test_a_token_outside_the_loss_may_be_old(tmp_path):
    journal = a_run()
    f, i = position(journal, "group", 4)
    journal.files[f][i] = (*journal.files[f][i][:2], wire_message((2, 2, 0), mask=(1, 1, 0)))
    assert checked(journal, tmp_path).in_order


def test_under_mask_the_learners_own_count_is_what_tells(tmp_path):
    journal = a_run()
    journal.on_stale = "mask"
    f, i = position(journal, "group", 4)
    journal.files[f][i] = (*journal.files[f][i][:2], wire_message((2, 2, 0)))
    assert checked(journal, tmp_path).in_order
    journal.metrics[-1]["training/lag_histogram"]["2"] = 3
    assert "trained tokens of lag 2" in check(journal.write(tmp_path / "other")).violations[0]


def test_a_token_of_a_version_that_was_not_there(tmp_path):
    journal = a_run()
    f, i = position(journal, "group", 2)
    journal.files[f][i] = (*journal.files[f][i][:2], wire_message(2))
    assert any("tokens of version 2 in step 2" in line for line in wrong(journal, tmp_path))


def test_another_digest_of_a_repeated_step(tmp_path):
    journal = a_run()
    change(journal, "commit", 3, digest="another")
    journal.ledger[3]["digest"] = "another"
    assert any("digest another, digest-2 when it was first done" in line for line in wrong(journal, tmp_path))


def test_a_divergence_is_wrong_where_nothing_changed_and_its_groups_are_not_lost(tmp_path):
    journal = a_run()
    journal.add("diverged", step=4, incarnation=2, expected="a", found="b", superseded=[[0, 99]])
    journal.lease((0, 99), attempt=2)
    report = checked(journal, tmp_path)
    assert len(report.violations) == 1 and "step 4 diverged" in report.violations[0]
    assert not report.lost and report.leased_again == 1


def test_steps_after_a_divergence_are_new_ones(tmp_path):
    journal = a_run()
    f, i = position(journal, "take", 4)  # step 3 of the second incarnation
    groups = [list(group) for group in groups_of(3)]
    journal.files[f].insert(
        i, ("diverged", {"step": 2, "incarnation": 2, "expected": "a", "found": "b", "superseded": []}, ())
    )
    change(journal, "take", 4, groups=groups[::-1])
    change(journal, "commit", 4, again=False)
    journal.ledger[4]["groups"] = groups[::-1]
    report = checked(journal, tmp_path)
    assert len(report.violations) == 1 and "step 2 diverged" in report.violations[0], report.as_json()


@pytest.mark.parametrize("groups", [[[0, 5], [0, 4]], [[0, 4], [0, 6]]])
def test_a_repeated_step_with_other_groups_or_another_order(tmp_path, groups):
    journal = a_run()
    change(journal, "take", 3, groups=groups)
    assert any("step 2 is taken again with other groups" in line for line in wrong(journal, tmp_path))


def test_a_step_that_was_taken_and_not_committed_is_taken_again_as_it_was(tmp_path):
    journal = Journal()
    journal.learner(1, 0)
    for group in (*groups_of(1), *groups_of(2)):
        journal.lease(group)
        journal.group(group, 0)
    journal.add("take", step=1, incarnation=1, groups=[list(g) for g in groups_of(1)])
    journal.learner(2, 0)
    journal.step(1, 2, groups_of(2))
    assert any("step 1 is taken again with other groups" in line for line in wrong(journal, tmp_path))


@pytest.mark.parametrize("again", [True, False])
def test_the_mark_of_a_repeated_step(tmp_path, again):
    journal = a_run()
    change(journal, "commit", 0 if again else 3, again=again)
    assert any(f"says again {again}" in line for line in wrong(journal, tmp_path))


@pytest.mark.parametrize(
    ("kind", "nth", "fields", "words"),
    [
        ("take", 1, {"step": 7}, "takes step 7 after version 1"),
        ("commit", 1, {"step": 7}, "commits step 7, which was not taken"),
        ("commit", 3, {"incarnation": 1}, "by incarnation 1, 2 is the newest"),
        ("commit", 1, {"step": 1}, "commits step 1, which was not taken after version 1"),
        ("learner", 1, {"incarnation": 1}, "incarnation 1 after 1"),
        ("learner", 1, {"version": 9}, "starts at version 9, version 3 is the last committed"),
        ("take", 1, {"groups": [[0, 4], [0, 77]]}, "group [0, 77] was never accepted"),
        ("take", 1, {"groups": [[0, 4]]}, "1 groups, 2 make a step"),
        ("group", 1, {"group": [0, 2]}, "group [0, 2] is accepted twice"),
        ("segment", 1, {"number": 5}, "is file 5, 2 was expected"),
    ],
)
def test_a_record_that_does_not_fit(tmp_path, kind, nth, fields, words):
    journal = a_run()
    change(journal, kind, nth, **fields)
    assert any(words in line for line in wrong(journal, tmp_path)), wrong(journal, tmp_path / "again")


def test_a_file_without_its_first_record(tmp_path):
    journal = a_run()
    remove(journal, "segment", 1)
    assert "begins with it instead of with its segment record" in wrong(journal, tmp_path)[0]


def test_a_file_that_is_missing(tmp_path):
    folder = a_run().write(tmp_path / "run")
    (folder / "journal" / "000001.seg").unlink()
    assert "follows record 0" in check(folder).violations[0]


def test_a_lease_after_a_drop(tmp_path):
    journal = a_run()
    journal.add("drop", group=[0, 99], reason="poison")
    journal.lease((0, 99), attempt=3)
    assert any("leased after it was dropped" in line for line in wrong(journal, tmp_path))


@pytest.mark.parametrize(
    ("change_of", "words"),
    [
        (lambda lines: lines.pop(3), "step 2 of incarnation 2 is missing"),
        (lambda lines: lines[0].update(groups=[[0, 3], [0, 2]]), "has other groups than the journal's take"),
        (lambda lines: lines[0].update(digest="another"), "has another digest than the journal's commit"),
        (lambda lines: lines[0].update(incarnation=2), "is missing"),
    ],
)
def test_the_ledger_and_the_journal_must_agree(tmp_path, change_of, words):
    journal = a_run()
    change_of(journal.ledger)
    assert any(line.startswith("ledger") and words in line for line in wrong(journal, tmp_path))


def test_a_torn_ledger_line_of_a_killed_learner_is_passed_over(tmp_path):
    folder = a_run().write(tmp_path / "run")
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"step": 5, "inc')
    assert check(folder).in_order


def test_the_command_line_prints_one_line_and_tells_by_its_exit_code(tmp_path):
    folder = a_run().write(tmp_path / "run")
    command = [sys.executable, "-m", "scripts.chaos.checker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["lost"] == 0
    with (folder / "logs" / "acks-rollout-1.jsonl").open("w") as file:
        file.write(json.dumps({"event": "ack", "group": [0, 55], "attempt": 1, "status": "accepted"}) + "\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and json.loads(done.stdout)["lost"] == 1


def test_the_checker_shares_no_code_with_what_it_checks():
    program = (
        "import sys, scripts.chaos.checker;"
        "ours = {name.split('.')[0] for name in sys.modules} & {'replay', 'learner', 'weight_bus', 'rollout_server'};"
        "assert not ours, ours"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_tail_yields_records_once_they_are_whole(tmp_path):
    folder = a_run().write(tmp_path / "run") / "journal"
    whole, _ = read(folder)
    data = (folder / "000002.seg").read_bytes()
    (folder / "000002.seg").write_bytes(data[:-5])
    tail = Tail(folder)
    first = list(tail.poll())
    assert len(first) == len(whole) - 1
    (folder / "000002.seg").write_bytes(data[:-5] + b"??")  # half a record that replay then cuts
    assert list(tail.poll()) == []
    (folder / "000002.seg").write_bytes(data)
    assert [r.number for r in tail.poll()] == [len(whole)]
    assert list(tail.poll()) == []
