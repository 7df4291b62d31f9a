"""`python -m scripts.journeys`: what it prints and when it fails; whole journeys are slow tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.journeys import collapse
from scripts.journeys.narration import Failed, Journey
from tests.support.runs import ROOT

SAYS = "import sys; print('a\\nready now\\nlast'); sys.exit({})"


@pytest.fixture
def journey(tmp_path: Path) -> Journey:
    return Journey("here", tmp_path, sys.executable)


def test_a_step_tells_its_command_its_lines_and_its_seconds(journey, capsys):
    journey.run("python", "-c", SAYS.format(0), tell=["ready", "^last"])
    journey.close(ok=True)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("$ python -c ") and said[1:3] == ["    ready now", "    last"]
    assert said[3].endswith(" s)") and "    a" not in said
    summary = json.loads(said[-1])
    assert summary["journey"] == "here" and summary["ok"] is True and [step["code"] for step in summary["steps"]] == [0]


@pytest.mark.parametrize(("code", "tell"), [(3, []), (0, ["not said"])])
def test_another_exit_code_or_a_missing_line_ends_the_journey(code, tell, journey):
    with pytest.raises(Failed, match="last"):
        journey.run("python", "-c", SAYS.format(code), tell=tell)


def test_what_goes_on_in_another_terminal_is_waited_for_and_ended(journey):
    waits = journey.start("python", "-c", "import time; print('up', flush=True); time.sleep(600)")
    journey.wait(lambda: "up" in waits.text(), "its word", 30, waits)
    journey.close(ok=False)
    assert waits.process.poll() is not None
    ended = journey.start("python", "-c", "print('gone')")
    with pytest.raises(Failed, match="gone"):
        journey.wait(lambda: False, "nothing", 30, ended)


def test_what_moved_first_comes_first_and_a_run_that_did_not_collapse_is_refused(tmp_path):
    healthy = {"training/ess": 0.99, "actor/ppo_kl_k3": 0.01, "critic/rewards/mean": 0.9}
    rows = [{"step": step, **healthy} for step in range(38, 43)]
    rows += [{**healthy, "step": 43, "training/ess": 0.1, "actor/ppo_kl_k3": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(Failed, match="critic/rewards/mean never crossed"):
        collapse.first_moves(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**healthy, "step": 44, "critic/rewards/mean": 0.0, "training/ess": None}) + "\n")
    assert collapse.first_moves(tmp_path) == {"training/ess": 43, "actor/ppo_kl_k3": 43, "critic/rewards/mean": 44}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["first-ten-minutes", "my-run-hangs", "my-reward-collapsed"])
def test_a_journey_arrives(name, tmp_path):
    words = [sys.executable, "-m", "scripts.journeys", name, "--installed", "--folder", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is True
