"""A run folder that commit a694bf1 wrote is resumed: its checkpoint, its journal, its configuration."""

import json
import tarfile

import pytest

from tests.support.runs import ROOT


@pytest.mark.e2e
def test_a_run_of_commit_a694bf1_is_resumed(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tarfile.open(ROOT / "tests" / "frozen" / "runs_a694bf1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    ledger = tmp_path / "runs" / "finished" / "ledger.jsonl"
    before = ledger.read_text().splitlines()
    words = ["--resume", "runs/finished", "--steps", "6"]  # its configuration has relative paths
    run = launch.start(["learner.main", *words], tmp_path / "runs" / "finished", cwd=tmp_path)
    assert run.wait() == 0, run.text()
    after = ledger.read_text().splitlines()
    assert after[: len(before)] == before and len(before) == 4
    steps = [json.loads(line) for line in after[4:]]
    assert [step["step"] for step in steps] == [5, 6]
    trained = [tuple(group) for line in after for group in json.loads(line)["groups"]]
    assert len(trained) == len(set(trained)) == 24
    assert all(step["incarnation"] == 2 for step in steps)
