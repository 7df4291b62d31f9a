"""What the tests of reward processes share: samples, one pool for a table of answers, and who still runs."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from configs.data import Reward
from rollout_server.rewards import RewardOutcome, Sample
from rollout_server.rewards.pool import RewardPool


def sample(completion: str, prompt: str = "?") -> Sample:
    return {
        "prompt": prompt,
        "completion": completion,
        "ground_truth": "1",
        "data_source": "d",
        "extra_info": {},
        "columns": {},
        "num_tokens": 1,
        "finish_reason": "stop",
    }


def run(main: Coroutine[Any, Any, Any], *, seconds: float = 60.0) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await main

    return asyncio.run(limited())


def score(reward: Reward, *texts: str) -> list[RewardOutcome]:
    async def main() -> list[RewardOutcome]:
        async with RewardPool(reward) as pool:
            return await pool.score([sample(text) for text in texts])

    outcomes: list[RewardOutcome] = run(main())
    return outcomes


def check_culprits(reward: Reward, table: Mapping[str, str]) -> list[str]:
    """Each answer of the table gets an error with these words, and the good ones among them their scores.

    Returns the errors, in the order of the table.
    """
    texts = [text for number, bad in enumerate(table) for text in (f"score {number}", bad)]
    outcomes = score(reward, *texts)
    assert [outcome.score for outcome in outcomes[::2]] == [float(number) for number in range(len(table))]
    found = {bad: outcome for bad, outcome in zip(table, outcomes[1::2], strict=True)}
    assert all(outcome.score != outcome.score for outcome in found.values()), "an error must not look like a score"
    wrong = {bad: found[bad].error for bad, named in table.items() if named not in (found[bad].error or "")}
    assert wrong == {}, {bad: (table[bad], error) for bad, error in wrong.items()}
    return [str(outcome.error) for outcome in found.values()]


def runs(pid: int) -> bool:
    """Whether a process lives; a zombie that nobody reaps has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def alive(pids: list[int], within_s: float = 5.0) -> list[int]:
    """Those that still run when this long has passed."""
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
