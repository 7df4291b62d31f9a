"""The reward pool with real processes: hangs, crashes, garbage and floods cost one sample, never the run."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop
from reward_runs import alive, check_culprits, pooled, runs, sample, score

from configs.data import Reward
from rollout_server.rewards import RewardError
from rollout_server.rewards.pool import RewardPool
from rollout_server.rewards.process import MAX_LOGGED_LINES

ROOT = Path(__file__).parents[2]


def test_scores_come_in_order_with_metrics(grader: str) -> None:
    outcomes = score(f"{grader}:grade", *[f"score {i}" for i in range(150)], workers=2)
    assert [outcome.score for outcome in outcomes] == [float(i) for i in range(150)]
    assert all(outcome.error is None and 0 <= outcome.seconds < 1 for outcome in outcomes)
    assert {outcome.metrics["pid"] for outcome in outcomes} != {float(os.getpid())}


def test_runs_under_uvloop_and_goes_on_after_deaths(grader: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), RewardPool(Reward(function=f"{grader}:grade", timeout_s=0.5)) as pool:
            first = await pool.score([sample("score 1"), sample("segfault"), sample("hang"), sample("score 4")])
            assert [outcome.score for outcome in first if outcome.error is None] == [1.0, 4.0]
            assert (await pool.score([sample("score 5")]))[0].score == 5.0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_only_the_culprits_get_an_error(grader: str) -> None:
    named = {
        "hang": "timed out after 0.4 s",
        "hold": "timed out after 0.4 s",
        "throw endless": "timed out after 0.4 s",
        "closed": "died (signal SIGKILL)",
        "segfault": "died (signal SIGSEGV); its last output: about to fall",
        "exit": "died (exit code 3)",
        "flood": "sent garbage",
    }
    check_culprits(f"{grader}:grade", named, workers=3, timeout_s=0.4)


def test_slow_calls_are_spread_and_each_has_the_whole_timeout(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        start = time.monotonic()
        outcomes = await pool.score([sample("sleep 0.3")] * 8)
        assert [outcome.score for outcome in outcomes] == [1.0] * 8
        # One after another they would take 2.4 s, and a timeout for the whole request would fail them.
        assert time.monotonic() - start < 1.8

    pooled(f"{grader}:grade", body, workers=4, timeout_s=0.5)


def test_quick_calls_of_a_group_are_one_request(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        for number in range(6):
            outcomes = await pool.score([sample("score 1")] * 8)
            assert number < 3 or len({outcome.metrics["pid"] for outcome in outcomes}) == 1

    pooled(f"{grader}:grade", body, workers=4)


def test_concurrent_calls_do_not_mix(grader: str) -> None:
    calls = [[sample(f"score {100 * call + i}") for i in range(8)] for call in range(20)]
    calls[7][3] = sample("exit")

    async def body(pool: RewardPool) -> None:
        results = await asyncio.gather(*(pool.score(call) for call in calls))
        assert results[7][3].error is not None
        scores = [outcome.score for outcomes in results for outcome in outcomes if outcome.error is None]
        assert scores == [100.0 * call + i for call in range(20) for i in range(8) if (call, i) != (7, 3)]

    pooled(f"{grader}:grade", body, workers=3)


def test_asynchronous_functions_run_at_once_and_keep_their_loop(
    grader: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.rewards.process.ASYNC_GRACE_S", 0.3)

    async def body(pool: RewardPool) -> None:
        start = time.monotonic()
        outcomes = await pool.score([sample("ok")] * 20)
        assert [outcome.score for outcome in outcomes] == [1.0] * 20
        assert time.monotonic() - start < 1.5, "one after another they would take 2 s"
        for slow, kills in (("wait 600", False), ("hang", True)):
            outcomes = await pool.score([sample("ok"), sample(slow), sample("ok")])
            assert [outcome.error for outcome in outcomes] == [None, "timed out after 0.4 s", None]
            assert ("started anew" in caplog.text) == kills

    pooled(f"{grader}:later", body, timeout_s=0.4)


def test_trl_functions_see_the_whole_group(grader: str) -> None:
    outcomes = score(f"{grader}:trl", *["a"] * 8, workers=2)
    assert [outcome.score for outcome in outcomes] == [8.5] * 8
    outcomes = score(f"{grader}:trl", "a", "exit", "b")
    assert [outcome.score for outcome in outcomes if outcome.error is None] == [1.5, 1.5]
    assert "exit code 3" in str(outcomes[1].error)


def test_prints_are_logged_and_bounded(grader: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rollout_server.rewards.process"):
        outcomes = score(f"{grader}:grade", *["print"] * 300)
    assert [outcome.score for outcome in outcomes] == [1.0] * 300
    lines = [record.getMessage() for record in caplog.records]
    assert any("hello from the grader" in line for line in lines)
    assert len(lines) <= MAX_LOGGED_LINES + 1 and "not logged" in lines[-1]


def test_close_leaves_no_process_and_ends_waiting_calls(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        pids = [int(outcome.metrics["pid"]) for outcome in await pool.score([sample("score 1")] * 2)]
        waiting = asyncio.create_task(pool.score([sample("hang")]))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(RewardError, match="closed"):
            await waiting
        with pytest.raises(RewardError, match="not running"):
            await pool.score([sample("score 1")])
        assert len(set(pids)) == 2 and not alive(pids, within_s=0.1)

    pooled(f"{grader}:grade", body, workers=2)


def test_a_cancelled_call_does_not_hurt_the_next(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        start = time.monotonic()
        calls = [asyncio.create_task(pool.score([sample("sleep 0.2")] * 3)) for _ in range(3)]
        await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
        assert (await pool.score([sample("score 2")]))[0].score == 2.0
        assert time.monotonic() - start < 1.5, "all nine would take 1.8 s"

    pooled(f"{grader}:grade", body, timeout_s=0.5)


def test_a_function_that_cannot_be_loaded_fails_start(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("import os\nos.write(2, b'no licence\\n')\nos._exit(7)\n")
    with pytest.raises(RewardError, match=r"exit code 7\); its last output: no licence"):
        score(f"{tmp_path}/dying.py:f", "x", workers=2)


def test_a_function_that_is_lost_later_shows_in_the_outcomes(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        Path(grader).rename(f"{grader}.away")
        outcomes = await pool.score([sample("exit"), sample("score 1")])
        assert any("no file" in str(outcome.error) for outcome in outcomes)
        Path(f"{grader}.away").rename(grader)
        assert (await pool.score([sample("score 2")]))[0].score == 2.0

    pooled(f"{grader}:grade", body)


def test_a_worker_that_was_killed_while_idle_costs_nothing(grader: str) -> None:
    async def body(pool: RewardPool) -> None:
        (outcome,) = await pool.score([sample("score 1")])
        os.kill(int(outcome.metrics["pid"]), signal.SIGKILL)
        await asyncio.sleep(0.05)
        (outcome,) = await pool.score([sample("score 1")])
        assert outcome.error is None

    pooled(f"{grader}:grade", body)


def test_messages_are_bounded(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.rewards.pool.MAX_REQUEST_BYTES", 100_000)
    samples = [sample("score 1", prompt="x" * size) for size in (60_000, 60_000, 60_000, 200_000)]
    outcomes = pooled(f"{grader}:grade", lambda pool: pool.score(samples))
    assert [outcome.score for outcome in outcomes[:3]] == [1.0] * 3
    assert "100000" in str(outcomes[3].error)


@pytest.mark.parametrize("text", ["score 1", "hold"])
def test_workers_die_with_their_parent(grader: str, text: str) -> None:
    """The owner of a pool is killed -9, with its worker idle or amid a call, in C with the interpreter's lock held."""
    code = f"""
import asyncio
from configs.data import Reward
from rollout_server.rewards.pool import RewardPool

async def main():
    async with RewardPool(Reward(function={grader + ":grade"!r}, timeout_s=60)) as pool:
        s = {sample("score 1")!r}
        (outcome,) = await pool.score([s])
        call = asyncio.create_task(pool.score([s | dict(completion={text!r})]))
        await asyncio.sleep(0.05)
        print(int(outcome.metrics["pid"]), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        assert runs(worker)
    finally:
        owner.kill()
        owner.wait(timeout=10)
    left = alive([worker])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
