"""What `pip install slipstream-rl` brings, away from a clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of this tree, without any leftover of an earlier build."""
    copy = tmp_path_factory.mktemp("tree") / "slipstream"
    copy.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "out", "."]
    subprocess.run(build, cwd=copy, check=True, capture_output=True, timeout=350)
    (made,) = (copy / "out").glob("*.whl")
    return made


def test_the_wheel_has_the_five_packages_and_no_scripts(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert "configs/quickstart.yaml" in names


def test_an_installed_wheel_runs_its_commands_outside_a_clone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=350)
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def python(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=350
        )

    where = python("-c", "import learner, replay; print(learner.__file__, replay.__file__)")
    assert where.stdout.count(str(target)) == 2, where
    assert python("-m", "learner.main", "--help").returncode == 0
    made = python(str(target / "bin" / "slipstream"), "keys", "--out", "keys")
    assert made.returncode == 0 and (tmp_path / "keys" / "server.key").is_file(), made
    planned = python("-m", "slipstream.launch", "learner", "--slurm", "--dry-run", "--config", "quickstart")
    assert planned.returncode == 0 and "learner ranks 0-1" in planned.stdout, planned
