"""What the tests of reward processes share: samples, pools, tables of culprits, and who still runs."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.data import Reward
from rollout_server.tasks.rewards import RewardOutcome, Sample
from rollout_server.tasks.rewards.pool import RewardPool
from rollout_server.tasks.sandbox.probe import isolation


def sample(completion: str = "42", truth: Any = "42", **changes: Any) -> Sample:
    base = {
        "prompt": "6*7=",
        "completion": completion,
        "ground_truth": truth,
        "data_source": "sums",
        "extra_info": {"index": 3},
        "columns": {"level": 5},
        "num_tokens": 3,
        "finish_reason": "stop",
    }
    return base | changes  # type: ignore[return-value]


def needs_isolation() -> None:
    """Skip a test where this machine has no namespaces; fail it where it has, and they hold nothing."""
    found = isolation()
    assert found.is_whole or "do not hold" not in found.reason, found
    if not found.is_whole:
        pytest.skip(f"this machine: {found}")


def pool_of(function: str | dict[str, Any], **keys: Any) -> RewardPool:
    return RewardPool(Reward(function=function, **keys))


def score(function: str | dict[str, Any], *texts: str, truth: Any = "42", **keys: Any) -> list[RewardOutcome]:
    async def main() -> list[RewardOutcome]:
        async with asyncio.timeout(60), pool_of(function, **keys) as pool:
            return await pool.score([sample(text, truth) for text in texts])

    return asyncio.run(main())


def check_culprits(function: str, table: Mapping[str, str], **keys: Any) -> list[str]:
    """Each answer of the table gets an error with these words, and the good ones among them their scores.

    Returns the errors, in the order of the table.
    """
    texts = [text for number, bad in enumerate(table) for text in (f"score {number}", bad)]
    outcomes = score(function, *texts, **keys)
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


def alive(pids: list[int], within_s: float = 20.0) -> list[int]:
    """Those that still run when this long has passed."""
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
