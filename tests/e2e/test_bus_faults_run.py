"""Two faults of replay at points of an update, in a real run; `python -m scripts.chaos bus` has the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


def test_a_run_goes_on_from_faults_of_replay_in_the_middle_of_an_update(tmp_path, sort6):
    command = [sys.executable, "-m", "scripts.chaos", "bus", "--roles", "replay", "--faults", "kill,slow"]
    done = subprocess.run(
        [*command, "--only", "gathering", "--work", str(tmp_path / "work"), "--data", str(sort6.folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["cases"], found["hung"], found["unnamed"], found["violations"]) == (2, 0, 0, 0)
    assert found["digests_equal"] is True and found["longest_s"] <= found["deadline_s"]
    assert "was killed by SIGKILL" in done.stdout or "died: killed by SIGKILL [closed]" in done.stdout
