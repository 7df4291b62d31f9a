"""What SGLang does that would go wrong without a word: each test here fails when the guard against it is removed.

A  KV of older weights in the prefix cache serves new requests
B  an update that flushes the cache ends the scheduler when requests are in flight
C  a pause that aborts hands back half an answer as if it were one
"""

from typing import Any

import numpy as np
import pytest
from sglang_served import Served, check_logprobs

PROMPT = [(7 * i + 3) % 40 for i in range(40)]


def check_cached(served: Served, expected: int) -> None:
    """How many tokens of the last request's prompt came from the prefix cache."""
    assert served.cached[-1] == expected, f"{served.cached[-1]} cached tokens, expected {expected}"


async def test_a_no_request_meets_kv_of_older_weights(served: Served) -> None:
    await served.sample(PROMPT)
    await served.sample(PROMPT)
    check_cached(served, len(PROMPT) - 1)
    await served.update(101, "keep_kv")
    for cached in (0, len(PROMPT) - 1):  # computed anew once, then shared
        (answer,) = await served.sample(PROMPT)
        check_cached(served, cached)
        check_logprobs(served.model, PROMPT, answer)


async def test_a_what_a_request_computed_over_an_update_serves_no_other(served: Served) -> None:
    task = served.start_sample(PROMPT, max_new_tokens=60)
    await served.under_way(task)
    await served.update(102, "keep_kv")
    (mixed,) = await task  # its KV, of two versions, goes into the cache as it ends
    assert len(set(mixed.versions.tolist())) == 2
    prompt = PROMPT + mixed.token_ids[:-8].tolist()
    (answer,) = await served.sample(prompt)
    check_cached(served, 0)
    check_logprobs(served.model, prompt, answer)


async def test_a_a_version_that_is_loaded_again_with_other_weights_is_another_one(served: Served) -> None:
    """As after a learner's restart, which makes the versions after its checkpoint a second time."""
    await served.update(103, "keep_kv")
    await served.sample(PROMPT)
    await served.update(104, "keep_kv", version=served.version)
    (answer,) = await served.sample(PROMPT)
    check_cached(served, 0)
    check_logprobs(served.model, PROMPT, answer)


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_b_an_update_with_requests_in_flight_ends_no_process(served: Served, mode: str) -> None:
    pids = served.engine.sglang.pids()
    tasks = [served.start_sample([*PROMPT, i], max_new_tokens=60) for i in range(4)]
    for task in tasks:
        await served.under_way(task)
    await served.update(105, mode)
    for task in tasks:
        (answer,) = await task
        check_whole(answer, 60)
    await served.engine.health()
    assert served.engine.sglang.pids() == pids


async def test_c_what_an_update_interrupts_comes_back_whole(served: Served) -> None:
    old = served.model
    task = served.start_sample(PROMPT, 3, max_new_tokens=60)
    await served.under_way(task)
    new = await served.update(106, "recompute_kv")
    for answer in await task:
        check_whole(answer, 60)
        assert set(answer.versions.tolist()) == {served.version - 1, served.version}, "the first part was thrown away"
        check_logprobs(old, PROMPT, answer, served.version - 1)
        check_logprobs(new, PROMPT, answer, served.version)


async def test_c_what_a_caller_aborts_keeps_its_tokens_and_says_so(served: Served) -> None:
    task, other = (served.start_sample(PROMPT, 2, max_new_tokens=90) for _ in range(2))
    await served.under_way(task)
    served.engine.abort(task.get_name())
    for answer in await task:
        check_partial(served.model, answer)
    for answer in await other:
        check_whole(answer, 90)


def check_whole(answer: Any, tokens: int) -> None:
    found = (answer.finish_reason, len(answer.token_ids))
    assert found == ("length", tokens), f"{found}, expected {tokens} tokens"


def check_partial(model: Any, answer: Any) -> None:
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) < 90
    assert np.isfinite(answer.logprobs).all()
    check_logprobs(model, PROMPT, answer)
