"""timeline.jsonl: what replay writes down about its peers, for readers of the run folder."""

import json
import logging

from replay import messages as m
from replay import spans
from replay.timeline import Timeline
from tests.replay.simulated_run import group_message, joins, lease, service
from tests.support.waiting import PATIENT_S


def watched(tmp_path, **overrides):
    made = service(**overrides)
    return made, Timeline(tmp_path / "timeline.jsonl", made.run, made.peers, made.batching)


def observe(timeline, now, woken):
    """Look, and wait until what was seen is written."""
    timeline.observe(now, woken)
    timeline._disk.submit(lambda: None).result(PATIENT_S)


def written(tmp_path, name):
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line["name"] == name]
    assert all(line["time"] > 1e9 for line in found)
    return [line.get("event", line.get("state")) for line in found], found


def test_a_server_joins_samples_waits_and_serves_the_next_version(tmp_path):
    made, timeline = watched(tmp_path)
    observe(timeline, 0.0, 0.0)
    (given,) = lease(made)
    observe(timeline, 1.0, 1.0)
    made.handle("a", group_message(given, [0]), 2.0)
    made.handle("a", m.Heartbeat(activity="waiting for leases", gauges={"tokens_per_s": 5.0, "detail": 1.0}), 2.0)
    made.handle("a", m.LeaseRequest(capacity=1, version=1, incarnation=1), 2.5)
    observe(timeline, 3.0, 3.0)
    observe(timeline, 4.0, 4.0)
    names, lines = written(tmp_path, made.peers.get("a").name)
    assert names[:3] == ["joined", "join", "rollout"] and "serves" in names[3:]
    serves = next(line for line in lines if line.get("event") == "serves")
    assert (serves["version"], serves["gauges"]) == (1, {"tokens_per_s": 5.0})
    assert lines[0]["role"] == "rollout_server" and {"host", "pid"} <= lines[0].keys()
    before = (tmp_path / "timeline.jsonl").read_text()
    observe(timeline, 5.0, 5.0)
    assert (tmp_path / "timeline.jsonl").read_text() == before, "nothing has changed"


def test_losses_have_their_symptom_and_the_end_its_reason(tmp_path):
    made, timeline = watched(tmp_path)
    name, other = made.peers.get("a").name, made.peers.get("b").name
    observe(timeline, 0.0, 0.0)
    made.lost("a", "silent", 1.0)
    observe(timeline, 1.0, 1.0)
    assert written(tmp_path, name)[1][-1]["why"] == "silent"
    made.handle("b", m.Heartbeat(blocked="quarantined"), 2.0)
    observe(timeline, 2.0, 2.0)
    assert written(tmp_path, other)[0][-1] == "quarantined"
    made.end("all steps are done", failed=False)
    made.lost("b", "closed", 3.0)
    timeline.end("all steps are done", failed=False)
    assert written(tmp_path, other)[1][-1]["why"] == "the run has ended"
    assert written(tmp_path, "replay")[0] == ["ended"]


def test_a_file_that_cannot_be_written_is_logged_and_the_run_goes_on(tmp_path, caplog):
    made, timeline = watched(tmp_path)
    (tmp_path / "timeline.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        observe(timeline, 0.0, 0.0)
    assert "lines are left out" in caplog.text
    joins(made, "c")
    (tmp_path / "timeline.jsonl").rmdir()
    observe(timeline, 1.0, 1.0)
    assert written(tmp_path, made.peers.get("c").name)[0][0] == "joined"


def test_a_trace_has_turns_batches_and_leases_within_its_window(tmp_path, monkeypatch):
    moment = 0.0
    monkeypatch.setattr(spans, "now_ns", lambda: round(moment * 1e9))
    made, timeline = watched(tmp_path, replay__async_lag=0, tracking__profile="2:3")

    def turn(began, ended):
        nonlocal moment
        moment = ended
        observe(timeline, ended, began)

    for step in range(1, 7):
        at = 10.0 * step
        made.handle("l", m.Take(step=step, rank=0), at)
        turn(at, at)
        given = lease(made, capacity=4, version=step - 1, now=at)
        turn(at, at + 0.001)
        for each in given:
            made.handle("a", group_message(each, [step - 1]), at + 2)
        turn(at + 2, at + 2.5)
        made.handle("l", m.Take(step=step, rank=0, have=True), at + 3)
        turn(at + 3, at + 3)
        turn(at + 3.5, at + 3.5)
        made.handle("l", m.Committed(step=step, digest=f"d{step}"), at + 4)
        turn(at + 4, at + 4)
    timeline.end("done", failed=False)
    lines = [json.loads(line) for line in (tmp_path / "trace" / "replay.jsonl").read_text().splitlines()]
    assert lines[0]["role"] == "replay"
    found = {}
    for line in lines[1:]:
        found.setdefault(line["lane"], []).append((line["name"], line["start"] / 1e9, line["end"] / 1e9))
    batches = [(name, start, end) for name, start, end in found["batches"] if "batch 2" in name]
    assert batches == [("batch 2 waits for groups", 20.0, 22.5), ("batch 2 goes out", 22.5, 23.0)]
    assert ("turn", 22.0, 22.5) in found["loop"] and not [turn for turn in found["loop"] if turn[1] == turn[2]]
    held = [(start, end) for _, start, end in found["leases of rollout-a"] if start == 20.0]
    assert held == [(20.0, 22.5)] * 4
    assert {int(name.split()[1]) for name, _, _ in found["batches"]} == {1, 2, 3, 4}, "the window and what is around it"
