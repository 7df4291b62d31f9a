"""Commands that moved answer under their old names."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.moved import MOVED

ROOT = Path(__file__).parents[2]


def test_an_old_name_says_the_new_one_and_does_its_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.make_keys", "--out", str(tmp_path / "keys")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "scripts.make_keys is now: python -m replay.keys\n")
    assert (tmp_path / "keys" / "server.key").is_file()
    with pytest.raises(ImportError, match=r"scripts\.make_keys is now: python -m replay\.keys"):
        importlib.import_module("scripts.make_keys")


def test_every_new_name_is_a_module_and_no_old_one_is_a_file() -> None:
    assert [new for new in MOVED.values() if importlib.util.find_spec(new.split()[0]) is None] == []
    files = [ROOT / old.replace(".", "/") for old in MOVED]
    assert [str(path) for path in files if path.with_suffix(".py").exists() or (path / "__init__.py").exists()] == []
