"""docs/tutorial.md as a reader follows it: its files are written, its commands are run, in its order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tutorial_trains_a_model_that_answers(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    said = ""
    for language, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")):
        if language == "bash":
            words = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            said += done.stdout + done.stderr
        else:
            name = re.match(r"# (\w+\.\w+)\n", text)
            assert name is not None, f"a block does not begin with its file's name: {text[:60]!r}"
            (tmp_path / name[1]).write_text(text, encoding="utf-8")

    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (summary,) = [line for line in lines if "greedy_after" in line]
    (exported,) = [line for line in lines if "greedy_exported" in line]
    (replayed,) = [line for line in lines if "first_different" in line]
    assert summary["greedy_before"] <= 0.3 and summary["greedy_after"] >= 0.7, summary
    assert summary["digests_equal"] and summary["groups_trained_twice"] == 0
    assert exported["greedy_exported"] == pytest.approx(exported["greedy_reported"])
    assert replayed["equal"] == replayed["steps"] == exported["step"]
    assert re.search(r"^3,8\? \d$", said, re.MULTILINE), said[-500:]
