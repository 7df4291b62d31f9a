"""A trace of the run: recorders, clocks, the merge, and what it says."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.base import ConfigError
from configs.loading import load
from slipstream.runtime import trace
from slipstream.runtime.trace import ClockProbe, Recorder
from slipstream.view.trace.__main__ import main
from slipstream.view.trace.merge import events, merge, tracks
from slipstream.view.trace.sources import Span, TraceError, TraceProcess, Track
from tests.support.dashboard_runs import START, write_lines
from tests.support.traces import parsed, problems

MS = 1_000_000
UNIX = round(START * 1e9)


@pytest.mark.parametrize("value", ["3", "6:3", "3:3", "0:2", "3:6:1", "a:b", "-1:2", "3:"])
def test_a_window_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="the first one after them: 3:6"):
        load("quickstart", [f"tracking.profile={value}"])


def test_a_window_after_the_last_step_is_refused():
    with pytest.raises(ConfigError, match=r"begins after the last step, learner\.total_steps is 80"):
        load("quickstart", ["tracking.profile=81:83"])
    assert list(load("quickstart", ["tracking.profile=79:99"]).tracking.profiled)[:2] == [79, 80]


def test_a_recorder_writes_within_its_versions_and_nothing_else(tmp_path):
    recorder = Recorder(tmp_path, "x", "learner", range(3, 5))
    for version in range(7):
        recorder.at(version)
        recorder.add("lane", f"v{version}", 0, 1)
    lines = [json.loads(line) for line in (tmp_path / "trace" / "x.jsonl").read_text().splitlines()]
    assert lines[0]["process"] == "x" and [line["name"] for line in lines[1:]] == ["v3", "v4"]
    Recorder.off().add("lane", "no", 0, 1)
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_a_folder_that_cannot_be_written_is_logged_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "trace").write_text("a file")
    recorder = Recorder(tmp_path, "x", "learner", range(5))
    recorder.at(1)
    with caplog.at_level(logging.WARNING):
        recorder.add("lane", "name", 0, 1)
    assert "spans are left out" in caplog.text


seconds = st.floats(1e-6, 2.0)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_a_measured_clock_is_wrong_by_its_error_at_most(ahead, delays):
    probe, now = ClockProbe(), START
    for there, back in delays:
        assert probe.ask(now) and not probe.ask(now)
        probe.answer(now + there + ahead, now + there + back)
        now += there + back + 1
    assert abs(probe.ahead_s - ahead) <= probe.error_s + 1e-5
    assert probe.error_s == pytest.approx(min(sum(pair) for pair in delays) / 2, abs=1e-5)


def test_an_answer_without_a_question_counts_nothing():
    probe = ClockProbe()
    assert not probe.answer(START, START + 1)
    probe.ask(START)
    probe.forget()
    assert not probe.answer(START, START + 1) and probe.error_s == float("inf")


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=30)


@given(spans, st.booleans())
def test_no_two_spans_of_a_track_overlap_and_none_is_lost(drawn, at_once):
    lane = Track([Span(start, start + length, str(i)) for i, (start, length) in enumerate(drawn)], at_once=at_once)
    found = tracks(lane)
    assert sorted(span.name for track in found for span in track) == sorted(span.name for span in lane.spans)
    made = events([TraceProcess("x", "learner", lanes={"lane": lane})])
    assert problems([event for event in made if event["ph"] == "X"], nested=not at_once) == []


def head(process, role, *, boot, unix_ns):
    return {"process": process, "role": role, "host": f"host-of-{process}", "pid": 1, "boot": boot, "unix_ns": unix_ns}


def span(lane, name, start, end, **more):
    """In ms of the process's own clock."""
    return {"lane": lane, "name": name, "start": start * MS, "end": end * MS, **more}


@pytest.fixture
def folder(tmp_path):
    """Two steps of 100 ms; learner and replay on one machine, rollout servers there and on one 5 s behind."""
    made = tmp_path / "trace"
    write_lines(made / "replay.jsonl", [
        head("replay", "replay", boot="A", unix_ns=UNIX),
        span("loop", "turn", 1010, 1012),
        *(span("leases of rollout-1", f"group 0/{i}", 1000 + i, 1050 + i, at_once=True) for i in range(3)),
    ])  # fmt: skip
    write_lines(made / "learner-0.jsonl", [
        head("learner-0", "learner", boot="A", unix_ns=UNIX + 77 * MS),  # its Unix clock was set since: no matter
        *(span("steps", "wait_batch", at, at + 60) for at in (1000, 1100)),
        *(span("steps", "update_actor", at + 60, at + 95) for at in (1000, 1100)),
        *(span("steps", f"step {n}", at, at + 100) for n, at in ((3, 1000), (4, 1100))),
        span("weight bus: send", "send of version 2", 1001, 1004),
    ])  # fmt: skip
    unix, behind = UNIX - 400 * MS, -5_000 * MS
    write_lines(made / "rollout-1.jsonl", [
        head("rollout-1", "rollout_server", boot="B", unix_ns=unix + behind),
        {"clock": {"ahead_s": 5.9, "error_s": 0.9}}, {"clock": {"ahead_s": 5.0, "error_s": 0.001}},
        span("weights", "paused", 1420, 1430),  # at 1020 ms of replay's clock
        span("groups", "group 0/0", 1405, 1440, at_once=True, parts=[["sample", 1405 * MS, 1430 * MS]]),
        span("groups", "group 0/9", 100, 200, at_once=True),  # long before the window
    ])  # fmt: skip
    at = START + 1
    write_lines(tmp_path / "timeline.jsonl", [
        *({"time": at, "name": f"rollout-{i}", "event": "joined", "role": "rollout_server"} for i in (1, 2)),
        {"time": at, "name": "rollout-2", "state": "rollout", "version": 2},
        {"time": at, "name": "rollout-1", "state": "wait", "version": 2},
        {"time": at + 0.08, "name": "rollout-1", "state": "rollout", "version": 2},
        {"time": at + 1, "name": "replay", "event": "ended", "why": "", "failed": False},
    ])  # fmt: skip
    profile = {"baseTimeNanoseconds": UNIX, "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "main"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 1147e3, "dur": 500.5, "args": {"Ev Idx": 1}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 1147e3, "dur": 50e3, "args": {"stream": 7}},
        {"ph": "X", "name": "profiler", "pid": "Spans", "tid": 7, "ts": 1e6, "dur": 5},
        {"ph": "s", "id": 1, "pid": 1, "tid": 7, "ts": 1147e3},
    ]}  # fmt: skip
    (made / "torch-0.json").write_text(json.dumps(profile))
    return tmp_path


def test_processes_of_two_machines_come_onto_one_clock(folder):
    path, _, steps = merge(folder)
    assert path.name == "steps_3_4.json.gz" and list(steps) == [3, 4]
    found = parsed(path)
    assert problems(found.spans) == []
    first = found.span("learner-0", "steps", "step 3")["ts"]

    def at(process, lane, name):
        return (found.span(process, lane, name)["ts"] - first) / 1e3

    assert at("learner-0", "steps", "step 4") == pytest.approx(100)
    assert at("replay", "loop", "turn") == pytest.approx(10)
    assert at("rollout-1", "weights", "paused") == pytest.approx(20)
    assert at("rollout-1", "groups 1", "sample") == pytest.approx(5)
    assert at("rollout-2", "state", "rollout, version 2") == pytest.approx(0, abs=1)
    assert at("learner-0", "torch: CPU main", "aten::mm") == pytest.approx(70)  # 147 - 77 by its own Unix clock
    assert found.span("learner-0", "torch: GPU 0 stream 7", "gemm")["args"] == {"stream": 7}
    assert "group 0/9" not in {event["name"] for event in found.spans}
    assert {found.lanes[place] for place in found.lanes} >= {("replay", f"leases of rollout-1 {n}") for n in (1, 2, 3)}
    clocks = found.other["clocks"]
    assert clocks["learner-0"] == "the monotonic clock of replay's machine"
    assert "+5000.000 ms" in clocks["rollout-1"] and "wrong by 1.000 ms at most" in clocks["rollout-1"]
    assert "timeline.jsonl" in clocks["rollout-2"]


def test_the_command_names_the_bubble(folder, capsys):
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "steps 3 to 4: 0.200 s" in said and "learner-0  wait_batch 60%  update_actor 35%" in said
    assert "GPU 0 stream 7 25%" in said
    assert "longest bubble: learner-0 waits 0.060 s for the batch of step 3, while rollout-1: wait" in said
    assert "rollout-1  wait 40%  rollout 60%  engine paused 5%" in said


def test_what_cannot_be_merged_is_refused_in_one_line(tmp_path, folder, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "trace steps of a run with --profile 3:6" in capsys.readouterr().err
    learner = folder / "trace" / "learner-0.jsonl"
    text = learner.read_text()
    learner.write_text(text + '{"lane": "st')  # killed while it wrote
    assert main([str(folder)]) == 0
    learner.write_text("broken\n" + text)
    with pytest.raises(TraceError, match=r"learner-0\.jsonl, line 1: no JSON"):
        merge(folder)
    learner.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(TraceError, match="no whole step there yet"):
        merge(folder)
    learner.write_text(text)
    timeline = folder / "timeline.jsonl"
    lines = timeline.read_text().splitlines()
    timeline.write_text("\n".join([lines[0], lines[1][:20] + lines[1], *lines[2:]]) + "\n")  # the disk was full
    assert main([str(folder)]) == 2
    assert "timeline.jsonl, line 2: no JSON: " in capsys.readouterr().err
    timeline.write_text("\n".join(lines) + '\n{"time": 1')
    assert main([str(folder)]) == 0
    (folder / "trace" / "torch-0.json").write_text("{")
    with pytest.raises(TraceError, match="not a whole profile of torch"):
        merge(folder)


def test_clocks_of_one_machine_need_no_measurement(tmp_path, monkeypatch):
    assert trace.boot() == trace.boot() != ""
    before = trace.now_ns() + trace.unix_minus_monotonic_ns()
    assert abs(before - trace.time.time_ns()) < 50 * MS
    monkeypatch.setattr(trace, "BOOT", tmp_path / "none")
    assert trace.boot() == trace.socket.gethostname()
