"""`--dry-run` makes nothing, whatever is missing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_makes_nothing_and_says_what_a_run_would_make(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "learner.main", "--dry-run", "--set", "reward.workers=2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "a run would first make the quick start's model and prompts in data/sort6" in done.stderr
    assert "64 prompts × 8 = 512 trajectories a step" in done.stderr and "python -m replay.main" in done.stdout
    assert list(tmp_path.iterdir()) == []
