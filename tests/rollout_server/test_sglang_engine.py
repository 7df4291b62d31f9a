"""The engine at its edges: requests, refusals, half updates, evaluations."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_served import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    TOLERANCE,
    Served,
    check_logprobs,
    digests,
    random_model,
    staged,
)
from torch_oracle import error, logprobs_of

from rollout_server.engines.base import EngineError, Sampling

PROMPT = [(5 * i + 1) % 40 for i in range(24)]


async def refused(call: Any, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        await call


async def test_answers_of_version_0_and_their_digests(served: Served) -> None:
    await served.update(0, "drain")
    assert await served.engine.digest() == digests(served.model)  # taken anew, without an update
    answers = await served.sample(PROMPT, 4)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1, "all answers are the same"
    for answer in answers:
        assert answer.finish_reason == "length"
        check_logprobs(served.model, PROMPT, answer)
    (greedy,) = await served.sample(PROMPT, greedy=True)
    with torch.inference_mode():
        logits = served.model(torch.tensor([PROMPT + greedy.token_ids.tolist()])).logits[0]
    assert greedy.token_ids.tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    stop = int(greedy.token_ids[3])
    (stopped,) = await served.sample(PROMPT, greedy=True, stop_token_ids=(stop,))
    first = greedy.token_ids.tolist().index(stop)
    assert stopped.finish_reason == "stop" and stopped.token_ids.tolist() == greedy.token_ids[: first + 1].tolist()


async def test_its_processes_take_the_threads_that_they_are_given(served: Served) -> None:
    assert served.config().rollout.num_threads == 1
    for pid in served.engine.sglang.pids():
        assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_logprobs_are_those_at_the_sampling_temperature(served: Served) -> None:
    (answer,) = await served.sample(PROMPT, temperature=0.6)
    assert error(answer, logprobs_of(served.model, PROMPT, answer, temperature=0.6)) <= TOLERANCE


async def test_requests_that_do_not_fit_are_refused(served: Served) -> None:
    await refused(served.sample([1] * PROMPT_TOKENS, max_new_tokens=NEW_TOKENS + 1), "exceeds the context of")
    await refused(served.sample([]), "each must be at least 1")
    await refused(served.sample([3, 40]), "token id 40 is outside the vocabulary of 40")
    await refused(served.sample([3], temperature=0.0), "above 0; for argmax set greedy")
    await refused(served.engine.load(staged(served.model), 99), "while the engine decodes; pause it first")


async def test_a_half_updated_engine_does_not_serve_until_it_is_healed(served: Served) -> None:
    before = served.version
    model = random_model(201)
    await served.engine.pause("keep_kv")
    name = "model.layers.1.self_attn.q_proj.weight"
    broken = [(n, t.T.contiguous() if n == "model.embed_tokens.weight" else t) for n, t in staged(model)]
    await refused(served.engine.load(broken, before + 1), "scheduler 0 could not load")
    await refused(served.engine.resume(), "half updated")
    missing = [(n, t) for n, t in staged(model) if n != name]
    await served.engine.load(missing, before + 1)
    assert digests(model).items() > (await served.engine.digest()).items(), "a tensor that is missing shows"
    await served.engine.load(staged(model), before + 1)
    assert await served.engine.digest() == digests(model)
    await served.engine.resume()
    served.model, served.version = model, before + 1
    (answer,) = await served.sample(PROMPT)
    assert set(answer.versions.tolist()) == {before + 1}
    check_logprobs(model, PROMPT, answer)


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_a_pause_that_fails_lets_requests_go_on(served: Served, mode: str) -> None:
    async def refuse() -> None:
        raise EngineError("no pause")

    kept = served.start_sample(PROMPT, max_new_tokens=90)
    await served.under_way(kept)
    pause = served.engine.sglang.pause
    served.engine.sglang.pause = refuse
    try:
        await refused(served.engine.pause(mode), "no pause")
    finally:
        served.engine.sglang.pause = pause
    async with asyncio.timeout(20):
        (new,) = await served.sample(PROMPT)
        (old,) = await kept
    assert new.finish_reason != "abort" and old.finish_reason != "abort"
    check_logprobs(served.model, PROMPT, old)


async def test_without_recorded_versions_no_token_is_called_newer_than_it_is(served: Served) -> None:
    served.spans = {}
    task = served.start_sample(PROMPT, max_new_tokens=90)
    await served.under_way(task)
    await served.update(203, "keep_kv")
    (answer,) = await task
    (spans,) = served.spans.values()
    served.spans = None
    old, new = spans
    assert answer.versions[0] == int(old["version"]) and answer.versions[-1] == int(new["version"])
    first_new = int((answer.versions == served.version - 1).sum())
    assert old["end"] <= first_new <= old["end"] + 17, (spans, first_new)  # what a stream interval leaves in doubt


async def test_an_evaluation_keeps_its_version_until_it_is_over(served: Served) -> None:
    version, model = served.version, served.model
    await served.engine.pin(version)
    request = served.engine.generate
    sampling = Sampling(max_new_tokens=60, greedy=True)
    (answer,) = await request(PROMPT, sampling, 1, request_id="first", pinned=version)
    assert served.engine.holds() == version
    updating = asyncio.ensure_future(served.update(202, "keep_kv"))
    (later,) = await request(PROMPT, sampling, 1, request_id="second", pinned=version)
    assert not updating.done()
    for one in (answer, later):
        assert set(one.versions.tolist()) == {version}
        check_logprobs(model, PROMPT, one)
    left = asyncio.ensure_future(request(PROMPT, sampling, 16, request_id="left", pinned=version))
    await asyncio.sleep(0)
    await served.engine.unpin(version)
    assert {one.finish_reason for one in await left} == {"abort"}, "nobody waits for it any more"
    await updating
    assert served.engine.version == version + 1 and served.engine.holds() is None
    await refused(request(PROMPT, sampling, 1, request_id="third", pinned=version), f"version {version} is not held")
