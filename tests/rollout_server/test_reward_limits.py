"""The reward pool with real processes: what its code may take and answer, and what is left of it.

The policy is the attacker: it writes the answers that reward code reads. Reward code itself is the user's, but it
may be careless: a hang, a crash, garbage or a flood costs the sample that it was given, never the run.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout_server.tasks.rewards import RewardError
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS
from rollout_server.tasks.workers.process import MAX_LOGGED_LINES, Worker, without_secrets
from tests.rollout_server.reward_runs import alive, check_culprits, pool_of, runs, sample, score
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
MEMORY = 192 * 1024**2
SMALL: dict[str, Any] = {"memory_bytes": MEMORY, "max_file_bytes": 100_000, "max_open_files": 40}


def test_past_a_limit_is_an_error_that_names_it(grader: str) -> None:
    named = {
        f"allocate {2 * MEMORY}": f"reward.memory_bytes = {MEMORY}",
        "hoard": f"reward.memory_bytes = {MEMORY}",
        "abort std::bad_alloc": f"reward.memory_bytes is {MEMORY}",
        "open 60": "reward.max_open_files = 40",
        "file 200000": ": more than reward.max_file_bytes = 100000 allows",
    }
    errors = check_culprits(f"{grader}:grade", named, **SMALL)
    assert "SIGABRT); its last output: terminate called" in errors[2] and "File too large" in errors[4]
    assert max(map(len, errors)) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("TABLE = bytearray(10**9)", rf"reward.memory_bytes = {MEMORY}"),
        ("import os\nos.write(2, b'no licence')\nos._exit(7)", r"exit code 7\); its last output: no licence"),
    ],
)
def test_a_function_that_cannot_be_loaded_fails_the_start(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"{source}\ndef grade(sample): return 1.0\n")
    with pytest.raises(RewardError, match=rf"could not be loaded: .*{said}"):
        score(f"{tmp_path}/broken.py:grade", "x", workers=2, **SMALL)


def test_where_code_of_the_user_runs(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_PLACE", "SOME_API_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PLAIN_SETTING", "kept")
    (outcome,) = score(f"{grader}:grade", "state", **SMALL)
    assert outcome.metrics == {
        "no_new_privs": 1.0,
        "secrets": 0.0,
        "plain": 1.0,
        "leads_session": 1.0,
        "heavy_imports": 0.0,
        "as": float(MEMORY),
        "fsize": 100_000.0,
        "nofile": 40.0,
        "core": 0.0,
    }


def test_secrets_stay_out_of_the_environment() -> None:
    secret = {
        "HF_TOKEN", "OPENAI_API_KEY", "AWS_PROFILE", "WANDB_MODE", "CLIENT_SECRET", "PGPASSWORD", "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS", "github_token", "SECRET_KEY_BASE", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT",
        "OPENAI_KEY2", "JWT", "SLACK_WEBHOOK_URL",
    }  # fmt: skip
    plain = {"PATH": "/bin", "HOME": "/root", "TOKENIZERS_PARALLELISM": "false", "HTTP_PROXY": "http://proxy:8080"}
    plain |= {"PWD": "/", "OLDPWD": "/", "LD_LIBRARY_PATH": "/lib"}
    given = (
        plain | dict.fromkeys(secret, "x") | {"HTTPS_PROXY": "http://me:word@proxy:8080", "INDEX": "https://word@host"}
    )
    kept = without_secrets(given)
    assert kept.keys() == {*plain, "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTHONPATH"} and kept["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("how", "started", "error"),
    [("bomb", 64, "timed out after 3 s"), ("daemon_then_die", 1, "exit code 9"), ("daemon", 1, None)],
)
async def test_what_a_worker_started_is_killed_with_it(
    grader: str, tmp_path: Path, how: str, started: int, error: str | None
) -> None:
    """Daemons that left its group and session too; one whose worker lives on lives until that ends."""
    note = tmp_path / "pids"

    async with pool_of(f"{grader}:grade", timeout_s=3.0, **SMALL) as pool:
        (outcome,) = await pool.score([sample(f"{how} {note}")])
        pids = list(map(int, note.read_text().split()))
        assert len(pids) >= started
        if error is None:
            assert outcome.score == 1.0 and runs(pids[0])
        else:
            assert error in str(outcome.error) and not alive(pids)
    assert not alive(pids)


def test_a_process_that_never_stays_the_same_is_caught(grader: str, tmp_path: Path) -> None:
    note = tmp_path / "generations"
    (outcome,) = score(f"{grader}:grade", f"comet {note}", **SMALL)
    assert "exit code 9" in str(outcome.error)
    generations = note.stat().st_size
    assert generations > 3
    time.sleep(0.3)
    assert note.stat().st_size == generations


async def test_a_stop_that_was_cancelled_is_finished_by_the_next() -> None:
    worker = Worker("rollout_server.tasks.rewards.worker", "worker", frozenset(), 10**6, {})
    await worker.start({"parts": [("", "exact", 1.0, {})], "timeout_s": 1.0, "limits": {}})
    assert worker.process is not None
    pid = worker.process.pid
    first = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    first.cancel()
    await worker.stop()
    assert not runs(pid)


def test_forged_replies_are_garbage(grader: str) -> None:
    named = {
        "write garbage": "sent garbage",
        "write huge": "a message of 4294967295 bytes",
        "write forged": "[999, ",
        "write twice": "is no list of verdicts that was asked for",
        "write nan": "[[nan, ",
        "replies": "sent garbage",
    }
    errors = check_culprits(f"{grader}:grade", named, workers=3, timeout_s=5.0, **SMALL)
    assert all("sent garbage" in error for error in errors), errors


async def test_a_flood_of_prints_leaves_time_for_others(tmp_path: Path) -> None:
    """A grader that only prints: the pool's process reads on at a pace that leaves it most of its time."""
    noisy = tmp_path / "noisy.py"
    noisy.write_text("import os\ndef grade(sample):\n    while True: os.write(1, b'x' * 65536 + b'\\n')\n")

    async with pool_of(f"{noisy}:grade", timeout_s=1.2) as pool:
        call = asyncio.create_task(pool.score([sample("x")]))
        await asyncio.sleep(0.4)
        start, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.6)
        used = (time.process_time() - cpu) / (time.monotonic() - start)
        assert str((await call)[0].error).startswith("timed out after 1.2 s")
        assert used < 0.35


def test_hostile_objects_cost_one_sample(grader: str) -> None:
    named = {
        "throw evil": "Evil: (its message cannot be read) at ",
        "throw surrogate": "ValueError: ?????",
        "throw long": "grader.py:",
        "give number": "cannot be read: KeyError",
        "recurse 1": "RecursionError",
    }
    errors = check_culprits(f"{grader}:grade", named, **SMALL)
    assert max(map(len, errors)) <= MAX_ERROR_CHARS
    (outcome,) = score(f"{grader}:grade", "give names")
    assert outcome.metrics == {"?": 2.0}, "names that have no UTF-8 are kept readable"


@pytest.mark.parametrize("function", ["exact", "numeric"])
def test_the_built_in_rewards_run_nothing_that_an_answer_says(function: str, tmp_path: Path) -> None:
    """In the smallest memory that the configuration takes."""
    planted = tmp_path / "planted"
    code = f"__import__('pathlib').Path({str(planted)!r}).touch()"
    texts = [code, f"#### {code}", f"\\boxed{{{code}}}", f"{{{code}}}", f"${{{code}}}", f"!!python/object/apply:{code}"]
    outcomes = score(function, *texts, "os.system('true')", "9**9**9", "42", memory_bytes=64 * 1024**2)
    assert all(outcome.error is None for outcome in outcomes) and not planted.exists()
    assert [outcome.score for outcome in outcomes[-2:]] == [0.0, 1.0]


def line_of(text: str) -> int:
    lines = (Path(__file__).parent / "grader.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_only_the_culprits_get_an_error(grader: str) -> None:
    named = {
        "hang": f"timed out after 0.8 s at {grader}:{line_of('time.sleep(float(seconds))')} in sleep",
        "hold": "timed out after 0.8 s",
        "throw endless": "timed out after 0.8 s",
        "closed": "died (signal SIGKILL)",
        "segfault": "died (signal SIGSEGV); its last output: about to fall",
        "exit": "died (exit code 3)",
    }
    check_culprits(f"{grader}:grade", named, workers=3, timeout_s=0.8)


def test_a_process_that_something_killed_is_told_from_one_that_hung_up(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import os, signal\n\n\ndef killed(sample):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def hung_up(sample):\n    os.closerange(3, 256)\n    import time\n    time.sleep(60)\n"
    )
    (killed,) = score(f"{tmp_path}/judge.py:killed", "a")
    assert "(signal SIGKILL), as the kernel ends processes where a machine or a cgroup is" in str(killed.error)
    (hung_up,) = score(f"{tmp_path}/judge.py:hung_up", "a")
    assert "(signal SIGKILL)" in str(hung_up.error) and "kernel" not in str(hung_up.error)


async def test_slow_calls_are_spread_and_each_has_the_whole_timeout(grader: str) -> None:
    async with pool_of(f"{grader}:grade", workers=4, timeout_s=1.8) as pool:
        outcomes = await pool.score([sample("spread 1")] * 8)
        # Two of each worker, which a timeout for its whole request would fail.
        assert [outcome.score for outcome in outcomes] == [1.0] * 8
        assert sorted(Counter(outcome.metrics["pid"] for outcome in outcomes).values()) == [2, 2, 2, 2]


async def test_concurrent_calls_do_not_mix(grader: str) -> None:
    calls = [[sample(f"score {100 * call + i}") for i in range(8)] for call in range(20)]
    calls[7][3] = sample("exit")

    async with pool_of(f"{grader}:grade", workers=3) as pool:
        results = await asyncio.gather(*(pool.score(call) for call in calls))
        assert results[7][3].error is not None
        scores = [outcome.score for outcomes in results for outcome in outcomes if outcome.error is None]
        assert scores == [100.0 * call + i for call in range(20) for i in range(8) if (call, i) != (7, 3)]


async def test_asynchronous_functions_run_at_once_and_keep_their_loop(
    grader: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow, kills, grace_s in (("wait 600", False, 20.0), ("hang", True, 0.3)):
        monkeypatch.setattr("rollout_server.tasks.rewards.process.ASYNC_GRACE_S", grace_s)
        async with pool_of(f"{grader}:later", timeout_s=0.8) as pool:
            outcomes = await pool.score([sample("ok")] * 20)
            assert [outcome.score for outcome in outcomes] == [1.0] * 20
            assert max(outcome.metrics["at_once"] for outcome in outcomes) == 20
            outcomes = await pool.score([sample("ok"), sample(slow), sample("ok")])
            said = [outcome.error for outcome in outcomes]
            assert said[0] is None and said[2] is None and str(said[1]).startswith("timed out after 0.8 s")
            assert ("started anew" in caplog.text) == kills


async def test_asynchronous_calls_of_several_groups_run_at_once_and_a_culprit_is_found(grader: str) -> None:
    """As of a function that asks a service."""
    async with pool_of(f"{grader}:later", timeout_s=5.0) as pool:
        results = await asyncio.gather(*(pool.score([sample("wait 1")] * 4) for _ in range(9)))
        assert all(outcome.score == 1.0 for outcomes in results for outcome in outcomes)
        assert max(outcome.metrics["at_once"] for outcomes in results for outcome in outcomes) >= 32
        results = await asyncio.gather(
            *(pool.score([sample("wait 0.1"), sample(word)]) for word in ("exit", "ok", "ok"))
        )
        errors = [outcome.error for outcomes in results for outcome in outcomes]
        assert "exit code 3" in str(errors[1]) and [error is None for error in errors].count(False) == 1


def test_trl_functions_see_the_whole_group(grader: str) -> None:
    outcomes = score(f"{grader}:trl", *["a"] * 8, workers=2)
    assert [outcome.score for outcome in outcomes] == [8.5] * 8
    outcomes = score(f"{grader}:trl", "a", "exit", "b")
    assert [outcome.score for outcome in outcomes if outcome.error is None] == [1.5, 1.5]
    assert "exit code 3" in str(outcomes[1].error)


def test_prints_are_logged_and_bounded(grader: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rollout_server.tasks.workers.process"):
        outcomes = score(f"{grader}:grade", *["print"] * 300)
    assert [outcome.score for outcome in outcomes] == [1.0] * 300
    lines = [record.getMessage() for record in caplog.records]
    assert any("hello from the grader" in line for line in lines)
    assert len(lines) <= MAX_LOGGED_LINES + 1 and "not logged" in lines[-1]


async def test_close_leaves_no_process_and_ends_waiting_calls(grader: str) -> None:
    async with pool_of(f"{grader}:grade", workers=2) as pool:
        pids = [int(outcome.metrics["pid"]) for outcome in await pool.score([sample("score 1")] * 2)]
        waiting = asyncio.create_task(pool.score([sample("hang")]))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(RewardError, match="closed"):
            await waiting
        with pytest.raises(RewardError, match="not running"):
            await pool.score([sample("score 1")])
        assert len(set(pids)) == 2 and not alive(pids)


async def test_a_cancelled_call_does_not_hurt_the_next(grader: str, tmp_path: Path) -> None:
    note = tmp_path / "judged"
    async with pool_of(f"{grader}:grade") as pool:
        calls = [asyncio.create_task(pool.score([sample(f"noted {note} 0.5")] * 3)) for _ in range(3)]
        await eventually(note.exists, "the first of nine answers is being judged")
        for call in calls:
            call.cancel()
        assert (await pool.score([sample("score 2")]))[0].score == 2.0
        assert len(note.read_text().split()) <= 3, "no request is judged that was not under way"


async def test_a_function_that_is_lost_later_shows_in_the_outcomes(grader: str) -> None:
    async with pool_of(f"{grader}:grade") as pool:
        Path(grader).rename(f"{grader}.away")
        outcomes = await pool.score([sample("exit"), sample("score 1")])
        assert any("no file" in str(outcome.error) for outcome in outcomes)
        Path(f"{grader}.away").rename(grader)
        assert (await pool.score([sample("score 2")]))[0].score == 2.0


async def test_a_worker_that_was_killed_while_idle_costs_nothing(grader: str) -> None:
    async with pool_of(f"{grader}:grade") as pool:
        (outcome,) = await pool.score([sample("score 1")])
        os.kill(int(outcome.metrics["pid"]), signal.SIGKILL)
        assert not alive([int(outcome.metrics["pid"])])
        for _ in range(5):
            await asyncio.sleep(0.01)  # for the loop to see its pipes closed
        (outcome,) = await pool.score([sample("score 1")])
        assert outcome.error is None


@pytest.mark.parametrize("text", ["score 1", "hold"])
def test_workers_die_with_their_parent(grader: str, text: str) -> None:
    """The owner of a pool is killed -9, with its worker idle or amid a call, in C with the interpreter's lock held."""
    code = f"""
import asyncio
from configs.data import Reward
from rollout_server.tasks.rewards.pool import RewardPool

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
        owner.wait(timeout=60)
    left = alive([worker])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


async def test_a_pool_says_what_waits_for_it_and_for_how_long(grader: str) -> None:
    async with pool_of(f"{grader}:grade", workers=1) as pool:
        scoring = asyncio.create_task(pool.score([sample("sleep 1.2"), *[sample("sleep 0")] * 2]))
        await asyncio.sleep(0.3)
        during = pool.gauges()
        await scoring
        after = pool.gauges()
    assert (during["rewards_waiting"], during["reward_workers"]) == (3.0, 1.0) and during["reward_oldest_s"] > 0.2
    assert (after["rewards_waiting"], after["reward_oldest_s"]) == (0.0, 0.0)
