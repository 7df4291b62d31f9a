"""The quick start's input is made once, by whichever process of a run needs it first."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs import load
from learner.launch.preflight import make_input

PYTHON = """#!/bin/bash
# `python -m learner.examples.sort6 ...` with two steps of warm-up
exec {python} -c 'import sys
from learner.examples import sort6
sort6.SFT_STEPS = 2
sys.exit(sort6.main(sys.argv[1:]))' "${{@:3}}"
"""


def test_two_processes_that_need_it_at_once_both_find_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = tmp_path_factory.mktemp("bin") / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    folder = tmp_path / "sort6"
    paths = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]
    config = load("quickstart", paths)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make_input, [config, config], ["quickstart", "quickstart"])) == [True, True]
    assert (folder / "model" / "config.json").is_file() and (folder / "eval.jsonl").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["sort6"], "nothing half made is left beside it"
    assert not make_input(config, "quickstart")


def test_other_configurations_are_left_alone(tmp_path: Path) -> None:
    config = load("gsm8k-qwen2.5-1.5b-4gpu", [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl"])
    assert not make_input(config, "gsm8k-qwen2.5-1.5b-4gpu")
    assert list(tmp_path.iterdir()) == []
