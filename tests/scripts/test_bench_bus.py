"""The benchmark of the weight bus: a small one from its command to its line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bench_lines import check

from scripts.bench.model import density, make, read, versions


@pytest.mark.slow
def test_a_small_job_measures_whole_versions_and_changes_beside_the_raw_broadcast(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench", "bus", "--device", "cpu", "--quick", "--shape", "tiny"]
    command += ["--receivers", "1", "--versions", "6", "--kept", "2", "--tokens", "32", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "out").read_text())
    check("bus", result)
    assert result["digests_equal"] and result["delta_ratio"] > 20 and 0 < result["density"] < 0.03
    for key in ("sync_over_raw", "wire_over_raw", "raw_s", "sync_s", "delta_sync_s", "delta_cpu_s", "receivers_cpu_s"):
        assert result[key] > 0, key
    assert result["phases"].keys() >= {"gather_s", "wire_s", "verify_s", "apply_s", "learner_digest_s"}
    assert result["pause_ms_max"] is not None


def test_the_versions_are_those_of_adam(tmp_path: Path) -> None:
    make("tiny", tmp_path / "model", 0)
    settings = {"count": 2, "device": torch.device("cpu"), "seed": 1}
    made = versions(tmp_path / "model", before=40, lr=1e-6, **settings)
    assert made[0].keys() == dict(read(tmp_path / "model")).keys()
    assert 0.002 < density(*made) < 0.02, "about one element in a hundred after forty steps (PULSE, 2602.03839)"
    coarse = versions(tmp_path / "model", before=40, lr=1e-3, **settings)
    assert density(*coarse) > 0.5
