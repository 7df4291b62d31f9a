"""A run folder that commit a694bf1 wrote is resumed: its checkpoint, its journal, its configuration."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_a_run_of_commit_a694bf1_is_resumed(tmp_path):
    with tarfile.open(ROOT / "tests" / "frozen" / "runs_a694bf1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    ledger = tmp_path / "runs" / "finished" / "ledger.jsonl"
    before = ledger.read_text().splitlines()
    done = subprocess.run(
        [sys.executable, "-m", "learner.main", "--resume", "runs/finished", "--steps", "6"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = ledger.read_text().splitlines()
    assert after[: len(before)] == before and len(before) == 4
    steps = [json.loads(line) for line in after[4:]]
    assert [step["step"] for step in steps] == [5, 6]
    trained = [tuple(group) for line in after for group in json.loads(line)["groups"]]
    assert len(trained) == len(set(trained)) == 24
    assert all(step["incarnation"] == 2 for step in steps)
