"""SGLang answers that go on from a prefix, and what a running one shows of itself."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from sglang_served import NEW_TOKENS, Served, check_logprobs

from rollout_server.engines.base import EngineError, Partial, Sampling
from rollout_server.engines.sglang.requests import Answer, Part

PROMPT = [(7 * i + 3) % 40 for i in range(24)]
LONG = Sampling(max_new_tokens=NEW_TOKENS)


def one(token: int, version: int = 0) -> Partial:
    """A prefix of one token."""
    return Partial(
        token_ids=np.array([token], np.int32),
        logprobs=np.array([-1], np.float32),
        versions=np.array([version], np.int32),
    )


async def shown_midway(served: Served, n: int, name: str) -> list[Partial]:
    """What the answers of a request had shown when it was called off."""
    task = served.loop.create_task(served.engine.generate(PROMPT, LONG, n, request_id=name), name=name)
    await served.under_way(task)
    while min(part.token_ids.size for part in served.engine.progress(name)) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    shown: list[Partial] = served.engine.progress(name)
    served.engine.abort(name)
    for part, answer in zip(shown, await task, strict=True):
        assert answer.finish_reason == "abort" and 1 < part.token_ids.size <= answer.token_ids.size < NEW_TOKENS
        count = part.token_ids.size
        for of_part, of_answer in (
            (part.token_ids, answer.token_ids),
            (part.logprobs, answer.logprobs),
            (part.versions, answer.versions),
        ):
            assert of_part.tolist() == of_answer[:count].tolist()
    assert served.engine.progress(name) == []
    return shown


async def test_an_answer_goes_on_under_other_weights(served: Served) -> None:
    old, before = served.model, served.version
    shown = await shown_midway(served, 3, "first")
    new = await served.update(301, "keep_kv")
    ended = Partial(
        token_ids=shown[2].token_ids[:2],
        logprobs=shown[2].logprobs[:2],
        versions=shown[2].versions[:2],
        finish_reason="stop",
    )
    answers = await served.engine.generate(PROMPT, LONG, 3, request_id="second", prefixes=[*shown[:2], ended])
    assert answers[2].finish_reason == "stop" and answers[2].token_ids.tolist() == ended.token_ids.tolist()
    for part, answer in zip(shown[:2], answers, strict=False):
        count = part.token_ids.size
        assert answer.finish_reason == "length"
        assert answer.versions.tolist() == [before] * count + [before + 1] * (NEW_TOKENS - count)
        assert answer.token_ids[:count].tolist() == part.token_ids.tolist()
        check_logprobs(old, PROMPT, answer, before)
        check_logprobs(new, PROMPT, answer, before + 1)
    with pytest.raises(EngineError, match="prefix 0 has a token outside the vocabulary of 40"):
        await served.engine.generate(PROMPT, LONG, 1, request_id="x", prefixes=[one(40)])


async def test_greedy_tokens_after_a_prefix_are_those_of_the_model(served: Served) -> None:
    shown = await shown_midway(served, 1, "first")
    sampling = Sampling(max_new_tokens=NEW_TOKENS, greedy=True)
    (answer,) = await served.engine.generate(PROMPT, sampling, 1, request_id="second", prefixes=shown)
    count = shown[0].token_ids.size
    with torch.inference_mode():
        logits = served.model(torch.tensor([PROMPT + answer.token_ids.tolist()])).logits[0]
    assert answer.token_ids[count:].tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1)[count:].tolist()


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_what_is_shown_over_an_update_is_never_newer_than_it_is(served: Served, mode: str) -> None:
    before = served.version
    task = served.loop.create_task(served.engine.generate(PROMPT, LONG, 2, request_id="a"), name="a")
    await served.under_way(task)
    pieces = [served.engine.progress("a")]
    told = [part.token_ids.size for part in pieces[0]]
    await served.update(302, mode)
    while not task.done():
        new = served.engine.progress("a", told)
        if any(part.token_ids.size for part in new):
            pieces.append(new)
            told = [count + part.token_ids.size for count, part in zip(told, new, strict=True)]
        await asyncio.sleep(0.002)
    for index, answer in enumerate(task.result()):
        tokens, versions = (np.concatenate([getattr(p[index], k) for p in pieces]) for k in ("token_ids", "versions"))
        count = tokens.size
        assert len(pieces) > 2 and count > NEW_TOKENS // 2
        assert tokens.tolist() == answer.token_ids[:count].tolist()
        assert (versions <= answer.versions[:count]).all() and (np.diff(versions) >= 0).all()
        assert set(answer.versions.tolist()) == {before, before + 1} == set(versions.tolist())


# ---- without SGLang ---------------------------------------------------------------------------------------


def output(ids: list[int]) -> dict[str, Any]:
    """An output of a part that runs, as SGLang streams it."""
    pairs = [(-token / 8, token, None) for token in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": None, "output_token_logprobs": pairs}}


def test_progress_reaches_over_prefix_parts_and_what_runs() -> None:
    begun = one(9, version=2)
    answer = Answer("lease", [1], Sampling(max_new_tokens=8), pinned=None, prefix=begun)
    ended = output([5, 6])
    ended["meta_info"]["finish_reason"] = {"type": "abort"}
    answer.take(Part(rid="a", version=3, interrupted=True), ended, 0)
    answer.part = Part(rid="b", version=4, boundaries=[(1, 5)], output=output([7, 8]))
    for since in range(7):
        part = answer.progress(since)
        assert part.token_ids.tolist() == [9, 5, 6, 7, 8][since:]
        assert part.logprobs.tolist() == [-1, -5 / 8, -6 / 8, -7 / 8, -1][since:]
        assert part.versions.tolist() == [2, 3, 3, 4, 5][since:]
        assert part.finish_reason is None
    answer.part, answer.ended = None, "length"
    assert (answer.progress(1).token_ids.tolist(), answer.progress(1).finish_reason) == ([5, 6], "length")
