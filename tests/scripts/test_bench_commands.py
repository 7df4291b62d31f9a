"""Whole benchmarks, small, from the command to its last line; and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import replay
from scripts.bench.load import MEDIAN, Case, write_files
from tests.support.runs import ROOT, processes

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def start(*words: str) -> "subprocess.Popen[str]":
    command, environment = [sys.executable, "-m", "scripts.bench", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def bench(work: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """(last line, standard error); no process that names the folder is left."""
    process = start(*words)
    said, errors = process.communicate(timeout=170)
    assert process.returncode == code, said + errors[-3000:]
    assert [command for _, command in processes() if str(work) in command] == []
    return json.loads(said.splitlines()[-1]), errors


def test_pipeline(tmp_path: Path) -> None:
    out, work = tmp_path / "out.json", tmp_path / "work"
    words = ["--device", "cpu", "--quick", "--work", str(work), "--out", str(out)]
    result, _ = bench(work, "pipeline", *words)
    assert json.loads(out.read_text()) == [result]
    # Nothing here says that the machine was quiet: a busy one stretches any of the phases.
    assert 0 < result["eta"] < 2
    assert min(result["t_rollout"], result["t_train"], result["t_step"]) > 0
    assert result["digests_equal"] is True and 0 < result["syncs"] <= 12, "at lag 1 a step need not wait for its report"
    assert result["max_lag"] <= 1
    assert result["updates_applied"] is True and result["engines_quiet"] is True
    assert result["bus_over_raw"] > 0 and result["sync_over_raw"] > result["bus_over_raw"]
    assert 16 < result["mean_length"] < 40 and result["longest"] <= 64
    assert result["pause_ms_p99"] > 0 and result["pause_source"]
    assert 0 <= result["learner_idle"] <= 1 and 0 <= result["rollout_idle"] <= 1
    assert result["hardware"] and result["versions"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in rows if row.get("actor/grad_norm", 0) > 0]
    assert trained == [1, 2, *range(8, 13)], "the idle phase makes no update"


def test_a_case_of_pipeline_that_fails_is_named_and_the_next_one_is_tried(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--configs", "tiny@1:1,tiny@1:999", "--limit-s", "0.5"]
    line, errors = bench(tmp_path, "pipeline", *words, "--work", str(tmp_path), code=1)
    first, second = line["results"]
    assert first["config"] == "tiny@1:1" and "not done within --limit-s 0.5 s" in first["error"]
    assert second["config"] == "tiny@1:999" and "fewer than 999 learner ranks" in second["error"]
    assert "replay ready at" in errors, "the last lines of the logs"


def test_bus(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--shape", "tiny", "--receivers", "1", "--versions", "6", "--kept", "2"]
    result, _ = bench(tmp_path, "bus", *words, "--quiet-s", "0.5", "--out", str(tmp_path / "out"))
    assert result == json.loads((tmp_path / "out").read_text())
    assert result["digests_equal"] and result["delta_ratio"] > 20 and 0 < result["density"] < 0.03
    for key in (
        "sync_over_raw",
        "wire_over_raw",
        "raw_s",
        "sync_s",
        "delta_sync_s",
        "delta_cpu_s",
        "receivers_cpu_s",
        "updates_per_s",
    ):
        assert result[key] > 0, key
    assert result["phases"].keys() >= {"gather_s", "wire_s", "verify_s", "apply_s", "learner_digest_s"}
    assert result["pause_ms_max"] is not None


def test_replay(tmp_path: Path) -> None:
    out, work = tmp_path / "out.json", tmp_path / "work"
    words = ["--quick", "--seconds", "1", "--producers", "3", "--work", str(work), "--out", str(out)]
    document, _ = bench(work, "replay", *words)
    assert json.loads(out.read_text()) == document
    (result,) = document["results"]
    assert document["tokens_per_cpu_second"] == result["tokens_per_cpu_second"] > 100_000
    assert result["curve"] is True and result["fsync"] == "interval" and result["producers"] == 3
    assert result["steps"] >= 1 and result["tokens"] > 0.8 * 64 * 8 * MEDIAN * result["steps"]
    assert result["cpu_seconds"] == pytest.approx(result["tokens"] / result["tokens_per_cpu_second"], rel=0.05)
    # 4 bytes each for id, logprob and version, 1 for the mask, and the prompts and the headers
    assert 13 < result["bytes_per_token_in"] < 13.5 and 13 < result["bytes_per_token_out"] < 14


def test_a_full_buffer_is_held_against_what_came(tmp_path: Path) -> None:
    options, _ = replay.parse(["--quick", "--limit-s", "20", "--work", str(tmp_path)])
    write_files(options)
    result = replay.run_case(options, Case(producers=3, curve=False, hold=True))
    assert result["groups"] == 128
    assert result["queued_mib"] == pytest.approx(128 * 8 * 2555 * 17.1 / replay.MIB, rel=0.3), "lognormal mean 2,555"
    # less than the bytes would mean that the groups are not in memory
    assert 0.9 < result["memory_over_queued"] < 2 and result["idle_cpu_ms_per_second"] < 500


def test_a_case_of_replay_that_fails_is_named(tmp_path: Path) -> None:
    words = ["--quick", "--limit-s", "0.05", "--producers", "2", "--work", str(tmp_path)]
    document, _ = bench(tmp_path, "replay", *words, code=1)
    assert document["error"].startswith("waited 0.05 s for replay to be ready")
