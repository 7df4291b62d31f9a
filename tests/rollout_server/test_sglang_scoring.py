"""SGLang scores what is there: at the temperature, of one version, also where it has read the tokens before."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.base import EngineError, Scored
from rollout_server.engines.sglang.requests import SCORED_AT, scored_of
from tests.rollout_server.sglang_served import TOLERANCE, Served

PROMPT = [(7 * i + 2) % 40 for i in range(40)]


def check(scored: Scored, model: Any, whole: list[np.ndarray], firsts: list[int], temperature: float, top: int) -> None:
    """Logprobs, and those of the likeliest, are those of a forward of the model."""
    wanted, chosen = [], []
    for ids, first in zip(whole, firsts, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0, first - 1 : -1]
        logprobs = (logits.double() / temperature).log_softmax(-1)
        wanted.append(logprobs.gather(1, torch.from_numpy(ids[first:, None].astype(np.int64))).flatten())
        chosen.append(logprobs.topk(top).values.flatten())
    assert np.abs(scored.logprobs - torch.cat(wanted).numpy()).max() <= TOLERANCE
    assert np.abs(scored.top - torch.cat(chosen).numpy()).max(initial=0) <= TOLERANCE
    assert scored.ids.size == scored.top.size == top * scored.logprobs.size


async def test_scores_are_of_the_live_weights_whatever_the_cache_has(served: Served) -> None:
    firsts = [len(PROMPT), len(PROMPT), 1]
    answers = await served.sample(PROMPT, 2, max_new_tokens=20)
    whole = [np.array([*PROMPT, *answer.token_ids], np.int32) for answer in answers]
    whole.append(np.array([3, 1, 39], np.int32))  # the last id of the vocabulary, which SGLang calls 0
    before = await served.engine.score(whole, firsts, temperature=1.0, top=5)
    assert before.version == served.version
    check(before, served.model, whole, firsts, 1.0, 5)
    sampled = np.concatenate([answer.logprobs for answer in answers])
    assert np.abs(before.logprobs[: sampled.size] - sampled).max() <= TOLERANCE

    await served.engine.pause("keep_kv")
    waiting = served.loop.create_task(served.engine.score(whole, firsts, temperature=1.0, top=0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    model = await served.update(771, "keep_kv")
    after = await waiting
    assert after.version == served.version == before.version + 1
    check(after, model, whole, firsts, 1.0, 0)


async def test_an_update_in_the_middle_has_all_scored_again(served: Served) -> None:
    whole, ask, calls = [np.array([*PROMPT, 5, 6], np.int32)] * 3, served.engine.sglang.score, itertools.count()

    async def slow(*arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = await ask(*arguments)
        if next(calls) == 0:
            await served.update(772, "keep_kv")
        return found

    served.engine.sglang.score = slow
    try:
        scored = await served.engine.score(whole, [len(PROMPT)] * 3, temperature=1.0, top=2)
    finally:
        served.engine.sglang.score = ask
    assert next(calls) == 6 and scored.version == served.version
    check(scored, served.model, whole, [len(PROMPT)] * 3, 1.0, 2)


async def test_another_temperature_than_its_own_is_refused_by_name(served: Served) -> None:
    with pytest.raises(EngineError, match=r"at temperature 1 here, not at rollout\.temperature 0\.7"):
        await served.engine.score([np.array([3, 4], np.int32)], [1], temperature=0.7, top=0)


async def tempered(served: Served) -> None:
    whole, firsts = [np.array([*PROMPT, *range(9)], np.int32), np.array([3, 1, 4], np.int32)], [len(PROMPT), 1]
    for top in (0, 4):
        scored = await served.engine.score(whole, firsts, temperature=0.7, top=top)
        check(scored, served.model, whole, firsts, 0.7, top)


@pytest.mark.slow
def test_a_teacher_s_sglang_scores_at_the_sampling_temperature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang 0.5.20 itself gives logprobs of prompts at temperature 1, whatever a request says."""
    from tests.rollout_server.sglang_host import Host

    monkeypatch.setenv(SCORED_AT, "0.7")
    host = Host(tmp_path / "qwen3")
    try:
        host(tempered, {})
    finally:
        host.close()


@pytest.mark.parametrize(
    "told",
    [
        {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None]]},
        {"input_token_logprobs": [[None, 5, None], [-1.0, 7, None]], "input_top_logprobs": [None, [[-1.0, 7, None]]]},
        {},
    ],
)
def test_logprobs_of_other_tokens_or_too_few_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="corrupt"):
        scored_of(told, [5, 7], 1, 2, 40)
