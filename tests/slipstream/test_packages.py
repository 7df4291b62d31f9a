"""A project of the user whose packages have the names of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.launch import children
from slipstream.runtime import packages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in ("configs", "replay"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "mine.py").write_text("WORD = 'found'\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_child_imports_our_packages_and_then_the_projects(project):
    code = "import configs.loading, replay.messages, mine; print(mine.WORD)"
    child = children.start("replay", [sys.executable, "-c", code], project / "logs" / "replay.log", {})
    assert child.process.wait(30) == 0, child.log_path.read_text()
    help_of = [sys.executable, "-m", "rollout_server.main", "--help"]
    assert children.start("rollout-0", help_of, project / "logs" / "rollout-0.log", {}).process.wait(60) == 0


@pytest.mark.parametrize("module", ["learner.main", "rollout_server.main", "slipstream.launch"])
def test_a_start_that_would_import_the_projects_names_both(project, module):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project), str(ROOT)])}
    words = [sys.executable, "-m", module, "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and str(project / "configs") in said and str(ROOT / "configs") in said


def test_the_command_refuses_in_one_line(project):
    code = "import sys; from slipstream.command import main; sys.exit(main(['train', '--dry-run']))"
    environment = {**os.environ, "PYTHONPATH": str(project), packages.SAFE_PATH: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("slipstream: refused: configs: ")
    assert len(done.stderr.splitlines()) == 1
