"""Rollout servers join and leave a run; each rule of the judge, with a run that breaks it."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import msgpack
import pytest

from scripts.chaos.campaigns.elastic_judge import Facts, Judge
from scripts.chaos.checker.journal import MAGIC, read

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
LATE = "late-1"


@pytest.fixture(scope="module")
def played(tmp_path_factory, sort6):
    """(folder, standard output) of a run with 1, then 2, then 1 rollout server."""
    work = tmp_path_factory.mktemp("elastic") / "work"
    where = ("--work", str(work), "--data", str(sort6.folder))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.chaos", "elastic", "--short", "--seed", "0", *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return work / "cluster", done.stdout


def test_a_server_joins_in_the_middle_of_an_update_and_is_killed_and_no_group_is_lost(played):
    work, output = played
    found = json.loads(output.splitlines()[-1])
    assert (found["servers"], found["steps"], found["trained"]) == ([1, 2, 1], 30, 30 * 16)
    assert (found["lost"], found["trained_twice"], found["violations"]) == (0, 0, 0)
    assert (found["learner_restarts"], found["leases_before_proof"], found["max_lag"]) == (0, 0, 1)
    (join,), (leave,) = found["joins"], found["leaves"]
    assert join["filled"] == "at once" and join["fill_seconds"] < join["next_broadcast_seconds"]
    assert leave["exit_code"] == -9 and leave["leases_moved"] > 0
    assert min(found["groups_by_server"].values()) > 0
    log = (work / "run" / "logs" / "learner-0.log").read_text()
    assert re.search(rf"subscriber '{LATE}' .* joined, it holds v-1", log)
    assert f"({LATE}) sends v{join['version']}" in log, "an epoch of its own: nobody else was sent anything"


# ---- the judge -----------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    result: dict
    wrong: list


class Doctored:
    """A copy of the run that is changed afterwards."""

    def __init__(self, work, facts):
        self.work = work
        self.facts = facts

    def lines(self, path, change):
        """Rewrite a file of JSON lines: `change` gets all of them and returns what stays."""
        path = self.work / path
        rows = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def diary(self, change, name=LATE):
        self.lines(f"probes/{name}/events.jsonl", change)

    def journal(self, change):
        """Rewrite every record: `change` gets kind and fields, and changes the fields or returns both anew."""
        folder = self.work / "run" / "journal"
        written = {}
        for record in read(folder)[0]:
            kind, fields = change(record.kind, record.fields) or (record.kind, record.fields)
            sizes = [len(frame) for frame in record.frames]
            meta = msgpack.packb([kind, record.number, fields, sizes])
            head = MAGIC + struct.pack("<II", len(meta), zlib.crc32(meta))
            written[record.file] = written.get(record.file, b"") + head + meta + b"".join(record.frames)
        for name, data in written.items():
            (folder / name).write_bytes(data)

    def wrong(self):
        verdict = Verdict(*Judge(self.work, self.facts).verdict())
        assert verdict.result["wrong"] == len(verdict.wrong)
        return verdict


@pytest.fixture
def doctored(played, tmp_path):
    shutil.copytree(played[0], tmp_path / "work", ignore=shutil.ignore_patterns("checkpoints"))
    (facts,) = json.loads((played[0].parent / "state.json").read_text())["done"]
    return Doctored(tmp_path / "work", Facts(**facts))


def first(events, kind):
    return next(event for event in events if event["event"] == kind)


def test_the_judge_finds_nothing_in_the_run_as_it_was(doctored):
    assert doctored.wrong().wrong == []


def test_an_acked_group_that_nobody_has_is_lost(doctored):
    ack = {"event": "ack", "at": 0.0, "group": [9, 999], "attempt": 1, "status": "accepted"}
    doctored.diary(lambda events: [*events, ack])
    verdict = doctored.wrong()
    assert verdict.result["lost"] == 1 and "[9, 999] attempt 1 was acked and is not in the journal" in verdict.wrong[0]


def test_a_group_in_two_steps_is_trained_twice(doctored):
    takes = []

    def change(kind, fields):
        if kind == "take":
            takes.append(fields["groups"])
            if fields["step"] == 30:
                fields["groups"] = [takes[-2][0], *fields["groups"][1:]]

    doctored.journal(change)
    verdict = doctored.wrong()
    assert verdict.result["trained_twice"] == 1 and any("is in 2 steps" in words for words in verdict.wrong)


def test_a_lease_before_any_proven_version_is_found(doctored):
    doctored.diary(lambda events: [first(events, "lease"), *events])
    verdict = doctored.wrong()
    assert verdict.result["leases_before_proof"] == 1
    assert len(verdict.wrong) == 1 and "came before any proven version was live" in verdict.wrong[0]


def test_a_lease_of_a_quarantined_engine_is_found(doctored):
    def change(events):
        number = events.index(first(events, "lease"))
        return [*events[:number], {"event": "dark", "at": 0.0}, *events[number:]]

    doctored.diary(change)
    assert doctored.wrong().result["leases_before_proof"] > 0


def test_a_probe_that_saw_no_lease_proves_nothing(doctored):
    doctored.diary(lambda events: [e for e in events if e["event"] != "lease"])
    assert doctored.wrong().wrong == [f"{LATE}: its probe saw no lease"]


def test_an_engine_that_held_something_else_has_proven_nothing(doctored):
    def change(events):
        first(events, "proven")["digest"] = "0" * 32
        return events

    doctored.diary(change)
    wrong = doctored.wrong().wrong
    assert any(f"{LATE}: its engine held {'0' * 32}" in words for words in wrong)
    assert any("asked for leases with" in words and "not proven on it before" in words for words in wrong)


def test_tokens_of_a_version_that_was_not_proven_on_their_server_are_found(doctored):
    sampled = Judge(doctored.work, doctored.facts).history.sampled[LATE]
    unproven = max(sampled)
    doctored.diary(lambda events: [e for e in events if e.get("version") != unproven])
    assert doctored.wrong().wrong == [f"{LATE}: tokens of versions [{unproven}] that were not proven on it"]


def test_a_server_whose_groups_nobody_trained_is_found(doctored):
    def change(kind, fields):
        if kind == "group":
            fields["server"] = "first.00"

    doctored.journal(change)
    assert f"{LATE}: none of its groups was trained" in doctored.wrong().wrong


def test_a_lease_that_stays_with_a_server_that_is_gone_is_found(doctored):
    lease = {"group": [9, 9], "attempt": 1, "min_version": 0, "server": f"{LATE}.00"}
    doctored.journal(lambda kind, _: ("lease", lease) if kind == "end" else None)
    assert doctored.wrong().wrong == [f"{LATE}: 1 leases are still with it"]


def test_a_join_that_met_no_update_is_not_in_the_middle_of_one(doctored):
    doctored.diary(lambda events: [e for e in events if e["event"] != "begin"], "first")
    assert doctored.wrong().wrong == [f"{LATE}: no update was on its way to 'first' when it joined"]


def test_a_server_that_was_filled_by_the_next_broadcast_was_not_filled_before_it(doctored):
    def change(events):
        first(events, "welcome")["version"] -= 1
        return events

    doctored.facts.joins[LATE] = "far from the next one"
    assert doctored.wrong().wrong == []
    doctored.diary(change)
    verdict = doctored.wrong()
    assert verdict.result["joins"][0]["filled"] == "by the next broadcast"
    assert verdict.wrong == [f"{LATE}: was not filled before the next broadcast"]


def test_a_version_that_a_server_missed_is_the_fault_of_one_that_left_or_an_error(doctored):
    with (doctored.work / "run" / "logs" / "learner-0.log").open("a") as log:
        log.write("WARNING weight bus: version 5 did not reach 'first': it is slow [slow]\n")
    assert doctored.wrong().wrong == ["version 5 was not proven on every server: first"]


def test_a_missing_step_and_a_wrong_number_of_servers_are_found(doctored):
    def change(rows):
        for row in rows:
            if "rollout/servers" in row:
                row["rollout/servers"] = row["weight_sync/members"] = 1.0
        return [row for row in rows if row.get("training/global_step") != 7]

    doctored.lines("run/metrics.jsonl", change)
    wrong = doctored.wrong().wrong
    assert "29 steps in metrics.jsonl and 30 in the journal, not 1 to 30" in wrong
    assert "at most 1 rollout servers were served by one broadcast, not 2" in wrong
    assert "[1, 1, 1] rollout servers first, at most and last, not [1, 2, 1]" in wrong


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("exits", {"learner": 0, "first": 1, LATE: -9}, "first: ended with exit code 1"),
        ("exits", {"learner": 0, "first": 0, LATE: 0}, "exit code 0 after SIGKILL"),
        ("exits", {"learner": 1, "first": 0, LATE: -9}, "launcher ended with exit code 1"),
        ("ranks", [[11], [12]], "the learner ranks are not the same processes"),
        ("leases_left", {LATE: 0}, "held no lease when it left"),
        ("target", 0.9, "reward: None at the end, the target is 0.9"),
    ],
)
def test_facts_that_are_not_in_order_are_named(doctored, field, value, words):
    setattr(doctored.facts, field, value)
    wrong = doctored.wrong().wrong
    assert len(wrong) == 1 and words in wrong[0], wrong


def test_a_learner_that_started_twice_is_found(doctored):
    again = {"incarnation": 2, "version": 30, "digest": "", "world_size": 1, "bus_address": ""}
    doctored.journal(lambda kind, _: ("learner", again) if kind == "end" else None)
    verdict = doctored.wrong()
    assert verdict.result["learner_restarts"] == 1
    assert "the learner started 2 times, replay 1 times" in verdict.wrong
