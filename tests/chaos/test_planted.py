"""Faults of the product, planted in what it leaves behind, in its code in memory, or in a copy of its source."""

import shutil
from pathlib import Path

import pytest

from scripts.chaos import checker
from tests.chaos.written_journal import a_run, boots, groups_of, wire_message
from tests.support.campaigns import run_campaign

ROOT = Path(__file__).parents[2]


def pass_over(journal):
    records, i = journal.at("lease", 2)
    lease = {"group": [0, 88], "attempt": 1, "min_version": 0, "server": "rollout-0"}
    group = {"group": [0, 88], "attempt": 1, "server": "rollout-0"}
    records[i:i] = [("lease", lease, ()), ("group", group, wire_message(1))]


def drop(journal, *reasons, group=(0, 99)):
    for reason in reasons or ("poison",):
        journal.add("drop", group=list(group), reason=reason)


def stale(journal, on_stale, group=(0, 99)):
    journal.on_stale = on_stale
    journal.add("stale", group=list(group), min_version=4)


def masked_above_the_bound(journal):
    journal.on_stale = "mask"
    journal.metrics[-1]["training/lag_histogram"]["2"] = 3


def lease_after_a_drop(journal):
    drop(journal)
    journal.lease((0, 99), attempt=3)


def a_higher_bound_at_the_resume(journal):
    boots(journal, 0)
    boots(journal, 1, where=1)
    journal.edit("group", 2, wire_message(0))


def a_lease_above_a_lowered_bound(journal):
    journal.add("lag", step=4, async_lag=0, configured=1)
    journal.add("lease", group=[0, 98], attempt=1, min_version=4, server="rollout-0", async_lag=1)


TWICE = [list(groups_of(1)[0]), list(groups_of(4)[1])]
LOST = {
    "an acked group is not journalled": (lambda j: j.ack((0, 55)), "[0, 55] attempt 1 was acked and is not in the"),
    "another attempt is journalled": (lambda j: j.ack((0, 99), attempt=2), "attempt 2 was acked"),
    "an acked group is leased again": (lambda j: j.lease((0, 99), attempt=2), "[0, 99] was leased again"),
    "an accepted group is passed over": (pass_over, "[0, 88] was accepted at version 1, must be trained by step 3"),
}
TRAINED_TWICE = {"a group is trained in two steps": (lambda j: j.edit("take", 5, groups=TWICE), "[0, 2] is in 2 steps")}
VIOLATIONS = {
    "a dropped group is trained": (lambda j: drop(j, group=(0, 4)), "[0, 4] was dropped (poison) and is trained"),
    "a group is dropped twice": (lambda j: drop(j, "poison", "too_slow"), "dropped 2 times"),
    "a dropped group is leased": (lease_after_a_drop, "leased after it was dropped"),
    "a stale group under wait": (lambda j: stale(j, "wait"), "on_stale is wait"),
    "a stale group under mask": (lambda j: stale(j, "mask"), "on_stale is mask"),
    "a stale group was not there": (lambda j: stale(j, "drop", (0, 98)), "[0, 98] is not in the buffer"),
    "a token is too old": (lambda j: j.edit("group", 4, wire_message((2, 2, 0))), "lag 2 of group [0, 6] is above 1"),
    "a token is older than its start allowed": (a_higher_bound_at_the_resume, "lag 1 of group [0, 4] is above 0"),
    "a start's bound is not the configured one": (lambda j: boots(j, 0), "trained tokens of lag 1"),
    "a guard's bound is passed over": (a_lease_above_a_lowered_bound, "[0, 98] with lag 1, the bound is 0"),
    "a guard raises the bound": (lambda j: j.add("lag", async_lag=2), "makes the bound of the lag 2, it is 1"),
    "a batch has a bound of its own": (lambda j: j.edit("take", 1, async_lag=3), "step 2 under a lag of 3"),
    "a batch is masked under wait": (lambda j: j.edit("take", 1, masked=True), "masked True, and on_stale is wait"),
    "a token is of a version to come": (lambda j: j.edit("group", 2, wire_message(2)), "tokens of version 2 in step 2"),
    "masking leaves an old token in": (masked_above_the_bound, "trained tokens of lag 2"),
    "a repeated step has other weights": (lambda j: j.edit("commit", 3, digest="other"), "digest-2 when it was first"),
    "a repeated step has other groups": (lambda j: j.edit("take", 3, groups=[[0, 4], [0, 6]]), "step 2 is taken again"),
    "a repeated step has another order": (lambda j: j.edit("take", 3, groups=[[0, 5], [0, 4]]), "is taken again with"),
    "a new step is marked as repeated": (lambda j: j.edit("commit", 0, again=True), "says again True"),
    "a repeated step is marked as new": (lambda j: j.edit("commit", 3, again=False), "says again False"),
    "a resumed learner skips ahead": (lambda j: j.edit("learner", 1, version=9), "version 3 is the last committed"),
    "an incarnation comes twice": (lambda j: j.edit("learner", 1, incarnation=1), "incarnation 1 after 1"),
    "a take skips ahead": (lambda j: j.edit("take", 1, step=7), "takes step 7 after version 1"),
    "a take of nobody's group": (lambda j: j.edit("take", 1, groups=[[0, 4], [0, 77]]), "[0, 77] was never accepted"),
    "a take is too small": (lambda j: j.edit("take", 1, groups=[[0, 4]]), "1 groups, 2 make a step"),
    "a commit was not taken": (lambda j: j.edit("commit", 1, step=7), "commits step 7, which was not taken"),
    "a commit comes twice": (lambda j: j.edit("commit", 1, step=1), "commits step 1, which was not taken after"),
    "a commit of the dead": (lambda j: j.edit("commit", 3, incarnation=1), "by incarnation 1, 2 is the newest"),
    "a group is accepted twice": (lambda j: j.edit("group", 1, group=[0, 2]), "[0, 2] is accepted twice"),
    "a file has another number": (lambda j: j.edit("segment", 1, number=5), "is file 5, 2 was expected"),
    "a file has no first record": (lambda j: j.files[1].pop(0), "begins with it instead of with its segment"),
    "the ledger has no line": (lambda j: j.ledger.pop(3), "ledger: step 2 of incarnation 2 is missing"),
    "the ledger has other groups": (lambda j: j.ledger[0].update(groups=[[0, 3], [0, 2]]), "has other groups than"),
    "the ledger has another digest": (lambda j: j.ledger[0].update(digest="other"), "has another digest than"),
    "the ledger has another incarnation": (lambda j: j.ledger[0].update(incarnation=2), "is missing"),
}
LEFT_BEHIND = {"lost": LOST, "trained_twice": TRAINED_TWICE, "violations": VIOLATIONS}


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, rows in LEFT_BEHIND.items() for name in rows])
def test_the_checker_finds_what_was_planted(tmp_path, key, name):
    journal, (plant, words) = a_run(), LEFT_BEHIND[key][name]
    plant(journal)
    found = checker.check(journal.write(tmp_path / "run")).as_json()
    assert found[key] > 0 and any(words in line for line in found["wrong"]), found


SOURCE = {
    "replay acks a group that it has not journalled": (
        '        record(self.run, "group", fields, frames)\n',
        '        if group.index % 40 == 0:\n            return self._ack(peer, group, "accepted")\n'
        '        record(self.run, "group", fields, frames)\n',
        "kill server",
        "lost",
    ),
    "replay does not name a lost server": (
        '"replay: lost %s while it held',
        '"replay: %s, which held',
        "kill server",
        "unnamed",
    ),
    "a restarted learner takes other steps": (
        "lr_at(batch.step, learner, idle=beside.warmup_steps)",
        "lr_at(batch.step, learner, idle=beside.warmup_steps) * (1.0 + __import__('time').time() % 1)",
        "kill learner",
        "violations",
    ),
}


PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner")


def holders(root, text):
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return [path for path in paths if text in path.read_text()]


@pytest.mark.parametrize("name", SOURCE)
def test_the_place_of_a_fault_is_in_the_source_once(name):
    (path,) = holders(ROOT, SOURCE[name][0])
    assert path.read_text().count(SOURCE[name][0]) == 1, f"{path} has changed: restate what is planted there"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("old", "new", "fault", "key"), SOURCE.values(), ids=SOURCE)
def test_a_campaign_finds_what_was_planted(tmp_path, old, new, fault, key):
    for package in (*PACKAGES, "examples", "scripts"):
        shutil.copytree(ROOT / package, tmp_path / "copy" / package, ignore=shutil.ignore_patterns("__pycache__"))
    (path,) = holders(tmp_path / "copy", old)
    path.write_text(path.read_text().replace(old, new))
    where = ("--work", str(tmp_path / "work"), "--data", str(tmp_path / "data"))
    words = ("--faults", "2", "--only", fault, "--seed", "1", *where)
    found, said = run_campaign(*words, code=1, cwd=tmp_path / "copy")
    assert found[key] > 0, said[-3000:]
