"""Rollout servers join and leave a run; each rule of the judge, with a run that breaks it."""

import json
import re
import shutil
import struct
import zlib

import msgpack
import pytest

from scripts.chaos.campaigns.elastic import Facts, Judge
from scripts.chaos.checker.journal import MAGIC, read
from tests.support.campaigns import run_campaign

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LATE = "late-1"


@pytest.fixture(scope="module")
def played(tmp_path_factory, sort6, zygote):
    """(folder, last line) of a run with 1, then 2, then 1 rollout server."""
    work = tmp_path_factory.mktemp("elastic") / "work"
    where = ("--work", str(work), "--data", str(sort6.folder))
    return work / "cluster", run_campaign("elastic", "--short", "--seed", "0", *where, zygote=zygote)[0]


def test_a_server_joins_in_the_middle_of_an_update_and_is_killed_and_no_group_is_lost(played):
    work, found = played
    assert (found["servers"], found["steps"], found["trained"]) == ([1, 2, 1], 30, 30 * 16)
    assert (found["lost"], found["trained_twice"], found["violations"]) == (0, 0, 0)
    assert (found["learner_restarts"], found["leases_before_proof"], found["max_lag"]) == (0, 0, 1)
    (join,), (leave,) = found["joins"], found["leaves"]
    assert join["filled"] == "at once" and join["fill_seconds"] < join["next_broadcast_seconds"]
    assert leave["exit_code"] == -9 and leave["leases_moved"] > 0
    assert min(found["groups_by_server"].values()) > 0
    log = (work / "run" / "logs" / "learner-0.log").read_text()
    assert re.search(rf"subscriber '{LATE}' .* joined, it holds v-1", log)
    assert f"({LATE}) sends v{join['version']}" in log, "an epoch of its own: no other server was sent anything"


# ---- the judge -----------------------------------------------------------------------------------------


class Doctored:
    """A copy of the run, to be changed."""

    def __init__(self, work, facts):
        self.work, self.facts = work, facts

    def diary(self, change, name=LATE):
        """Rewrite a probe's: `change` gets all events and returns what stays."""
        path = self.work / f"probes/{name}/events.jsonl"
        events = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(event) + "\n" for event in events))

    def journal(self, change):
        """Rewrite every record: `change` gets kind and fields, and changes the fields or returns both anew."""
        written = {}
        for record in read(self.work / "run" / "journal")[0]:
            kind, fields = change(record.kind, record.fields) or (record.kind, record.fields)
            meta = msgpack.packb([kind, record.number, fields, [len(frame) for frame in record.frames]])
            head = MAGIC + struct.pack("<II", len(meta), zlib.crc32(meta))
            written[record.file] = written.get(record.file, b"") + head + meta + b"".join(record.frames)
        for name, data in written.items():
            (self.work / "run" / "journal" / name).write_bytes(data)

    def judge(self):
        """What the judge finds wrong."""
        result, wrong = Judge(self.work, self.facts).verdict()
        assert result["wrong"] == len(wrong)
        assert result["leases_before_proof"] == sum(EARLY in line for line in wrong)
        return wrong


@pytest.fixture
def doctored(played, tmp_path):
    shutil.copytree(played[0], tmp_path / "work", ignore=shutil.ignore_patterns("checkpoints"))
    (facts,) = json.loads((played[0].parent / "state.json").read_text())["done"]
    return Doctored(tmp_path / "work", Facts(**facts))


def first(events, kind):
    return next(event for event in events if event["event"] == kind)


def changed(events, kind, **fields):
    first(events, kind).update(fields)
    return events


def quarantined(events):
    number = events.index(first(events, "lease"))
    return [*events[:number], {"event": "dark", "at": 0.0}, *events[number:]]


def filled_late(run):
    run.facts.joins[LATE] = "far from the next one"
    assert run.judge() == []
    run.diary(lambda events: changed(events, "welcome", version=first(events, "welcome")["version"] - 1))


def missed(run):
    with (run.work / "run" / "logs" / "learner-0.log").open("a") as log:
        log.write("WARNING weight bus: version 5 did not reach 'first': it is slow [slow]\n")


def diary(change, name=LATE):
    return lambda run: run.diary(change, name)


def without(kind, name=LATE):
    return diary(lambda events: [event for event in events if event["event"] != kind], name)


def at_the_end(kind, **fields):
    return lambda run: run.journal(lambda found, _: (kind, fields) if found == "end" else None)


def sent_by_the_first(run):
    run.journal(lambda kind, fields: fields.update(server="first.00") if kind == "group" else None)


ACK = {"event": "ack", "at": 0.0, "group": [9, 999], "attempt": 1, "status": "accepted"}
LEASE = {"group": [9, 9], "attempt": 1, "min_version": 0, "server": f"{LATE}.00"}
AGAIN = {"incarnation": 2, "version": 30, "digest": "", "world_size": 1, "bus_address": ""}
OTHER_DIGEST = (f"{LATE}: its engine held {'0' * 32}", "not proven on it before")
EARLY = "came before any proven version was live"
MANY = None  # other rules may be broken, too
BROKEN = {
    "nothing": (lambda run: None, 0),
    "the checker of every campaign": (diary(lambda events: [*events, ACK]), 1, "[9, 999] attempt 1 was acked and is"),
    "a lease came early": (diary(lambda events: [first(events, "lease"), *events]), 1, EARLY),
    "a quarantined engine is leased to": (diary(quarantined), MANY, EARLY),
    "a probe saw no lease": (without("lease"), 1, f"{LATE}: its probe saw no lease"),
    "an engine held something else": (diary(lambda e: changed(e, "proven", digest="0" * 32)), MANY, *OTHER_DIGEST),
    "no group of a server was trained": (sent_by_the_first, MANY, f"{LATE}: none of its groups was trained"),
    "a lease stays": (at_the_end("lease", **LEASE), 1, f"{LATE}: 1 leases are still with it"),
    "a join met no update": (without("begin", "first"), 1, f"{LATE}: no update was on its way to 'first' when"),
    "a join was filled late": (filled_late, 1, f"{LATE}: was not filled before the next broadcast"),
    "a version was missed": (missed, 1, "version 5 was not proven on every server: first"),
    "the learner started twice": (at_the_end("learner", **AGAIN), MANY, "the learner started 2 times, replay 1 times"),
}
FACTS = [
    ("exits", {"learner": 0, "first": 1, LATE: -9}, "first: ended with exit code 1"),
    ("exits", {"learner": 0, "first": 0, LATE: 0}, "exit code 0 after SIGKILL"),
    ("exits", {"learner": 1, "first": 0, LATE: -9}, "launcher ended with exit code 1"),
    ("ranks", [[11], [12]], "the learner ranks are not the same processes"),
    ("leases_left", {LATE: 0}, "held no lease when it left"),
    ("target", 0.9, "reward: None at the end, the target is 0.9"),
]
BROKEN |= {
    words: (lambda run, field=field, value=value: setattr(run.facts, field, value), 1, words)
    for field, value, words in FACTS
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_judge_finds_what_was_planted(doctored, name):
    plant, number, *expected = BROKEN[name]
    plant(doctored)
    wrong = doctored.judge()
    assert number in (None, len(wrong)), wrong
    assert [words for words in expected if not any(words in line for line in wrong)] == [], wrong


def test_tokens_of_a_version_that_was_not_proven_on_their_server_are_found(doctored):
    unproven = max(Judge(doctored.work, doctored.facts).history.sampled[LATE])
    doctored.diary(lambda events: [e for e in events if e.get("version") != unproven])
    assert doctored.judge() == [f"{LATE}: tokens of versions [{unproven}] that were not proven on it"]
