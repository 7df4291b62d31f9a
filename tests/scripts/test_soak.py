"""A soak: slopes from what processes wrote, and a short one of real processes that is cut in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.soak.slopes import lives, slopes
from tests.support.runs import ROOT, environment

MIB = 2**20


def write(path: Path, pid: int, role: str, *, begin: float, minutes: int, per_h: float, files: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for minute in range(minutes):
            grown = {"memory_bytes": int((100 + per_h * minute / 60) * MIB), "threads": 4}
            line = {"time": begin + 60 * minute, "pid": pid, "role": role, "descriptors": 10 + files * minute}
            file.write(json.dumps({**line, **grown}) + "\n")


def test_slopes_are_of_lives_and_weighted_by_their_length(tmp_path):
    vitals = tmp_path / "leg-1" / "vitals"
    write(vitals / "rollout-0.jsonl", 1, "rollout", begin=0, minutes=70, per_h=10)
    write(vitals / "rollout-0.jsonl", 2, "rollout", begin=4200, minutes=130, per_h=40, files=1)
    write(vitals / "rollout-0.jsonl", 3, "rollout", begin=12000, minutes=20, per_h=9000)  # too short
    write(vitals / "replay.jsonl", 9, "replay", begin=0, minutes=200, per_h=0)
    assert [(role, len(samples)) for role, samples in lives(vitals / "rollout-0.jsonl")] == [
        ("rollout", 70),
        ("rollout", 130),
        ("rollout", 20),
    ]
    found = slopes([tmp_path / "leg-1"])
    one, two = 59 / 60, 119 / 60  # without the first ten minutes of each
    expected = (10 * one + 40 * two) / (one + two)
    assert found["rollout"]["memory_mib_per_h"] == pytest.approx(expected, rel=0.03)
    assert found["rollout"]["descriptors_per_h"] == pytest.approx(60 * two / (one + two), rel=0.03)
    assert found["rollout"]["hours"] == pytest.approx(one + two, abs=0.01)
    assert found["replay"] == {
        "memory_mib_per_h": 0.0,
        "descriptors_per_h": 0.0,
        "threads_per_h": 0.0,
        "hours": 3.15,
        "memory_mib": 100.0,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_soak_that_is_stopped_goes_on_and_ends_in_order(tmp_path):
    """Stopped by SIGTERM after its terminal is gone; the next one goes on with the same run."""
    words = ["--hours", "0.025", "--restart-minutes", "0.3", "--step-seconds", "1", "--settle-minutes", "0.1"]
    command = [sys.executable, "-m", "scripts.soak", *words, "--out", str(tmp_path)]

    def start(**streams: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, cwd=ROOT, env=environment(), **streams)

    reading, writing = os.pipe()
    first = start(stdout=writing)
    os.close(writing)
    os.close(reading)  # whoever reads its output is gone
    deadline = time.monotonic() + 240
    while "SIGKILL" not in ((tmp_path / "soak.log").read_text() if (tmp_path / "soak.log").exists() else ""):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    first.send_signal(signal.SIGHUP)
    time.sleep(3)
    assert first.poll() is None
    first.terminate()
    assert first.wait(150) == 1, "it is not complete"
    second = start(stdout=subprocess.PIPE)
    said, _ = second.communicate(timeout=300)
    found = json.loads(said)
    assert second.returncode == 0 and found["ok"] and found["complete"], found
    assert found["lost"] == found["non_finite"] == found["out_of_memory"] == found["trained_twice"] == 0
    assert sum(found["planted"].values()) >= 2 and found["steps"] > 3
    assert {"learner", "replay", "rollout", "reward", "environment", "launcher"} == set(found["slopes"])
    assert json.loads((tmp_path / "soak.json").read_text()) == found
    assert not (tmp_path / "leg-1" / "journal").exists(), "what was in order is deleted"
