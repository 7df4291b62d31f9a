"""docs/tutorial.md as a reader follows it: its files are written, its commands are run, in its order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(folder: Path, *, until: str = "") -> str:
    """Write the page's files into a folder and run its commands there, up to a line of one; what they said."""
    said = ""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for language, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")):
        if language != "bash":
            name = re.match(r"# (\w+\.\w+)\n", text)
            assert name is not None, f"a block does not begin with its file's name: {text[:60]!r}"
            (folder / name[1]).write_text(text, encoding="utf-8")
            continue
        before, found, _ = text.partition(f"{until}\n") if until else (text, "", "")
        words = ["bash", "-euo", "pipefail", "-c", before + found]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        said += done.stdout + done.stderr
        if found:
            return said
    assert not until, f"the page has no line {until!r}"
    return said


def test_what_the_tutorial_writes_passes_a_dry_run(tmp_path: Path) -> None:
    said = follow(tmp_path, until="python -m learner.main --config my_run.yaml --dry-run")
    assert (
        "32 prompts × 8 = 256 trajectories a step" in said and "dry run: configuration and files are in order" in said
    )


@pytest.mark.slow
def test_the_tutorial_trains_a_model_that_answers(tmp_path: Path) -> None:
    said = follow(tmp_path)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (summary,) = [line for line in lines if "greedy_after" in line]
    (exported,) = [line for line in lines if "greedy_exported" in line]
    (replayed,) = [line for line in lines if "first_different" in line]
    assert summary["greedy_before"] <= 0.3 and summary["greedy_after"] >= 0.7, summary
    assert summary["digests_equal"] and summary["groups_trained_twice"] == 0
    assert exported["greedy_exported"] == pytest.approx(exported["greedy_reported"])
    assert replayed["equal"] == replayed["steps"] == exported["step"]
    assert re.search(r"^3,8\? \d$", said, re.MULTILINE), said[-500:]
