"""What reward code may take, what it may answer, and what is left of it: limits with real processes.

The policy is the attacker: it writes the answers that reward code reads. Reward code itself is the user's, but it
may be careless, so nothing that it does costs more than the sample that it was given.
"""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_runs import alive, check_culprits, run, runs, sample, score

from configs.data import Reward
from rollout_server.rewards import RewardError
from rollout_server.rewards.numeric import final_number
from rollout_server.rewards.pool import RewardPool
from rollout_server.rewards.process import RewardProcess, without_secrets
from rollout_server.rewards.protocol import MAX_ERROR_CHARS, pack, read_answer, read_verdicts, unpack_reply

MEMORY = 192 * 1024**2


def limited(function: str, **changes: Any) -> Reward:
    small = {"memory_bytes": MEMORY, "max_file_bytes": 100_000, "max_open_files": 40, "timeout_s": 5.0}
    return Reward(function=function, **(small | changes))


# ---- what reward code may take -----------------------------------------------------------------------------


def test_past_a_limit_is_an_error_that_names_it(grader: str) -> None:
    named = {
        f"allocate {2 * MEMORY}": f"reward.memory_bytes = {MEMORY}",
        "hoard": f"reward.memory_bytes = {MEMORY}",
        "abort std::bad_alloc": f"reward.memory_bytes is {MEMORY}",
        "open 60": "reward.max_open_files = 40",
        "file 200000": ": more than reward.max_file_bytes = 100000 allows",
    }
    errors = check_culprits(limited(f"{grader}:grade"), named)
    assert "SIGABRT); its last output: terminate called" in errors[2] and "File too large" in errors[4]
    assert max(map(len, errors)) <= MAX_ERROR_CHARS


def test_within_the_limits_nothing_fails(grader: str) -> None:
    texts = [f"allocate {MEMORY // 4}", "open 20", "file 99000"]
    assert [outcome.error for outcome in score(limited(f"{grader}:grade"), *texts)] == [None] * 3


def test_a_limit_of_what_a_process_holds_costs_nobody_later(grader: str) -> None:
    """What the first one hoards is gone with its process."""

    async def main() -> None:
        async with RewardPool(limited(f"{grader}:grade")) as pool:
            for bad in ("hoard", "open 60"):
                assert (await pool.score([sample(bad)]))[0].error
                for text in ("open 20", f"allocate {MEMORY // 4}"):
                    assert (await pool.score([sample(text)]))[0].error is None

    run(main())


def test_limits_hold_for_asynchronous_functions(grader: str) -> None:
    outcomes = score(limited(f"{grader}:later"), "ok", f"allocate {2 * MEMORY}", "throw evil", "ok")
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
    assert "reward.memory_bytes" in str(outcomes[1].error) and "cannot be read" in str(outcomes[2].error)


def test_limits_hold_while_the_function_is_loaded(tmp_path: Path) -> None:
    greedy = tmp_path / "greedy.py"
    greedy.write_text("TABLE = bytearray(10**9)\ndef grade(sample): return 1.0\n")
    with pytest.raises(RewardError, match=rf"could not be loaded: .*reward.memory_bytes = {MEMORY}"):
        score(limited(f"{greedy}:grade"), "x")


def test_the_smallest_memory_that_the_configuration_takes_is_enough_for_the_built_in_rewards() -> None:
    (outcome,) = score(limited("numeric", memory_bytes=64 * 1024**2), "#### 1")
    assert outcome.score == 1.0


def test_where_code_of_the_userruns(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_PLACE", "x")
    monkeypatch.setenv("SOME_API_KEY", "x")
    monkeypatch.setenv("PLAIN_SETTING", "kept")
    (outcome,) = score(limited(f"{grader}:grade"), "state")
    assert outcome.metrics == {
        "no_new_privs": 1.0,
        "secrets": 0.0,
        "plain": 1.0,
        "leads_session": 1.0,
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


# ---- what is left of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["daemon", "daemon_then_die"])
def test_what_left_its_group_and_session_is_killed_too(grader: str, tmp_path: Path, how: str) -> None:
    note = tmp_path / "pids"

    async def main() -> None:
        async with RewardPool(limited(f"{grader}:grade")) as pool:
            (outcome,) = await pool.score([sample(f"{how} {note}")])
            (pid,) = map(int, note.read_text().split())
            if how == "daemon":
                assert outcome.score == 1.0 and runs(pid), "it must have lived until its worker ends"
            else:
                assert "exit code 9" in str(outcome.error) and not alive([pid])

    run(main())
    assert not alive(list(map(int, note.read_text().split())))


def test_a_fork_bomb_ends_at_the_time_limit(grader: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    check_culprits(limited(f"{grader}:grade", timeout_s=1.0), {f"bomb {note}": "timed out after 1 s"})
    pids = list(map(int, note.read_text().split()))
    assert len(pids) >= 64
    assert not alive(pids)


def test_a_process_that_never_stays_the_same_is_caught(grader: str, tmp_path: Path) -> None:
    note = tmp_path / "generations"
    (outcome,) = score(limited(f"{grader}:grade", timeout_s=1.0), f"comet {note}")
    assert outcome.error == "timed out after 1 s"
    generations = note.stat().st_size
    assert generations > 3
    time.sleep(0.3)
    assert note.stat().st_size == generations


def test_a_stop_that_was_cancelled_is_finished_by_the_next(grader: str) -> None:
    async def main() -> None:
        process = RewardProcess(limited(f"{grader}:grade"), "worker")
        await process.ensure()
        pids: list[float] = []
        await process.judge(1, pack([sample("score 1")]), lambda _, outcome: pids.append(outcome.metrics["pid"]))
        first = asyncio.create_task(process.stop())
        await asyncio.sleep(0)
        first.cancel()
        await process.stop()
        assert not runs(int(pids[0]))

    run(main())


# ---- what it may answer ------------------------------------------------------------------------------------


def test_forged_replies_are_garbage(grader: str) -> None:
    named = {
        "hugest": "a message of 4294967295 bytes",
        "twice": "sample 0, which was not asked for",
        "nested": "expected a verdict, found [[[[[[[",
        "deeper": "sent garbage",
        "wide": "exceeds max_array_len",
        "widest": "exceeds max_array_len",
        "nan": "score nan",
        "inf": "score inf",
        "integer": "score 9223372036854775808",
        "true": "score True",
        "text": "score '1.0'",
        "neither": "score None with error None",
        "both": "with error 'and why not'",
        "metrics": "metric 'a' = [1.0]",
        "names": "sent garbage",
        "many": "exceeds max_map_len",
        "backwards": "seconds -1.0",
        "map": "expected verdicts, found {",
        "extension": "sent garbage",
        "long": "exceeds max_str_len",
    }
    table = {f"write {payload}": words for payload, words in named.items()}
    errors = check_culprits(limited(f"{grader}:grade", workers=3), table | {"replies": "sent garbage"})
    assert all("sent garbage" in error for error in errors), errors


def test_a_flood_of_prints_leaves_time_for_others(grader: str) -> None:
    """A grader that only prints: the pool's process reads on at a pace that leaves it most of its time."""
    noisy = Path(grader).with_name("noisy.py")
    noisy.write_text("import os\ndef grade(sample):\n    while True: os.write(1, b'x' * 65536 + b'\\n')\n")

    async def main() -> float:
        async with RewardPool(limited(f"{noisy}:grade", timeout_s=2.0)) as pool:
            call = asyncio.create_task(pool.score([sample("x")]))
            await asyncio.sleep(0.7)
            start, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(1.0)
            used = (time.process_time() - cpu) / (time.monotonic() - start)
            assert (await call)[0].error == "timed out after 2 s"
            return used

    assert run(main()) < 0.35


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_replies_raise_only_value_errors(body: bytes) -> None:
    for read in (lambda reply: read_verdicts(reply, {0, 1}), read_answer):
        try:
            read(unpack_reply(body))
        except ValueError:
            continue


nothing_but_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(nothing_but_data, min_size=5, max_size=5), max_size=3) | nothing_but_data)
def test_wrong_types_in_replies_raise_only_value_errors(reply: Any) -> None:
    try:
        outcomes = read_verdicts(unpack_reply(pack(reply)[4:]), {0, 1})
    except ValueError:
        return
    for index, outcome in outcomes:
        assert index in (0, 1) and (outcome.error is not None or abs(outcome.score) < float("inf"))


@pytest.mark.parametrize("levels", [10, 500, 1000])
def test_depth_costs_nothing(levels: int) -> None:
    for head in (b"\x91", b"\x81\xa1k"):
        with pytest.raises(ValueError, match=r"verdict|deep"):
            read_verdicts(unpack_reply(head * levels + b"\xc0"), {0})
        with pytest.raises(ValueError, match=r"convention|deep"):
            read_answer(unpack_reply(head * levels + b"\xc0"))
    gc.collect()


def test_hostile_objects_cost_one_sample(grader: str) -> None:
    named = {
        "throw evil": "Evil: (its message cannot be read) at ",
        "throw endless": "timed out after 1 s",
        "throw hydra": "died (exit code 1)",
        "throw interrupt": "KeyboardInterrupt:  at ",
        "throw generator": "GeneratorExit:  at ",
        "throw surrogate": "ValueError: ?????",
        "throw long": "grader.py:",
        "give number": "cannot be read: KeyError",
        "give object": "returned",
        "give integer": "returned inf",
        "give bytes": "a bytes",
        "recurse 1": "RecursionError",
        "exit": "died (exit code 3)",
        # catastrophic backtracking, in C and with the interpreter's lock held: the policy chose the answer
        "match " + "a" * 64 + "b": "timed out after 1 s",
    }
    errors = check_culprits(limited(f"{grader}:grade", workers=3, timeout_s=1.0), named)
    assert max(map(len, errors)) <= MAX_ERROR_CHARS


def test_names_that_have_no_utf8_are_kept_readable(grader: str) -> None:
    (outcome,) = score(limited(f"{grader}:grade"), "give names")
    assert outcome.metrics == {"?": 2.0}


@pytest.mark.parametrize(
    "text",
    [
        "\\frac{" * 40_000,
        "\\frac{1" + " " * 200_000,
        "\\frac{1}{" * 30_000 + "2}",
        "$" * 200_000 + "1",
        "1/" * 100_000,
        "-$-" * 70_000,
        "1e" * 100_000,
        "#### " + " " * 200_000 + "7",
        "1" * 99 + "e99/" + "1" * 99,
        "." * 200_000 + "5",
    ],
)
def test_no_answer_buys_time_from_the_built_in_reward(text: str) -> None:
    start = time.process_time()
    final_number(text)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("function", ["exact", "numeric"])
def test_the_built_in_rewards_run_nothing_that_an_answer_says(function: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    code = f"__import__('pathlib').Path({str(planted)!r}).touch()"
    texts = [code, f"#### {code}", f"\\boxed{{{code}}}", f"{{{code}}}", f"${{{code}}}", f"!!python/object/apply:{code}"]
    outcomes = score(limited(function), *texts, "os.system('true')", "9**9**9", "1.0")
    assert all(outcome.error is None for outcome in outcomes) and not planted.exists()
    assert outcomes[-2].score == 0.0
