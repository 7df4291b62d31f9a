"""`slipstream top`: a run that lives, one that has ended, and what is no run."""

import json
import time
from pathlib import Path

import pytest

from configs import load
from configs.loading import dump
from replay import keys as make_keys
from replay.channel import load_keys
from slipstream.runtime import ending
from slipstream.view import top
from slipstream.view.dashboard.run import RunReader
from tests.security import served_replay


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run leaves: configuration, two steps, a log with a guard."""
    monkeypatch.setattr(top, "ANSWER_S", 0.2)
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text(dump(load("quickstart", ["placement.device=cpu", "learner.total_steps=3"])))
    rows = [{"step": step, "time": 1000.0 + step, "critic/score/mean": step / 4} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = (
        "2026-11-23 01:00:00,000 learner-0 WARNING guard: step 2: (limits.ess) low\n2026-11-23 01:00:00,000 x INFO y\n"
    )
    (tmp_path / "logs" / "learner-0.log").write_text(log)
    return tmp_path


def note(run_dir: Path, address: str) -> None:
    """What replay notes of itself."""
    (run_dir / "processes").mkdir()
    member = {"name": "replay", "pid": 1, "host": "h", "started": 0, "replay": address, "keys": None}
    (run_dir / "processes" / "replay.json").write_text(json.dumps(member))


def test_a_run_that_has_ended_shows_what_it_came_to(run_dir, capsys):
    note(run_dir, "tcp://127.0.0.1:9")
    assert top.main([str(run_dir)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "learner-0: guard: step 2: (limits.ess) low"
    assert [line.split("  ")[0] for line in said[1:3]] == ["step 1/3", "step 2/3"]
    assert said[-1].startswith("reward 0.25 →")


def test_what_several_logs_say_is_shown_once(run_dir):
    """The launcher's log repeats what it shows, and ranks judge alike."""
    low = "WARNING guard: step {}: (limits.ess) low\n"
    own = "2026-11-23 01:00:01,000 launcher ERROR run stopped: no room [SLIP-CONFIG-10]\n"
    logs = {name: run_dir / "logs" / f"{name}.log" for name in ("learner-0", "learner-1", "launcher")}
    logs["learner-1"].write_text("2026-11-23 01:00:00,001 learner-1 " + low.format(2))
    logs["launcher"].write_text("2026-11-23 01:00:00,100 launcher " + low.format(2) + own)
    folder = top.Folder(run_dir)
    shown = ["learner-0: guard: step 2: (limits.ess) low", "launcher: run stopped: no room [SLIP-CONFIG-10]"]
    assert list(folder.events()) == shown
    for name in ("launcher", "learner-0"):
        with logs[name].open("a") as log:
            log.write(f"2026-11-23 01:00:02,000 {name} " + low.format(3))
    assert list(folder.events()) == ["learner-0: guard: step 3: (limits.ess) low"]


def test_a_run_that_lives_says_who_waits_and_ends_when_replay_goes(run_dir, tmp_path, monkeypatch, capsys):
    """Over sockets with keys, as the launcher asks."""
    make_keys.make(tmp_path / "keys", ["node1"], force=False)
    config = load("quickstart", ["placement.device=cpu", f"network.keys={tmp_path}/keys"])
    (run_dir / "config.yaml").write_text(dump(config))
    monkeypatch.setattr(top, "LOOK_S", 0.01)
    monkeypatch.setattr(top, "ANSWER_S", 20.0)
    with served_replay.served(load_keys(tmp_path / "keys")) as replay:
        note(run_dir, replay.address)
        folder = top.Folder(run_dir)
        state = folder.status()
        assert state is not None and state["groups"]["max"] > 0
        view = top.LiveView(folder.config, "plain")
        top.watch(folder, view, once=True)
        said = capsys.readouterr().out.splitlines()
        assert "replay waits" in said[-2] and [line for line in said if line.startswith("step 1")] == []
        assert top.main(["--line", str(run_dir)]) == 0
        assert capsys.readouterr().out.startswith("version 0: replay waits")
        view = top.LiveView(folder.config, "plain")
        view.update(state, [])
        monkeypatch.setattr(top, "SILENT_LOOKS", 2)
        monkeypatch.setattr(top, "ANSWER_S", 0.2)
        monkeypatch.setattr("slipstream.view.live_view.QUIET_S", 0.0)
    started = time.monotonic()
    top.watch(folder, view, once=False)
    assert time.monotonic() - started < 10
    assert f"replay at {replay.address} does not answer: the run has ended" in capsys.readouterr().out


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_that_has_ended_while_replay_still_answers_is_well_unless_it_failed(run_dir, monkeypatch, capsys, failed):
    state = {"version": 3, "ended": "all steps are done", "failed": failed}
    monkeypatch.setattr(top.Folder, "status", lambda _: state)
    assert top.main(["--line", str(run_dir)]) == failed
    assert capsys.readouterr().out == "version 3: the run has ended: all steps are done\n"


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (130, 0), (None, 1)])
def test_status_says_in_one_line_how_a_run_ended(run_dir, monkeypatch, capsys, code, exit_code):
    monkeypatch.setattr(top, "ask_replay", lambda *_: None)
    note(run_dir, "tcp://127.0.0.1:9")
    if code is not None:
        ending.write(run_dir, code, "run stopped: no room [SLIP-CONFIG-10]")
    assert top.main(["--line", str(run_dir)]) == exit_code
    (line,) = capsys.readouterr().out.splitlines()
    assert ("SLIP-CONFIG-10" in line) is (code is not None)
    assert top.main([str(run_dir), "--plain", "--once"]) == 0
    assert ("SLIP-CONFIG-10" in capsys.readouterr().out) is (code is not None)
    metrics = RunReader(run_dir).metrics()
    assert (metrics["failed"], bool(metrics["ending"])) == (code == 1, code is not None)
    assert (metrics["eta_s"] is None) is (code is not None), "a run that has ended has nothing left"
    ending.clear(run_dir)
    assert ending.read(run_dir) is None


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert top.main([str(tmp_path)]) == top.main(["--line", str(tmp_path)]) == 2
    assert "config.yaml is missing; name the folder of a run" in capsys.readouterr().err
