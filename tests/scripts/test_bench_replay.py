"""The replay benchmark: honest load, and exact books of CPU seconds."""

import mmap
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from replay import messages as m
from replay.desks.leases import Slot
from replay.desks.validation import Bounds, problem_with
from scripts.bench import core
from scripts.bench import replay as bench_replay
from scripts.bench.core import CaseFailed, cost_of, resident_bytes, written_bytes
from scripts.bench.load import VOCAB_SIZE, Case, Learner, Load, config_of, prepare
from scripts.bench.replay import MIB, memory

ROOT = Path(__file__).parents[2]
LOAD = Load(pool=12, rows=8)


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
    config = config_of(bench_replay.parse(["--work", str(tmp_path)])[0], Case(curve=False))
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
        with pytest.raises(CaseFailed, match=words):
            learner.check(wrong, step)


# ---- the books ------------------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_cpu_seconds_of_all_threads_are_counted_and_told_apart() -> None:
    before = cost_of(os.getpid())
    burn(0.2)
    with_main = cost_of(os.getpid()).since(before)
    assert 0.15 < with_main.main <= with_main.total + 0.02
    with ThreadPoolExecutor(1) as threads:
        threads.submit(burn, 0.2).result()
    both = cost_of(os.getpid()).since(before)
    assert both.total > with_main.total + 0.15, "a thread that has ended counts"
    assert both.main < with_main.main + 0.1, "but not as the main thread"


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
