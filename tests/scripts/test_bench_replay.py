"""The replay benchmark: honest load, exact books of CPU seconds, and a short run of the real processes."""

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replay import messages as m
from replay.desks.leases import Slot
from replay.desks.validation import Bounds, problem_with
from scripts.bench import core
from scripts.bench import replay as bench_replay
from scripts.bench.cases import VOCAB_SIZE, Case, Load, config_of, prepare, write_files
from scripts.bench.core import cost_of, resident_bytes, table, written_bytes
from scripts.bench.load import Fault, Learner
from scripts.bench.replay import MIB, memory, run_case
from scripts.chaos import processes

ROOT = Path(__file__).parents[2]
LOAD = Load(pool=12, rows=8)


def options(tmp_path: Path) -> argparse.Namespace:
    settings = {"seconds": 1, "warmup_steps": 1, "checkpoint_every": 2, "limit_s": 20, "profile": False}
    return argparse.Namespace(load=LOAD, work=tmp_path, **settings)


# ---- the load -------------------------------------------------------------------------------------------


def test_groups_are_random_different_and_of_lognormal_lengths() -> None:
    load = replace(LOAD, pool=60)
    pool = prepare(load)
    lengths = np.concatenate([prepared.arrays["lengths"] for prepared in pool])
    assert abs(float(np.median(lengths)) / LOAD.median - 1) < 0.2
    assert abs(float(np.log(lengths).std()) - LOAD.sigma) < 0.1
    assert lengths.max() <= LOAD.cap
    for field in ("token_ids", "logprobs", "prompt_ids"):
        contents = {prepared.arrays[field].tobytes() for prepared in pool}
        assert len(contents) == load.pool
        # ids below 151,936 fill 17.2 of 32 bits, logprobs about 26 of 32
        assert all(len(zlib.compress(content)) > 0.5 * len(content) for content in list(contents)[:6])
    texts = [text for prepared in pool[:6] for text in prepared.arrays["texts"]]
    assert len(set(texts)) == 6 * LOAD.group_size
    assert len(zlib.compress("".join(texts).encode())) > 0.7 * sum(map(len, texts))
    again, other = prepare(load), prepare(replace(load, seed=1))
    assert again[3].arrays["logprobs"].tobytes() == pool[3].arrays["logprobs"].tobytes(), "one seed, one load"
    assert other[3].arrays["logprobs"].tobytes() != pool[3].arrays["logprobs"].tobytes()


def test_groups_pass_replays_checks_and_have_versions_a_token(tmp_path: Path) -> None:
    config = config_of(options(tmp_path), Case(curve=False))
    for index, prepared in enumerate(prepare(LOAD)):
        for min_version, version in ((0, 0), (3, 3), (3, 4)):
            ids = {"pass_": 0, "index": index, "attempt": 1}
            group = prepared.group(m.Lease(**ids, min_version=min_version, lease_s=60, seed=0, prompt={}), version)
            slot = Slot((0, index), {}, min_version, attempt=1)
            assert problem_with(group, slot, config, Bounds(version, VOCAB_SIZE)) is None
            assert set(np.unique(group.versions)) == {min_version, version}
            stale = Slot((0, index), {}, version + 1, attempt=1)
            assert "this lease needs" in (problem_with(group, stale, config, Bounds(version, VOCAB_SIZE)) or "")


def batch(step: int, indices: list[int], versions: list[int]) -> SimpleNamespace:
    lengths = np.array([len(versions)])
    return SimpleNamespace(step=step, group_ids=[[0, i] for i in indices], lengths=lengths, versions=np.array(versions))


def test_a_batch_that_breaks_an_invariant_is_a_fault() -> None:
    learner = Learner.__new__(Learner)
    learner.trained = set()
    learner.config = SimpleNamespace(  # type: ignore[assignment]
        rollout=SimpleNamespace(groups_per_step=2), replay=SimpleNamespace(async_lag=1)
    )
    assert learner.check(batch(1, [4, 5], [0, 0, 0]), 1) == 3
    for wrong, step, words in (
        (batch(2, [5, 6], [1]), 2, r"group \(0, 5\) a second time"),
        (batch(3, [8, 9], [1]), 2, "batch 3 of 2 groups came for step 2"),
        (batch(2, [8, 8], [1]), 2, "of 1 groups"),
        (batch(5, [8, 9], [3, 2]), 5, "a token of version 2"),
    ):
        with pytest.raises(Fault, match=words):
            learner.check(wrong, step)


# ---- the books ------------------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_cpu_seconds_of_all_threads_are_counted_and_told_apart(tmp_path: Path) -> None:
    before = cost_of(os.getpid())
    burn(0.3)
    with_main = cost_of(os.getpid()).since(before)
    assert 0.25 < with_main.main <= with_main.total + 0.02
    thread = threading.Thread(target=burn, args=(0.3,))
    thread.start()
    thread.join()
    both = cost_of(os.getpid()).since(before)
    assert both.total > with_main.total + 0.25, "a thread that has ended counts"
    assert both.main < with_main.main + 0.15, "but not as the main thread"
    assert before.zmq_io == both.zmq_io or both.zmq_io < 0.1


def test_a_thread_that_ends_while_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read = core._times

    def times(path: Path) -> tuple[str, float, float]:
        if path.parent.name != str(os.getpid()):
            raise ProcessLookupError(3, "No such process", str(path))
        return read(path)

    over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(over.wait, 10)
        monkeypatch.setattr(core, "_times", times)
        assert cost_of(os.getpid()).main > 0
        over.set()


def test_bytes_written_and_memory(tmp_path: Path) -> None:
    before = written_bytes(os.getpid())
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    assert 3_000_000 <= written_bytes(os.getpid()) - before < 3_200_000
    resting = resident_bytes(os.getpid())
    with mmap.mmap(-1, 64 * MIB) as block:  # malloc may hand out pages that are resident already
        block.write(bytes([1]) * len(block))
        assert abs(resident_bytes(os.getpid()) - resting - len(block)) < 16 * MIB


def test_growth_is_seen() -> None:
    flat = memory([100 * MIB] * 40)
    assert flat["rss_mib_by_quarter"] == [100.0] * 4 and flat["rss_mib_growth"] == 0
    grows = memory([i * MIB for i in range(1, 401)])
    assert grows["rss_mib_growth"] == 200.0 and grows["rss_mib_max"] == 400.0 and len(grows["rss_mib_curve"]) < 70
    assert memory([5 * MIB])["rss_mib_by_quarter"] == [5.0] * 4


def test_the_table_and_the_report_have_every_case() -> None:
    flow = {"case": "64 producers", "tokens_per_cpu_second": 5_500_000, "bytes_per_token_in": 17.125}
    held = {"case": "held", "memory_over_queued": 1.15, "rss_mib_by_quarter": [1.0, 2.0]}
    failed = {"case": "1000 producers", "error": "replay ended with code 1"}
    lines = table([flow, failed, held], "case").splitlines()
    assert lines[0] == "| case | 64 producers | held |"
    assert "| tokens_per_cpu_second | 5500000 | - |" in lines and "| bytes_per_token_in | 17.12 | - |" in lines
    assert "| rss_mib_by_quarter | - | 1, 2 |" in lines
    assert lines[-1] == "1000 producers: no result: replay ended with code 1"
    document = bench_replay.report([flow, held], False)
    assert document["tokens_per_cpu_second"] == 5_500_000 and document["memory_over_queued"] == 1.15
    assert bench_replay.report([failed], False)["error"] == failed["error"]


# ---- the command ----------------------------------------------------------------------------------------


def bench(work: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and last line; no process of it is left."""
    words = [sys.executable, "-m", "scripts.bench", "replay", "--quick", "--work", str(work), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert [command for _, _, _, command in processes.table() if str(work) in command] == []
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.e2e
def test_a_short_run_of_the_real_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, document = bench(tmp_path / "work", "--seconds", "1", "--producers", "3", "--out", str(out))
    assert code == 0 and json.loads(out.read_text()) == document
    (result,) = document["results"]
    assert document["tokens_per_cpu_second"] == result["tokens_per_cpu_second"] > 100_000
    assert result["curve"] is True and result["fsync"] == "interval" and result["producers"] == 3
    assert result["steps"] >= 1 and result["tokens"] > 0.8 * 64 * 8 * LOAD.median * result["steps"]
    assert result["cpu_seconds"] == pytest.approx(result["tokens"] / result["tokens_per_cpu_second"], rel=0.05)
    # 4 bytes each for id, logprob, version and text, 1 for the mask, and the prompts and the headers
    assert 17 < result["bytes_per_token_in"] < 17.5 and 13 < result["bytes_per_token_out"] < 14


@pytest.mark.slow
@pytest.mark.e2e
def test_a_full_buffer_is_held_against_what_came(tmp_path: Path) -> None:
    write_files(options(tmp_path))
    result = run_case(options(tmp_path), Case(producers=3, curve=False, hold=True))
    assert result["groups"] == 128
    assert result["queued_mib"] == pytest.approx(128 * 8 * 2555 * 17.1 / MIB, rel=0.3), "lognormal mean 2,555"
    # less than the bytes would mean that the groups are not in memory
    assert 0.9 < result["memory_over_queued"] < 2 and result["idle_cpu_ms_per_second"] < 500


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_that_fails_is_named(tmp_path: Path) -> None:
    code, document = bench(tmp_path / "work", "--limit-s", "0.05", "--producers", "2")
    assert code == 1 and document["error"] == "waited 0.05 s for replay to be ready"


def test_what_cannot_be_used_is_refused_at_once() -> None:
    for arguments in (["--seconds", "-1"], ["--checkpoint-every", "0"], ["--producers", "-3"], ["--fsync", "often"]):
        with pytest.raises(SystemExit):
            bench_replay.parse(arguments)
    assert bench_replay.parse(["--minutes", "10"])[0].seconds == 600
    assert bench_replay.parse(["--producers", "7", "--no-curve"])[1] == [Case(producers=7, curve=False)]
