"""What the dashboard reads out of a run folder: curves, lanes, fleet, trajectories."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from slipstream.view.dashboard import pipeline, series
from slipstream.view.dashboard.run import RunReader
from slipstream.view.dashboard.trajectories import SORTABLE, Trajectories
from tests.support import dashboard_runs

ROOT = Path(__file__).parents[2]
START = dashboard_runs.START
FILE = "rollouts/step_3/rank_0.jsonl"


@pytest.fixture
def folder(tmp_path):
    return dashboard_runs.write(tmp_path / "run")


def state_of(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config.yaml and no metrics.jsonl .* name a run folder"):
        RunReader(tmp_path)


@pytest.mark.parametrize("section", ["learner", "replay", "rollout"])
def test_a_configuration_without_the_keys_of_a_section_is_refused_by_name(folder, section):
    (folder / "config.yaml").write_text(f"{section}:\n")
    with pytest.raises(ConfigError, match=rf"config.yaml: {section}: None has no keys; restore"):
        RunReader(folder)


def test_every_metric_that_is_drawn_is_documented():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    drawn = [name for _, _, metrics in series.PANELS for name in metrics]
    assert [name for name in drawn if f"`{name}`" not in page] == []


def test_curves_follow_the_file_and_begin_again_where_it_was_written_anew(folder):
    run = RunReader(folder)
    first = run.metrics()
    reward = first["panels"][0]["lines"][0]["mean"]
    assert (first["step"], first["axis"], len(reward)) == (10, list(range(1, 11)), 10)
    assert first["evaluations"]["greedy"] == ([0, 10], [0.0, 1.0]) and first["lag_tokens"] == {0: 100, 1: 900}
    assert run.metrics(first["stamp"])["same"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**dashboard_runs.metrics_row(11), "critic/score/mean": None}) + "\n" + '{"torn')
    second = run.metrics(first["stamp"])
    assert second["step"] == 11 and second["panels"][0]["lines"][0]["mean"][-1] is None
    anew = folder / "metrics.jsonl.new"  # as --resume does
    dashboard_runs.write_lines(anew, [dashboard_runs.metrics_row(step) for step in (1, 2)])
    anew.replace(folder / "metrics.jsonl")
    assert run.metrics(second["stamp"])["axis"] == [1, 2]


def test_any_metric_has_its_curve_and_not_too_many_at_once(folder):
    run = RunReader(folder)
    names = run.metrics()["names"]
    assert "timing_s/wait_batch" in names and not {"step", "time"} & set(names)
    found = run.series(["timing_s/wait_batch", "no such"])
    assert found["axis"] == list(range(1, 11)) and [panel["title"] for panel in found["panels"]][1] == "no such"
    assert [panel["lines"][0]["mean"] for panel in found["panels"]] == [[0.2] * 10, [None] * 10]
    with pytest.raises(ValueError, match="61 metrics at once, 60 are allowed"):
        run.series(["x"] * 61)


def test_a_broken_line_is_named(folder):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([text[0], "<broken>", *text[1:]]) + "\n")
    found = RunReader(folder).metrics()
    assert found["broken"] == "metrics.jsonl, line 2: '<broken>' is no JSON object" and found["step"] == 10


def test_a_row_whose_step_is_no_number_is_left_out_and_named(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x"}\n{"step": null}\n')
    found = RunReader(folder).metrics()
    lines = len((folder / "metrics.jsonl").read_text().splitlines())
    assert found["broken"] == f"metrics.jsonl, line {lines - 1}: step 'x' is no number" and found["step"] == 10


def test_a_long_run_is_thinned_and_keeps_its_extremes(tmp_path):
    rows = [{"step": step, "time": step, "critic/score/mean": float(step == 4321)} for step in range(1, 10_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = RunReader(tmp_path).metrics()
    line = found["panels"][0]["lines"][0]
    assert len(found["axis"]) == len(line["mean"]) == series.MAX_POINTS and found["axis"][-1] == 10_000
    assert max(line["high"]) == 1 and max(line["mean"]) < 0.5 and max(line["low"]) == 0


def test_the_learners_phases_stand_in_order_and_leave_their_bubble(folder):
    found = RunReader(folder).pipeline(START + 0.99, START + 2.0)
    learner = next(lane for lane in found["lanes"] if lane["name"] == "learner")
    step_2 = [span for span in learner["spans"] if span[3].startswith("step 2")]
    times = [(round(start - START, 3), round(end - START, 3), kind) for start, end, kind, _ in step_2]
    assert times == [(1.0, 1.2, "wait"), (1.2, 1.7, "train"), (1.7, 1.8, "publish"), (1.8, 2.0, "publish")]
    assert learner["shares"]["wait"] == pytest.approx(0.2, abs=0.01)


def test_the_longest_bubble_comes_first_and_a_lost_server_has_no_span(folder):
    found = RunReader(folder).pipeline(None, None)
    waits = [bubble["seconds"] for bubble in found["bubbles"]]
    assert waits == sorted(waits, reverse=True) and waits[0] == pytest.approx(0.3, abs=0.01)
    server = next(lane for lane in found["lanes"] if lane["name"] == "rollout-0")
    lost = START + 5.85
    assert not [span for span in server["spans"] if span[0] < lost < span[1]]
    assert found["whole"][1] == START + 10  # nothing runs on after the end


spans = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 99), st.sampled_from(("wait", "train"))), max_size=40)


@given(spans)
@settings(max_examples=60)
def test_bins_of_a_crowded_window_add_up_to_its_spans(drawn):
    lane = pipeline.Lane("x")
    at = START
    for gap, length, kind in drawn:
        lane.add(at + gap / 1000, at + (gap + length) / 1000, kind, "")
        at += (gap + length) / 1000
    edges = np.linspace(START - 1, at + 1, pipeline.BINS + 1)
    found = pipeline._bins(lane.spans, edges)
    for kind in ("wait", "train"):
        seconds = sum(end - start for start, end, other, _ in lane.spans if other == kind)
        shares = found.get(kind, [])
        assert sum(shares) * (edges[1] - edges[0]) == pytest.approx(seconds, abs=0.0006 * pipeline.BINS * 0.1 + 0.01)
        assert all(-0.001 <= share <= 1.001 for share in shares)


def test_a_crowded_window_comes_as_shares(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_SPANS", 20)
    found = RunReader(dashboard_runs.write(tmp_path / "run")).pipeline(None, None)
    assert all("bins" in lane and "spans" not in lane for lane in found["lanes"])


def test_restarts_quarantines_and_the_end_are_counted(folder):
    (folder / "logs").mkdir()
    log = "2026-01-01 10:00:00,1 rollout-0 INFO fine\n2026-01-01 10:00:01,1 rollout-0 ERROR weights are not live\n"
    (folder / "logs" / "rollout-0.log").write_text(log)
    again = "2026-01-01 10:00:02,1 launcher WARNING weights are not live\n"
    again += "2026-01-01 10:00:03,1 launcher ERROR it stops\n"
    (folder / "logs" / "launcher.log").write_text(again)
    found = RunReader(folder).fleet()
    (server,) = found["peers"]
    shown = {key: server[key] for key in ("restarts", "quarantines", "losses", "pid", "connected", "why", "groups")}
    assert shown == {
        "restarts": 1, "quarantines": 1, "losses": 1, "pid": 2, "connected": False, "why": "the run has ended",
        "groups": 40,
    }  # fmt: skip
    assert [event.get("event", event.get("state")) for event in found["events"]] == [
        "ended", "quarantined", "joined", "lost", "joined",
    ]  # fmt: skip
    assert [line["text"] for line in found["log"]] == ["it stops", "weights are not live"]


def indexed(folder):
    index = Trajectories(folder, max_new_tokens=6)
    index.scan()
    assert index.wait(30)
    return index


def page(index, filters=None, *, kind="", problem="", sort="step", descending=False, first=0, count=200):
    wish = {"sort": sort, "descending": descending, "first": first, "count": count}
    found = index.page(filters or {}, kind=kind, problem=problem, **wish)
    assert index.wait(30)  # the page has begun a scan; one that goes on would read what the test writes next
    return found


def test_filters_orders_and_pages(folder):
    before = state_of(folder)
    index = indexed(folder)
    everything = page(index)
    assert (everything["total"], everything["found"], len(everything["rows"])) == (81, 81, 81)
    right = page(index, {"reward": (1, math.inf)}, kind="trained")
    assert right["found"] == 40 and {row["reward"] for row in right["rows"]} == {1.0}
    assert {row["lag"] for row in page(index, {"lag": (1, 1)})["rows"]} == {1}
    assert {row["length"] for row in page(index, problem="cut", kind="trained")["rows"]} == {6}
    for column in SORTABLE:
        values = [row[column] for row in page(index, kind="trained", sort=column)["rows"]]
        assert values == sorted(values), column
    for descending in (False, True):
        last = page(index, sort="advantage", descending=descending)["rows"][-1]
        assert last["kind"] == "evaluation" and last["advantage"] is None
    ids = [row["id"] for first in range(0, 81, 9) for row in page(index, sort="reward", first=first, count=9)["rows"]]
    assert len(set(ids)) == 81  # equal rewards everywhere, and no line twice
    with pytest.raises(KeyError, match="none of"):
        page(index, sort="offset")
    assert state_of(folder) == before


def test_a_trajectory_has_its_numbers_and_turns(folder):
    index = indexed(folder)
    for row in page(index, kind="trained")["rows"]:
        found = index.one(row["id"])
        assert row["id"].rpartition(":")[0] == row["file"]
        line = found["line"]
        lags = [found["step"] - 1 - version for version in line["versions"]]
        assert (found["lag"], found["length"]) == (max(lags), len(line["tokens"]))
        assert found["turns"] == len(re.findall("1+", "".join(map(str, line["loss_mask"]))))
        assert found["ratio"] == pytest.approx(math.exp(0.01), abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        ":0",
        "config.yaml:0",
        "../config.yaml:0",
        "/etc/passwd:0",
        *(f"{FILE}:{end}" for end in ("", "1", "-1", "9" * 40)),
    ],
)
def test_an_id_that_no_page_gave_is_refused(folder, name):
    with pytest.raises(KeyError):
        indexed(folder).one(name)


def test_new_files_of_a_live_run_come_and_broken_lines_are_named(folder):
    index = indexed(folder)
    path = folder / "rollouts" / "step_11" / "rank_0.jsonl"
    dashboard_runs.write_lines(
        path, [dashboard_runs.trajectory(11, 0), {"reward": 1}, dashboard_runs.trajectory(11, 2)]
    )
    with path.open("a") as file:
        file.write('{"torn')
    index.scan()
    assert index.wait(30)
    found = page(index)
    assert found["found"] == 83 and found["broken"].startswith("rollouts/step_11/rank_0.jsonl, line 2 is left out: Key")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("rollouts/step_10.bak/rank_0.jsonl", "it is not named as rollouts/step_N/rank_N.jsonl"),
        ("rollouts/step_10/rank_0.old.jsonl", "it is not named as rollouts/step_N/rank_N.jsonl"),
        ("evaluations/version_old.jsonl", "it is not named as evaluations/version_N.jsonl"),
        ("rollouts/step_11/rank_0.jsonl/folder", "IsADirectoryError"),
    ],
)
def test_a_file_that_is_none_of_the_run_s_is_left_out_by_name_until_it_is_gone(folder, odd, why):
    path = folder / odd
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    index = indexed(folder)
    found = page(index)
    assert found["found"] == 81
    assert found["broken"].startswith(f"{odd.removesuffix('/folder')} is left out: ") and why in found["broken"]
    path.unlink()
    path.parent.rmdir() if odd.endswith("folder") else None
    index.scan()
    assert index.wait(30) and page(index)["broken"] == ""


@pytest.mark.parametrize("when", ["stat", "open"])
def test_a_file_that_is_pruned_while_it_is_looked_for_keeps_no_other_from_the_page(folder, monkeypatch, when):
    pruned, real = folder / FILE, getattr(Path, when)

    def gone(path, *given, **named):
        if path == pruned:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(Path, when, gone)
    found = page(indexed(folder))
    assert found["found"] == 73, "all lines but those of this file"
    assert found["broken"].startswith(f"{FILE} is left out: FileNotFoundError")


@pytest.mark.parametrize(("anew", "why"), [("", "was deleted since"), ('{"sh', "was written anew since")])
def test_a_file_that_goes_after_it_was_indexed_is_named_and_its_lines_go_at_the_next_look(folder, anew, why):
    index, path = indexed(folder), folder / FILE
    name = next(row["id"] for row in page(index)["rows"] if row["file"] == FILE)
    path.unlink()
    if anew:
        path.write_text(anew)
    with pytest.raises(ValueError, match=f"^{re.escape(FILE)} {why}"):
        index.one(name)
    first, second = page(index), page(index)
    if first["found"] != second["found"]:  # else the scan that a page begins has been quick
        assert first["found"] == 81 and first["broken"].startswith(f"{FILE} {why}")
    assert 0 < second["found"] < 81 and second["broken"] == "" and FILE not in {row["file"] for row in second["rows"]}
    with pytest.raises(KeyError, match="its file was deleted or written anew since"):
        index.one(name)


def test_a_file_that_a_disk_refuses_for_a_while_keeps_its_lines(folder, monkeypatch):
    index, refused, real = indexed(folder), folder / FILE, Path.stat

    def stat(path, **named):
        if path == refused:
            raise OSError(5, "Input/output error", str(path))
        return real(path, **named)

    monkeypatch.setattr(Path, "stat", stat)
    assert page(index)["found"] == page(index)["found"] == 81


def test_a_number_that_no_column_holds_leaves_out_its_file(folder):
    path = folder / "rollouts" / "step_11" / "rank_0.jsonl"
    dashboard_runs.write_lines(path, [{**dashboard_runs.trajectory(11, 0), "trajectory": 2**70}])
    found = page(indexed(folder))
    assert found["found"] == 81 and found["broken"].startswith("rollouts/step_11/rank_0.jsonl is left out: Overflow")
