"""The live view: the words, the panel that a person sees, the plain lines, and that it never ends a run."""

import io
import math
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from configs import load
from slipstream.view import live_text
from slipstream.view.live_text import MetricRows
from slipstream.view.live_view import LiveView
from tests.support.runs import ROOT

ROLLOUT_0 = {"name": "rollout-0", "role": "rollout_server", "version": 12, "activity": "generating", "since_s": 2.3}
ROLLOUT_0 |= {"silent_s": 0.4, "leases": 50, "groups_accepted": 2688}
ROLLOUT_0 |= {"gauges": {"idle_ratio": 0.31, "tokens_per_s": 6100.0}}
STATUS: dict[str, Any] = {
    "version": 12,
    "groups": {"leased": 50, "buffered": 14, "taken": 64, "max": 128},
    "waits": [{"who": "learner", "for": "batch 13 (group 0/17 at rollout-0)", "since_s": 0.4}],
    "peers": [
        {"name": "learner-0", "role": "learner", "activity": "", "silent_s": 0.2},
        ROLLOUT_0,
        {"name": "launcher.7", "role": "launcher"},
    ],
    "counters": {"superseded": 2, "groups_accepted": 2688, "checkpoints": 2, "dropped/poison": 0},
    "ended": None,
}


def step_row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1000 + 0.5 * step,
        "critic/score/mean": step / 20,
        "training/off_policy/trajectory_staleness/mean": 0.94,
        "training/off_policy/trajectory_staleness/max": 1,
        "perf/learner_tokens_per_s": 5132.0,
        "trainer/idle_ratio": 0.12,
        "rollout/idle_ratio": 0.31,
        **values,
    }


ROWS = [
    {"version": 0, "time": 1000.0, "val-core/sort6/greedy": 0.45},
    {"version": 0, "time": 1000.0, "val-core/sort6/sampled": 0.31},
    *(step_row(step) for step in range(1, 13)),
    {"version": 10, "time": 1006.0, "val-core/sort6/greedy": 0.83, "val-core/sort6/sampled": 0.71},
]


def test_the_newest_event_with_a_code_stays_in_sight():
    console = Console(file=io.StringIO(), width=140, height=60, force_terminal=True)
    view = LiveView(load("quickstart", ["placement.device=cpu"]), "rich", console)
    view.update(STATUS, ROWS)
    assert "slipstream explain" not in drawn(view)
    for text in ("old [SLIP-NET-02]", "disk is full [SLIP-CONFIG-10]", *(f"rollout-{n} joined" for n in range(9))):
        view.event(text)
    assert "warning" in drawn(view) and "disk is full [SLIP-CONFIG-10]; slipstream explain SLIP-CONFIG-10" in drawn(
        view
    )
    view.close("")


def drawn(view: LiveView) -> str:
    """The panel as plain text."""
    console = Console(file=io.StringIO(), width=140)
    console.print(view._panel(""))
    return console.file.getvalue()  # type: ignore[attr-defined]


def progress_of(*rows: dict[str, Any]) -> MetricRows:
    progress = MetricRows(80, 1)
    for row in rows:
        progress.add(row)
    return progress


def view(mode: Any, **console: Any) -> LiveView:
    plain = {"width": 110, "height": 60, "_environ": {}}  # whatever terminal the tests run in
    return LiveView(load("quickstart"), mode, Console(record=True, file=io.StringIO(), **plain | console))


def test_the_line_of_a_step():
    line = "step 12/80  reward 0.60  lag 0.9/1  tok/s 5.1k  idle learner 12% rollout 31%  eta 34s"
    assert live_text.step_line(progress_of(*ROWS)) == line
    line = "step 1/80  reward –  lag –/1  tok/s –  idle learner – rollout –  eta –"
    assert live_text.step_line(progress_of({"step": 1, "time": 1.0, "critic/score/mean": None})) == line


def test_a_step_made_once_more_replaces_the_old_line_of_the_run():
    progress = progress_of(*(step_row(step) for step in (1, 2, 3, 4, 3)))
    assert [row["step"] for row in progress.steps] == [1, 2, 3]


LEARNER_WAITS = {"who": "learner", "for": "batch 5", "since_s": 24.0}
SERVERS_WAIT = {"code": "room", "who": "rollout servers", "for": "room: 128 groups are in flight", "since_s": 0.0}
REPLAY_WAITS = {"who": "replay", "for": "a rollout server", "since_s": 75.0}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "replay, the learner and the rollout servers are starting"),
        ({"waits": []}, "no process waits"),
        (STATUS, "learner waits 0.4s for batch 13 (group 0/17 at rollout-0)"),
        ({"waits": [SERVERS_WAIT]}, "rollout servers wait for room: 128 groups are in flight"),
        (
            {"waits": [REPLAY_WAITS, LEARNER_WAITS]},
            "replay waits 1m15s for a rollout server; learner waits 24s for batch 5",
        ),
        (STATUS | {"ended": "all steps are done"}, "the run has ended: all steps are done"),
    ],
)
def test_what_is_waited_for(status, said):
    assert live_text.waiting_text(status) == said


def test_eta_follows_the_speed_of_the_last_steps_without_a_restart():
    slow_start = [step_row(1, time=0.0), step_row(2, time=100.0)]
    steady = [step_row(step, time=100.0 + step + (3600 if step > 30 else 0)) for step in range(3, 41)]
    eta = progress_of(*slow_start, *steady).eta_s()
    assert eta is not None and math.isclose(eta, 40.0)


def test_the_panel_shows_what_a_person_must_know():
    shown = view("rich", force_terminal=True)
    shown.update(STATUS, ROWS)
    shown.event("rollout-1 (pid 77) died: killed by SIGKILL; restart 1 of 3 in 1 s")
    text = shown.console.export_text()
    wanted = ["quickstart", "version 12", "12/80", "eta 34s", "0.60  ▁", "mean 0.94  max 1  bound 1", "5.1k tok/s"]
    wanted += ["greedy 0.83  sampled 0.71  at version 10  (version 0: greedy 0.45  sampled 0.31)"]
    wanted += ["50 leased · 14 buffered · 64 taken = 128 of 128 in flight", "learner 12%, rollout 31%"]
    wanted += ["learner waits 0.4s for batch 13 (group 0/17 at rollout-0)", "superseded 2", "rollout-1 (pid 77) died"]
    assert [each for each in wanted if each not in text] == []
    assert [each for each in ("launcher.7", "poison", "groups_accepted", "checkpoints") if each in text] == []
    peers = [line.strip("│ ").split() for line in text.splitlines() if " ago " in line]
    assert peers[0] == ["rollout-0", "v12", "generating", "2.3s", "0.4s", "ago", "50", "2.7k", "6.1k", "31%"]
    assert peers[1] == ["learner-0", "–", "–", "–", "0.2s", "ago", "–", "–", "–", "12%"]
    shown.close("finished 80 steps in 42.0 s")
    text = shown.console.export_text()
    wanted = ["finished 80 steps in 42.0 s", "reward 0.05 → 0.50 after 12 steps"]
    wanted += ["from version 0 to 10: greedy 0.45 → 0.83, sampled 0.31 → 0.71"]
    assert [each for each in wanted if each not in text] == [] and "learner waits" not in text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_panel_cuts_nothing_off_in_a_narrow_terminal(width):
    console = Console(record=True, file=io.StringIO(), width=width, height=30, force_terminal=True)
    shown = LiveView(load("quickstart"), "rich", console, age_s=61.0)
    shown.update({**STATUS, "peers": [{**ROLLOUT_0, "name": f"rollout-{number}"} for number in range(64)]}, ROWS)
    shown.close("finished")
    text = shown.console.export_text()
    last = text[text.rindex("╭") :]
    assert max(map(len, last.splitlines())) <= width and "…" not in last
    assert "rollout-0" in last and "6.1k" in last and "and 54 more" in last and "1m01s" in last
    assert ("2.3s" in last) is (width >= 100), "wide terminals show since when"


@pytest.mark.parametrize("status", [None, {}, {"peers": [{}]}, {"groups": {}, "waits": [{}], "counters": None}])
@pytest.mark.parametrize("mode", ["rich", "plain", "off"])
def test_missing_keys_do_not_matter(mode, status):
    shown = view(mode, force_terminal=True)
    shown.update(status, [])
    shown.update(status, [{"step": 1}, {"version": 1, "val-core/x/greedy": None}, {"version": 2, "final": True}])
    shown.close("")


def lines(shown: LiveView) -> list[str]:
    assert isinstance(shown.console.file, io.StringIO)
    return shown.console.file.getvalue().splitlines()


def test_plain_mode_is_one_line_a_step_and_one_an_evaluation():
    shown = view("plain")
    shown.update(None, [])
    shown.update(STATUS, ROWS)
    shown.event("rollout-0 died")
    shown.close("finished")
    said = lines(shown)
    shown.event("closed views say nothing")
    assert said == lines(shown)
    assert said[:2] == ["evaluation of version 0  greedy 0.45", "evaluation of version 0  sampled 0.31"]
    assert [line.split()[1] for line in said[2:-3]] == [f"{step}/80" for step in range(1, 13)]
    assert said[-3:-1] == ["evaluation of version 10  greedy 0.83  sampled 0.71", "rollout-0 died"]
    assert said[-1].startswith("reward 0.05 → 0.50 after 12 steps")


def test_auto_takes_the_panel_only_on_a_terminal():
    assert view("auto", force_terminal=True, _environ={"TERM": "xterm"}).mode == "rich"
    assert view("auto", force_terminal=True, _environ={"TERM": "dumb"}).mode == "plain"
    assert view("auto", force_terminal=False).mode == "plain"


def test_plain_mode_says_who_waits_when_nothing_happens(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("slipstream.view.live_view.time.monotonic", lambda: now)
    shown = view("plain")
    for _ in range(70):
        now += 0.5
        shown.update(STATUS, [])
    assert lines(shown) == ["learner waits 0.4s for batch 13 (group 0/17 at rollout-0)"] * 2


READER_GONE = """
import sys
from configs import load
from slipstream.view.live_view import LiveView
view = LiveView(load("quickstart"), sys.argv[1])
sys.stdin.readline()
for step in range(3):
    view.update(None, [{"step": step + 1}])
view.close("finished")
sys.exit(7)
"""


OUTPUTS = {
    "Broken pipe": os.pipe,
    "Input/output error": pty.openpty,
    "No space left on device": lambda: (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)),
}


@pytest.mark.parametrize(("mode", "why"), [*(("plain", why) for why in OUTPUTS), ("rich", "Broken pipe")])
def test_a_reader_that_goes_away_does_not_end_the_run(mode, why):
    reader, output = OUTPUTS[why]()
    command, pipes = [sys.executable, "-c", READER_GONE, mode], dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, cwd=ROOT, stdout=output, **pipes) as child:
        os.close(output)
        os.close(reader)
        errors = child.communicate("go\n", timeout=120)[1]
    assert child.returncode == 7 and "Traceback" not in errors, errors
    assert f"the output was closed or is full ({why}); the run goes on without a live view" in errors


@pytest.mark.parametrize(("mode", "encoding"), [("plain", "latin-1"), ("rich", "ascii:surrogateescape")])
def test_an_output_that_cannot_encode_a_dash_shows_the_rest(mode, encoding):
    command, variables = [sys.executable, "-c", READER_GONE, mode], {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, input=b"go\n", capture_output=True, cwd=ROOT, env=variables, timeout=120)
    assert done.returncode == 7 and done.stderr == b"", done.stderr
    assert b"?" in done.stdout and b"3/80" in done.stdout


def test_a_run_of_days_takes_no_more_memory_than_its_rewards():
    progress = progress_of(*(step_row(step) for step in range(1, 1001)))
    assert [row["step"] for row in progress.steps] == list(range(937, 1001))
    closing = live_text.closing_line(progress)
    assert closing.startswith(f"reward {live_text.number(step_row(1)['critic/score/mean'])} → ")
    assert live_text.step_line(progress).startswith("step 1000/80")


@pytest.mark.parametrize(
    ("split", "learner", "rollout", "said"),
    [
        ((6, 2), 0.03, 0.41, "rollout 41%: move a GPU from rollout to learner (placement.split 6:2 -> 5:3)"),
        ((6, 2), 0.50, 0.10, "rollout 10%: move a GPU from learner to rollout (placement.split 6:2 -> 7:1)"),
        ((7, 1), 0.50, 0.10, ""),
        ((6, 2), 0.30, 0.20, ""),
        (None, 0.03, 0.41, ""),
    ],
)  # fmt: skip
def test_idle_shares_say_which_side_has_a_gpu_to_give(split, learner, rollout, said):
    rows = [step_row(n, **{"trainer/idle_ratio": learner, "rollout/idle_ratio": rollout}) for n in range(1, 41)]
    progress = progress_of(*rows)
    progress.split = split
    assert live_text.split_text(progress).endswith(said) and bool(live_text.split_text(progress)) == bool(said)
    assert live_text.split_text(progress_of(*rows[:39])) == ""


def test_what_was_left_out_is_told_by_count_and_reason():
    row = {"step": 1, "time": 1.0, "critic/score/mean": 0.5, "answers/left_out": 12.0, "answers/kept_length": 25.0}
    row |= {"answers/failed/reward_error": 12.0, "answers/left_out_length": 31.0, "buffer/dropped/poison": 3.0}
    row |= {"answers/failed/environment_error": 0.0, "buffer/dropped/flat_rewards": 9.0}
    said = "left out 12 answers (12 reward_error, 31 tokens each, kept ones 25), 3 prompts (3 poison)"
    assert live_text.step_line(progress_of(row)).endswith(said) and live_text.closing_line(progress_of(row)).endswith(
        said
    )
    assert live_text.lost_text(ROWS[-1]) == ""
