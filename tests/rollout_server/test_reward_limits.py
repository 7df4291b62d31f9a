"""What reward code may take, what it may answer, and what is left of it: limits with real processes.

The policy is the attacker: it writes the answers that reward code reads. Reward code itself is the user's, but it
may be careless, so nothing that it does costs more than the sample that it was given.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from reward_runs import alive, check_culprits, pooled, runs, sample, score

from configs.data import Reward
from rollout_server.rewards import RewardError
from rollout_server.rewards.pool import RewardPool
from rollout_server.rewards.process import RewardProcess, without_secrets
from rollout_server.rewards.protocol import MAX_ERROR_CHARS, pack

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


def test_a_limit_of_what_a_process_holds_costs_nothing_later(grader: str) -> None:
    """What the first one hoards is gone with its process."""

    async def body(pool: RewardPool) -> None:
        for bad in ("hoard", "open 60"):
            assert (await pool.score([sample(bad)]))[0].error
            for text in ("open 20", f"allocate {MEMORY // 4}", "file 99000"):
                assert (await pool.score([sample(text)]))[0].error is None

    pooled(f"{grader}:grade", body, **SMALL)


def test_limits_hold_for_asynchronous_functions(grader: str) -> None:
    outcomes = score(f"{grader}:later", "ok", f"allocate {2 * MEMORY}", "throw evil", "ok", **SMALL)
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
    assert "reward.memory_bytes" in str(outcomes[1].error) and "cannot be read" in str(outcomes[2].error)


def test_limits_hold_while_the_function_is_loaded(tmp_path: Path) -> None:
    greedy = tmp_path / "greedy.py"
    greedy.write_text("TABLE = bytearray(10**9)\ndef grade(sample): return 1.0\n")
    with pytest.raises(RewardError, match=rf"could not be loaded: .*reward.memory_bytes = {MEMORY}"):
        score(f"{greedy}:grade", "x", **SMALL)


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
        "GOOGLE_APPLICATION_CREDENTIALS", "github_token", "SECRET_KEY_BASE",
    }  # fmt: skip
    plain = {"PATH": "/bin", "HOME": "/root", "TOKENIZERS_PARALLELISM": "false", "HTTP_PROXY": "http://proxy:8080"}
    given = plain | dict.fromkeys(secret, "x") | {"HTTPS_PROXY": "http://me:word@proxy:8080"}
    kept = without_secrets(given)
    assert kept.keys() == {*plain, "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTHONPATH"} and kept["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("how", "started", "error"),
    [
        ("spawn", 1, "timed out after 1 s"),
        ("bomb", 64, "timed out after 1 s"),
        ("daemon_then_die", 1, "exit code 9"),
        ("daemon", 1, None),
    ],
)
def test_what_a_worker_started_is_killed_with_it(
    grader: str, tmp_path: Path, how: str, started: int, error: str | None
) -> None:
    """Daemons that left its group and session too; one whose worker lives on lives until that ends."""
    note = tmp_path / "pids"

    async def body(pool: RewardPool) -> list[int]:
        (outcome,) = await pool.score([sample(f"{how} {note}")])
        pids = list(map(int, note.read_text().split()))
        assert len(pids) >= started
        if error is None:
            assert outcome.score == 1.0 and runs(pids[0])
        else:
            assert error in str(outcome.error) and not alive(pids)
        return pids

    assert not alive(pooled(f"{grader}:grade", body, timeout_s=1.0, **SMALL))


def test_a_process_that_never_stays_the_same_is_caught(grader: str, tmp_path: Path) -> None:
    note = tmp_path / "generations"
    (outcome,) = score(f"{grader}:grade", f"comet {note}", timeout_s=0.5, **SMALL)
    assert outcome.error == "timed out after 0.5 s"
    generations = note.stat().st_size
    assert generations > 3
    time.sleep(0.3)
    assert note.stat().st_size == generations


def test_a_stop_that_was_cancelled_is_finished_by_the_next(grader: str) -> None:
    async def main() -> None:
        process = RewardProcess(Reward(function=f"{grader}:grade"), "worker")
        await process.ensure()
        pids: list[float] = []
        await process.judge(1, pack([sample("score 1")]), lambda _, outcome: pids.append(outcome.metrics["pid"]))
        first = asyncio.create_task(process.stop())
        await asyncio.sleep(0)
        first.cancel()
        await process.stop()
        assert not runs(int(pids[0]))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_forged_replies_are_garbage(grader: str) -> None:
    named = {
        "write garbage": "sent garbage",
        "write huge": "a message of 4294967295 bytes",
        "write forged": "sample 999, which was not asked for",
        "write twice": "sample 0, which was not asked for",
        "write nan": "sent garbage: score nan",
        "replies": "sent garbage",
    }
    errors = check_culprits(f"{grader}:grade", named, workers=3, timeout_s=5.0, **SMALL)
    assert all("sent garbage" in error for error in errors), errors


def test_a_flood_of_prints_leaves_time_for_others(tmp_path: Path) -> None:
    """A grader that only prints: the pool's process reads on at a pace that leaves it most of its time."""
    noisy = tmp_path / "noisy.py"
    noisy.write_text("import os\ndef grade(sample):\n    while True: os.write(1, b'x' * 65536 + b'\\n')\n")

    async def body(pool: RewardPool) -> float:
        call = asyncio.create_task(pool.score([sample("x")]))
        await asyncio.sleep(0.4)
        start, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.6)
        used = (time.process_time() - cpu) / (time.monotonic() - start)
        assert (await call)[0].error == "timed out after 1.2 s"
        return used

    assert pooled(f"{noisy}:grade", body, timeout_s=1.2) < 0.35


def test_hostile_objects_cost_one_sample(grader: str) -> None:
    named = {
        "throw evil": "Evil: (its message cannot be read) at ",
        "throw hydra": "died (exit code 1)",
        "throw interrupt": "KeyboardInterrupt:  at ",
        "throw surrogate": "ValueError: ?????",
        "throw long": "grader.py:",
        "give number": "cannot be read: KeyError",
        "give object": "returned",
        "give integer": "returned inf",
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
