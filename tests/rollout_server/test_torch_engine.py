"""The torch engine against transformers: greedy tokens, logprobs, distribution, streams, ends and refusals."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_oracle import (
    DEADLINE_S,
    VARIANTS,
    error,
    hf_tensors,
    load_model,
    logprobs_of,
    make_model,
    sample,
    save_folder,
    serving,
)

from rollout_server.engines import Completion, EngineError, Partial, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.engines.torch.sampling import choose, stream_key, uniforms

PROMPTS = [[3, 9, 17], [5], [30, 2, 2, 11, 8, 39, 1], list(range(1, 20)), [7, 7]]


def same(a: Completion, b: Completion) -> bool:
    return a.token_ids.tolist() == b.token_ids.tolist() and float(np.abs(a.logprobs - b.logprobs).max()) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_and_logprobs_are_those_of_hf(variant: str, tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, **VARIANTS[variant]))
    async with serving(tmp_path) as engine:
        answers = await asyncio.gather(*(sample(engine, p, str(p), greedy=True) for p in PROMPTS))
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert answer.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert answer.finish_reason == "length"
        assert error(answer, logprobs_of(model, prompt, answer)) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
async def test_sampled_logprobs_are_those_of_hf_at_the_temperature(variant: str, tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, **VARIANTS[variant]))
    temperatures = [1.0, 0.7, 1.9, 1.0, 0.7]
    async with serving(tmp_path, max_running=7) as engine:
        asked = list(zip(PROMPTS, temperatures, strict=True))
        calls = (sample(engine, p, str(p), n=4, temperature=t, seed=len(p)) for p, t in asked)
        answers = await asyncio.gather(*calls)
    for (prompt, temperature), group in zip(asked, answers, strict=True):
        assert len({tuple(answer.token_ids.tolist()) for answer in group}) == 4
        for answer in group:
            assert error(answer, logprobs_of(model, prompt, answer, temperature=temperature)) <= 1e-5


async def test_answers_long_enough_to_grow_the_cache_match_hf(tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path))
    async with serving(tmp_path, max_context=128) as engine:
        short, (long,) = await asyncio.gather(
            sample(engine, [1, 2], "short", n=3), sample(engine, [9], "long", max_new_tokens=127)
        )
    assert error(long, logprobs_of(model, [9], long)) <= 1e-5
    assert max(error(answer, logprobs_of(model, [1, 2], answer)) for answer in short) <= 1e-5


async def test_bfloat16_stays_near_hf_in_bfloat16(tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, "qwen2"), torch.bfloat16)
    async with serving(tmp_path, dtype="bfloat16") as engine:
        (answer,) = await sample(engine, [3, 1, 2], "a")
    assert answer.logprobs.dtype == np.float32
    assert error(answer, logprobs_of(model, [3, 1, 2], answer)) < 0.25


def test_uniforms_are_uniform_and_streams_unrelated() -> None:
    keys = np.array([stream_key(0, seed, answer) for seed in range(40) for answer in range(25)], dtype=np.uint64)
    assert len(set(keys.tolist())) == 1000
    drawn = np.stack([uniforms(keys, np.full(1000, counter)) for counter in range(20)])
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(drawn, bins=10)[0] / drawn.size - 0.1).max() < 0.01
    assert np.abs(np.corrcoef(drawn) - np.eye(20)).max() < 0.15


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.full((3, 5), float("-inf"))
    logits[:, 1] = 0.0
    logits[:, 3] = 1.0
    edges = np.array([0.0, 0.5, 1.0 - 2**-53])
    tokens, logprobs = choose(logits, temperature=np.ones(3, np.float32), greedy=np.zeros(3, np.bool_), uniform=edges)
    assert tokens.tolist() == [1, 3, 3]
    assert np.isfinite(logprobs).all()


async def test_streams_depend_on_seed_and_answer_and_not_on_the_batch(tmp_path: Path) -> None:
    save_folder(tmp_path)
    async with serving(tmp_path, seed=1) as engine:
        alone = await sample(engine, [3, 1], "alone", n=3, seed=5)
        others = [sample(engine, p, f"o{p}", n=5, seed=len(p), temperature=2.0) for p in PROMPTS]
        crowd, *_ = await asyncio.gather(sample(engine, [3, 1], "crowd", n=3, seed=5), *others)
        assert all(same(a, b) for a, b in zip(alone, crowd, strict=True))
        fewer = await sample(engine, [3, 1], "fewer", n=2, seed=5)
        assert all(same(a, b) for a, b in zip(alone, fewer, strict=False))
        (other,) = await sample(engine, [3, 1], "other", n=1, seed=6)
        assert not same(other, alone[0])
    async with serving(tmp_path, seed=2) as engine:
        (reseeded,) = await sample(engine, [3, 1], "alone", seed=5)
        assert not same(reseeded, alone[0])


async def test_stop_tokens_and_limits_of_each_request_hold_in_one_batch(tmp_path: Path) -> None:
    save_folder(tmp_path)
    async with serving(tmp_path) as engine:
        (free,) = await sample(engine, [3, 1, 4], "free", seed=3)
        tokens = free.token_ids.tolist()
        stop = tokens[10]
        first = tokens.index(stop)
        (stopped,), (both,), (limited,), (exact,) = await asyncio.gather(
            sample(engine, [3, 1, 4], "stop", seed=3, stop_token_ids=(stop,)),
            sample(engine, [3, 1, 4], "both", seed=3, stop_token_ids=(99, tokens[0], stop)),
            sample(engine, [3, 1, 4], "limit", seed=3, max_new_tokens=4),
            sample(engine, [3, 1, 4], "exact", seed=3, stop_token_ids=(stop,), max_new_tokens=first + 1),
        )
        (again,) = await sample(engine, [3, 1, 4], "again", seed=3)
    assert (again.token_ids.tolist(), again.finish_reason) == (tokens, "length")
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == (tokens[: first + 1], "stop")
    assert (both.token_ids.tolist(), both.finish_reason) == (tokens[:1], "stop")
    assert (limited.token_ids.tolist(), limited.finish_reason) == (tokens[:4], "length")
    assert (exact.token_ids.tolist(), exact.finish_reason) == (tokens[: first + 1], "stop")


REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "context": ([1] * 10, {"max_new_tokens": 7}, r"10 tokens \+ max_new_tokens 7 = 17 exceeds the context of 16"),
    "vocabulary": ([1, 40], {}, "token id 40 is outside the vocabulary of 40"),
    "empty": ([], {}, "prompt of 0 tokens"),
    "temperature": ([1], {"temperature": 0.0}, r"temperature 0\.0"),
    "pin": ([1], {"pinned": 3}, "version 3 is not pinned"),
    "prefix": ([1], {"prefixes": [Partial(token_ids=np.array([1], np.int32))]}, "prefix 0 has 1 tokens, 0 logprobs"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_requests_that_cannot_be_served_are_refused_by_number(case: str, tmp_path: Path) -> None:
    save_folder(tmp_path)
    prompt, given, said = REFUSED[case]
    of_request = {key: given[key] for key in ("pinned", "prefixes") if key in given}
    sampling = Sampling(**{"max_new_tokens": 6, **{key: given[key] for key in given if key not in of_request}})
    async with serving(tmp_path, max_context=16) as engine:
        with pytest.raises(EngineError, match=said):
            await engine.generate(prompt, sampling, 1, request_id="a", **of_request)
        (answer,) = await sample(engine, [1] * 10, "a", max_new_tokens=6)
        assert len(answer.token_ids) == 6


async def test_health_counts_memory_and_time(tmp_path: Path) -> None:
    save_folder(tmp_path)
    async with serving(tmp_path) as engine:
        idle = await engine.health()
        started = time.perf_counter()
        await sample(engine, [1], "a", n=8)
        wall = time.perf_counter() - started
        busy = await engine.health()
        weights = sum(tensor.nbytes for tensor in engine.live.weights.tensors.values())
    kv_bytes = 2 * 2 * 8 * 2 * 32 * 8 * 4
    assert (idle.busy_s, idle.memory_bytes) == (0.0, weights)
    assert 0.0 < busy.busy_s <= wall
    assert busy.memory_bytes == weights + kv_bytes
    assert (busy.version, busy.generated_tokens) == (0, 8 * 24)


async def test_live_tensors_are_what_is_decoded_with_and_digested(tmp_path: Path) -> None:
    save_folder(tmp_path)
    other = make_model(seed=1)
    async with serving(tmp_path) as engine:
        before = await engine.digest()
        for name, rows in engine.live.weights.layout.items():
            view = engine.live.weights.tensors[rows.live].narrow(0, rows.start, rows.shape[0])
            view.copy_(hf_tensors(other)[name])
        after = await engine.digest()
        (answer,) = await sample(engine, [1, 2], "a")
    assert not set(before.items()) & set(after.items())
    assert error(answer, logprobs_of(other, [1, 2], answer)) <= 1e-5


async def test_two_event_loops_may_use_one_engine(tmp_path: Path) -> None:
    save_folder(tmp_path)
    engine = TorchEngine(tmp_path, max_context=64, max_running=8)

    async def work(name: str) -> list[Completion]:
        return await asyncio.wait_for(sample(engine, [1, 2], name), DEADLINE_S)

    here, there = await asyncio.gather(work("here"), asyncio.to_thread(asyncio.run, work("there")))
    assert same(here[0], there[0])
    await engine.close()
