"""The benchmark of an update over a slow link between two network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_bench_lines import check

from scripts.bench.core import CaseFailed
from scripts.bench.link import NoLink, cable, summary

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.bench", "link"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def link(tmp_path: Path) -> None:
    try:
        with cable(100, tmp_path):
            pass
    except NoLink as error:
        pytest.skip(f"no link of network namespaces here: {error}")


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"slip{pid}-")]


@pytest.mark.slow
def test_a_tiny_model_over_a_link(link: None) -> None:
    words = [*COMMAND, "--link-mb-s", "100", "--model", "tiny", "--at-most", "inf", "--zstd"]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digests_equal"] is True and found["measured"] == [6, 6]
    assert 0 < found["delta_bytes"] < found["full_bytes"] / 10 and 0 < found["density"] < 0.1
    assert {"wire_s", "verify_s", "apply_s", "total_s"} <= found["delta_phases"].keys()
    check("link", found)


@pytest.mark.slow
def test_ended_from_outside_it_leaves_no_namespace(link: None) -> None:
    words = [*COMMAND, "--link-mb-s", "100", "--versions", "500", "--model", "tiny"]
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(namespaces_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(namespaces_of(process.pid)) == 2
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) and process.returncode == 128 + signal.SIGTERM
    assert namespaces_of(process.pid) == []


def test_without_the_commands_the_error_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoLink, match="iproute2"), cable(100, tmp_path):
        pass


def test_a_median_needs_five_of_each_kind() -> None:
    rows = [{"bytes": 100.0 if number % 2 else 3.0, "total_s": 1.0, "cpu_s": 0.1} for number in range(12)]
    assert summary(rows)["measured"] == [5, 5]
    with pytest.raises(CaseFailed, match="4 versions whole"):
        summary(rows[:-1])
