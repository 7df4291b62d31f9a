"""Replay says where teachers are, names one that is missing, and counts what is left out for lack of one."""

from dataclasses import replace

import numpy as np
import pytest

from configs import Config
from replay import messages as m
from replay.journal import JournalError
from replay.state.apply import boot_fields
from tests.replay.simulated_run import bare_service, gives_back, group_message, joins, learner, lease, sent, service
from tests.replay.simulation.journal import SimulatedJournal

BIG, OLD = {"path": "models/big", "wait_s": 20.0}, {"of": "lagged", "every": 5}
TAUGHT = {"algorithm__distillation": "sampled", "teachers": {"big": {**BIG, "rows": {"data_source": "t"}}, "old": OLD}}


def teaches(made, teacher, number=0, *, now=0.0, **fields):
    """A process of a teacher says Hello; what replay refuses it for, or an empty string."""
    name = f"teacher-{teacher}-{number}"
    hello = {"address": f"tcp://h:{number}", "digest": "d0", "name": name} | fields
    made.handle(name, m.Hello(role="teacher", pid=3, host="h", teacher=teacher, **hello), now)
    return "".join(refused.reason for refused in sent(made, name, m.Refused))


def directory(made, identity="a"):
    """The newest list that a server has got; None without one."""
    return ([None] + [message.entries for message in sent(made, identity, m.Teachers)])[-1]


def waits(made, now):
    found = made.report.of(now, ended=None, no_server_since=0.0)["waits"]
    return [(wait["for"], wait["since_s"]) for wait in found if wait["code"] == "teacher"]


def test_servers_hear_where_teachers_are_and_of_every_change():
    made = service(**TAUGHT)
    made.run.policies.published = 10
    assert directory(made) == []
    assert teaches(made, "old", 1) == teaches(made, "big", 0) == ""
    both = [["big", "tcp://h:0", 0, "d0"], ["old", "tcp://h:1", 0, "d0"]]
    assert directory(made) == directory(made, "b") == both
    joins(made, "c")
    assert directory(made, "c") == both and directory(made) is None
    teaches(made, "old", 1, version=5, digest="d5")
    assert directory(made) == [both[0], ["old", "tcp://h:1", 5, "d5"]]
    teaches(made, "old", 1, version=5, digest="")  # its engine holds something else
    assert directory(made) == [both[0]]
    teaches(made, "old", 1, version=10, digest="d6")
    assert directory(made) == [both[0], ["old", "tcp://h:1", 10, "d6"]]
    made.handle("teacher-big-0", m.Goodbye(reason="stopped"), 1.0)
    assert directory(made) == [["old", "tcp://h:1", 10, "d6"]] and made.counters["teachers_lost"] == 1
    made.handle("a", m.Heartbeat(), 11.0)
    made.tick(11.0)  # the other one is silent
    assert directory(made) == [] and made.counters["teachers_lost"] == 2


@pytest.mark.parametrize(
    ("teacher", "fields", "said"),
    [
        ("small", {}, "'small' is no teacher with a process of its own in this run (big, old is)"),
        ("big", {"address": ""}, "gives '', which is no address"),
        ("big", {"address": "ipc:///tmp/x"}, "no address"),
        ("old", {"version": 3}, "has version 3: its versions are multiples of 5"),
        ("big", {"version": 5}, "has version 5: it stays as it is"),
        ("big", {"digest": "d1"}, "holds weights d1, and 'teacher-big-0' d0"),
    ],
)
def test_a_process_that_is_no_teacher_of_the_run_is_refused(teacher, fields, said):
    made = service(**TAUGHT)
    assert teaches(made, "big") == ""
    assert said in teaches(made, teacher, 1, **fields)
    assert directory(made) == [["big", "tcp://h:0", 0, "d0"]]


def test_of_a_teachers_model_the_tokenizer_alone_is_the_runs():
    made = service(**TAUGHT)
    made.peers.expected = {"tokenizer": "t", "architecture": "x", "rollout.temperature": "1.0", "learner.lr": "1"}
    given = {"tokenizer": "t", "architecture": "y", "rollout.temperature": "1.0"}
    assert teaches(made, "big", fingerprint=given) == ""
    assert "tokenizer is u there and t in this run" in teaches(made, "old", fingerprint=given | {"tokenizer": "u"})
    colder = given | {"rollout.temperature": "0.7"}
    assert "rollout.temperature is 0.7 there and 1.0 in this run" in teaches(made, "old", fingerprint=colder)


def test_a_teacher_hears_of_its_own_bus_and_of_every_learner():
    made = service(**TAUGHT)
    teaches(made, "old")
    assert [welcome.bus_address for welcome in sent(made, "teacher-old-0", m.Welcome)] == [None]
    learner(made, "l", bus_address="tcp://h:7", teacher_buses={"old": "tcp://h:8"})
    learner(made, "l'", teacher_buses={"old": "tcp://h:9"})
    assert [welcome.bus_address for welcome in sent(made, "teacher-old-0", m.Welcome)] == ["tcp://h:8", "tcp://h:9"]
    for follows, again in (("tcp://h:8", ["tcp://h:9"]), ("tcp://h:9", [])):
        teaches(made, "old", bus_address=follows)
        sent(made, "teacher-old-0", m.Welcome)
        made.handle("teacher-old-0", m.Heartbeat(), 0.0)
        assert [welcome.bus_address for welcome in sent(made, "teacher-old-0", m.Welcome)] == again, "the word was lost"


def test_a_teacher_of_policies_that_are_lost_is_not_asked():
    made = service(**TAUGHT)
    teaches(made, "old", version=5)
    assert directory(made) == [], "the learner is at version 0"
    made.run.buffer.version = 5
    made.handle("l", m.Committed(step=5, digest="d5"), 0.0)
    assert directory(made) == [["old", "tcp://h:0", 5, "d0"]]


def test_a_teacher_that_is_missing_is_named_and_ends_the_run_where_it_is_waited_for():
    made = service(**TAUGHT)
    teaches(made, "old")
    for now in (0.0, 9.0):
        for identity in ("l", "a", "b", "teacher-old-0"):
            made.handle(identity, m.Heartbeat(), now)
        made.tick(now)
    assert waits(made, 9.5) == [("a process of teacher 'big'", 9.5)]
    for identity in ("l", "a", "b"):
        made.handle(identity, m.Heartbeat(), 19.5)
    made.tick(19.5)
    assert waits(made, 20.0)[-1][0] == "a process of teacher 'old' (teacher-old-0 fell silent)" and not made.ended
    made.handle("a", m.Heartbeat(), 21.0)
    made.tick(21.0)
    assert made.failed and made.ended == (
        "no process of teacher 'big' for 20 s (teachers.big.wait_s); its logs end with the reason [silent]"
        " [SLIP-RUN-11]"
    )


def test_a_teacher_that_waits_for_its_weights_is_missing():
    made = service(**TAUGHT)
    teaches(made, "old", digest="")
    teaches(made, "big")
    for identity in ("l", "a", "b", "teacher-old-0", "teacher-big-0"):
        made.handle(identity, m.Heartbeat(), 9.0)
    made.tick(9.0)
    assert waits(made, 9.0) == [("a process of teacher 'old'", 9.0)]


@pytest.mark.parametrize("changed", [{"on_error": "leave_out"}, {"path": None, "url": "http://h:1/v1", "model": "m"}])
def test_a_teacher_that_is_not_waited_for_ends_no_run(changed):
    made = service(algorithm__distillation="sampled", teachers={"big": BIG | changed})
    for now in (0.0, 9.0, 18.0, 27.0):
        for identity in ("l", "a", "b"):
            made.handle(identity, m.Heartbeat(), now)
        made.tick(now)
    assert made.ended is None and len(waits(made, 27.0)) == ("path" not in changed)


def test_a_group_without_its_scores_is_left_out_once_and_counted():
    made = service(**TAUGHT)
    (given,) = lease(made)
    gives_back(made, given, "teacher_error", "teacher 'big', 3 tries: closed")
    assert made.counters["dropped/teacher_error"] == 1
    assert (given.pass_, given.index) not in made.buffer.slots
    assert made.report.batch_stats()["buffer/dropped/teacher_error"] == 1
    assert "teacher_error: teacher 'big', 3 tries: closed" in made.leasing.last_drop


def test_a_run_without_teachers_says_nothing_of_them():
    made = service()
    assert directory(made) is None and "'big' is no teacher" in teaches(made, "big")
    assert isinstance(made.config, Config) and made.config.scoring is None


def test_scores_come_back_from_the_journal_of_the_same_teachers_alone():
    journal = SimulatedJournal()
    made = service(journal, **TAUGHT)
    (given,) = lease(made)
    scored = {"teachers": ["big@0", "old@0"], "teacher_logprobs": np.array([-1, -2, -3, -4], np.float32)}
    made.handle("a", replace(group_message(given, [0, 0]), **scored), 1.0)
    journal.append("boot", boot_fields(made.config, made.run.source.state(), 1))
    again = bare_service(journal, **TAUGHT)
    again.restore(journal.records, 0.0)
    again.run.load_groups()
    (group,) = [slot.group for slot in again.buffer.slots.values() if slot.group is not None]
    assert group.teachers == scored["teachers"] and group.teacher_logprobs.tolist() == [-1, -2, -3, -4]
    others = bare_service(journal, **TAUGHT | {"algorithm__distillation": {"top_k": {"k": 2}}})
    with pytest.raises(JournalError, match=r"teachers .* written with 'big, old with top 0', now it is .* with top 2'"):
        others.restore(journal.records, 0.0)


def test_a_group_is_accepted_with_the_scores_that_the_run_asks_for():
    made = service(**TAUGHT)
    (given,) = lease(made)
    group = group_message(given, [0, 0])
    made.handle("a", group, 1.0)
    (ack,) = sent(made, "a", m.Ack)
    assert (ack.status, ack.reason) == ("rejected", "0 teachers for 2 answers")
    (again,) = lease(made)
    scored = {"teachers": ["big@0", "old@0"], "teacher_logprobs": np.full(4, -1, np.float32)}
    made.handle("a", replace(group_message(again, [0, 0]), **scored), 1.0)
    assert [ack.status for ack in sent(made, "a", m.Ack)] == ["accepted"]
