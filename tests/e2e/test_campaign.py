"""A short campaign of faults against real processes; `python -m scripts.chaos --faults 200` is the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FAULTS = "kill replay,kill learner,kill server,torn journal,flip up,cut,full disk"


def test_nothing_is_lost_doubled_hung_or_unnamed(tmp_path, sort6):
    command = [sys.executable, "-m", "scripts.chaos", "--faults", "6", "--seed", "335", "--only", FAULTS]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work"), "--data", str(sort6.folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = ("lost", "trained_twice", "hung", "unnamed", "ended_early", "violations")
    assert {key: found[key] for key in wrong} == dict.fromkeys(wrong, 0)
    assert found["faults"] == 6
    assert found["acked"] >= found["trained"] > 6 * 10, "real groups were acked, and real steps trained"
    assert found["repeated_steps"] > 0, "a learner was killed, and repeated what the journal has"
