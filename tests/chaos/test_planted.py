"""Twenty faults of the product, planted in what it leaves behind, in its code in memory, or in a copy of its source."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from written_journal import a_run, groups_of, wire_message

from scripts.chaos import checker
from scripts.chaos.campaigns.bus_points import NAMED
from scripts.chaos.campaigns.bus_receivers import Receivers
from scripts.chaos.campaigns.changes import Chances, Changes
from scripts.chaos.campaigns.flips import Flip, Flips
from scripts.chaos.campaigns.policy import Policy
from weight_bus.delta.changes import ChangeReader
from weight_bus.intake import Intake
from weight_bus.manifest import Manifest
from weight_bus.staging import Staging

ROOT = Path(__file__).parents[2]

# ---- in what a run leaves behind ---------------------------------------------------------------------------


def first(journal, kind, nth=0):
    found = [(f, i) for f, records in enumerate(journal.files) for i, r in enumerate(records) if r[0] == kind]
    return found[nth]


def edit(journal, kind, nth, frames=None, **fields):
    f, i = first(journal, kind, nth)
    old = journal.files[f][i]
    journal.files[f][i] = (kind, {**old[1], **fields}, old[2] if frames is None else frames)


def pass_over(journal):
    f, i = first(journal, "lease", 2)
    lease = {"group": [0, 88], "attempt": 1, "min_version": 0, "server": "rollout-0"}
    group = {"group": [0, 88], "attempt": 1, "server": "rollout-0"}
    journal.files[f][i:i] = [("lease", lease, ()), ("group", group, wire_message(1))]


def masked_above_the_bound(journal):
    journal.on_stale = "mask"
    journal.metrics[-1]["training/lag_histogram"]["2"] = 3


LEFT_BEHIND = {
    "an acked group is not journalled": (lambda j: j.ack((0, 55)), "lost"),
    "an acked group is leased again": (lambda j: j.lease((0, 99), attempt=2), "lost"),
    "an accepted group is passed over": (pass_over, "lost"),
    "a group is trained in two steps": (
        lambda j: edit(j, "take", 5, groups=[list(groups_of(1)[0]), list(groups_of(4)[1])]),
        "trained_twice",
    ),
    "a dropped group is trained": (lambda j: j.add("drop", group=[0, 4], reason="poison"), "violations"),
    "a group is dropped twice": (
        lambda j: [j.add("drop", group=[0, 99], reason=reason) for reason in ("poison", "too_slow")],
        "violations",
    ),
    "a token is above the lag bound": (lambda j: edit(j, "group", 4, wire_message((2, 2, 0))), "violations"),
    "a token is of a version to come": (lambda j: edit(j, "group", 2, wire_message(2)), "violations"),
    "masking leaves an old token in": (masked_above_the_bound, "violations"),
    "a repeated step has other weights": (lambda j: edit(j, "commit", 3, digest="other"), "violations"),
    "a repeated step has other groups": (lambda j: edit(j, "take", 3, groups=[[0, 5], [0, 4]]), "violations"),
    "the ledger has another digest": (lambda j: j.ledger[0].update(digest="other"), "violations"),
    "a resumed learner skips ahead": (lambda j: edit(j, "learner", 1, version=9), "violations"),
}


@pytest.mark.parametrize(("plant", "key"), LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_the_checker_finds_what_was_planted(tmp_path, plant, key):
    journal = a_run()
    assert checker.check(journal.write(tmp_path / "sound")).in_order
    plant(journal)
    assert checker.check(journal.write(tmp_path / "planted")).as_json()[key] > 0


# ---- in the code, in memory --------------------------------------------------------------------------------


def test_weights_that_are_not_proven_in_the_engine_are_seen(monkeypatch):
    monkeypatch.setattr(Manifest, "differences", lambda self, held: [])
    with Flips(3) as campaign:
        campaign.update(Flip("live", "receiver-1", "embed", byte=40, bit=6))
        assert campaign.bus.oracle.wrong == ["'receiver-1' serves v1 with a wrong 'embed'"]


def changes(back=0.0, base=0.0):
    policy, chances = Policy(7, hidden=64, kinds={"step": 50, "back": 50}), Chances(0.0, 0.0, back, base)
    with Changes(7, policy, chances=chances, pace_s=0.0) as campaign:
        return campaign.run(12)[0]


def test_changes_that_are_not_proven_at_all_are_seen(monkeypatch):
    monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    monkeypatch.setattr(ChangeReader, "arrived", lambda *_: True)
    monkeypatch.setattr(Manifest, "differences", lambda self, held: [])
    assert changes(back=1.0)["served_wrong"] > 0


def test_changes_of_another_base_are_seen(monkeypatch):
    def unguarded(self, begin, manifest):
        reader: ChangeReader = self._reader
        reader.apply(self.staging.buckets, begin.wire_bytes, begin.change_bytes)
        self.staging.manifest = manifest
        return self.staging.corrupt()

    monkeypatch.setattr(Intake, "_change", unguarded)
    assert changes(base=1.0)["unnoticed"] > 0


def test_a_publisher_that_names_no_lost_receiver_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(logging.getLogger("weight_bus.bus"), "warning", lambda *_: None)
    with Receivers(tmp_path) as campaign:
        assert campaign.case("kill", NAMED["middle bucket"]).wrong == ["no line names it"]


# ---- in a copy of the source, in whole runs ----------------------------------------------------------------

SOURCE = {
    "replay acks a group that it has not journalled": (
        "replay/lease_desk.py",
        '        self._accept(peer, slot, group, frames or encode(group, "", group.attempt))\n',
        '        if group.index % 40:\n            self._accept(peer, slot, group, frames or encode(group, "", 1))\n',
        "kill server",
        "lost",
    ),
    "replay does not name a lost server": (
        "replay/service.py",
        '"replay: lost %s while it held',
        '"replay: %s, which held',
        "kill server",
        "unnamed",
    ),
    "a restarted learner takes other steps": (
        "learner/learner.py",
        "lr = lr_at(batch.step, self.config.learner)",
        "lr = lr_at(batch.step, self.config.learner) * (1.0 + __import__('time').time() % 1)",
        "kill learner",
        "violations",
    ),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("file", "old", "new", "fault", "key"), SOURCE.values(), ids=SOURCE)
def test_a_campaign_finds_what_was_planted(tmp_path, file, old, new, fault, key):
    for package in ("configs", "replay", "weight_bus", "rollout_server", "learner", "scripts"):
        shutil.copytree(ROOT / package, tmp_path / "copy" / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "copy" / file
    source = path.read_text()
    assert source.count(old) == 1, f"{file} has changed: restate what is planted there"
    path.write_text(source.replace(old, new))
    command = [sys.executable, "-m", "scripts.chaos", "--faults", "2", "--only", fault, "--seed", "1"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work"), "--data", str(tmp_path / "data")],
        cwd=tmp_path / "copy",
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])[key] > 0, done.stdout[-3000:]
