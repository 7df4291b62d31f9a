"""Updates of the torch engine while it works: versions per token, KV over updates, drains, cancelled pauses."""

import asyncio

import numpy as np
import pytest
import torch
from torch_oracle import (
    LONG,
    PROMPT,
    STEP,
    Gate,
    Models,
    error,
    hf_tensors,
    load_model,
    logprobs_of,
    logprobs_over_kept_kv,
    make_model,
    serving,
    stopped_midway,
)

from rollout_server.engines import EngineError, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from weight_bus.digest import slice_digest


async def until_generated(engine: TorchEngine, tokens: int) -> None:
    """Return once the engine has generated so many tokens; the test's own deadline bounds it."""
    while (await engine.health()).generated_tokens < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_keep_kv_goes_on_over_the_old_kv(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, old, new = models
    async with stopped_midway(folder, monkeypatch, "keep_kv") as (engine, answers, pausing):
        await pausing
        assert engine.running_tokens() == {"a": 3 * (STEP + 1)}
        await engine.load(hf_tensors(new).items(), 1)
        assert engine.version == 1
        await engine.resume()
        for answer in await answers:
            assert answer.versions.tolist() == [0] * (STEP + 1) + [1] * (40 - STEP - 1)
            before, after = slice(0, STEP + 1), slice(STEP + 1, 40)
            assert error(answer, logprobs_of(old, PROMPT, answer)[before], before) <= 1e-5
            kept = logprobs_over_kept_kv(old, new, PROMPT, answer, STEP + 1)
            assert error(answer, kept, after) <= 1e-5
            assert error(answer, logprobs_of(new, PROMPT, answer)[after], after) > 1e-3


@pytest.mark.parametrize("prefill_tokens", [20, 1000], ids=["in small pieces", "at once"])
async def test_recompute_kv_goes_on_as_if_the_new_weights_had_read_everything(
    prefill_tokens: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old, new = models
    monkeypatch.setattr("rollout_server.engines.torch.lane.MAX_PREFILL_TOKENS", prefill_tokens)
    async with stopped_midway(folder, monkeypatch, "recompute_kv", n=5) as (engine, answers, pausing):
        await pausing
        await engine.load(iter(hf_tensors(new).items()), 1)
        await engine.resume()
        for answer in await answers:
            assert answer.versions.tolist() == [0] * (STEP + 1) + [1] * (40 - STEP - 1)
            before, after = slice(0, STEP + 1), slice(STEP + 1, 40)
            assert error(answer, logprobs_of(old, PROMPT, answer)[before], before) <= 1e-5
            assert error(answer, logprobs_of(new, PROMPT, answer)[after], after) <= 1e-5


async def test_drain_finishes_what_runs_and_starts_nothing(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, old, new = models
    async with stopped_midway(folder, monkeypatch, "drain") as (engine, answers, pausing):
        late = asyncio.ensure_future(engine.generate([5], LONG, 2, request_id="late"))
        with pytest.raises(EngineError, match="while live requests run"):
            await engine.load(hf_tensors(new).items(), 1)
        await pausing
        health = await engine.health()
        assert (health.running, health.waiting) == (0, 2)
        for answer in await answers:
            assert (answer.versions.tolist(), answer.finish_reason) == ([0] * 40, "length")
            assert error(answer, logprobs_of(old, PROMPT, answer)) <= 1e-5
        await engine.load(hf_tensors(new).items(), 1)
        await engine.resume()
        for answer in await late:
            assert answer.versions.tolist() == [1] * 40
            assert error(answer, logprobs_of(new, [5], answer)) <= 1e-5


@pytest.mark.parametrize("overtaking", ["pause", "resume", "close"])
async def test_a_drain_that_is_overtaken_says_so(
    overtaking: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = models
    gate = Gate(monkeypatch, STEP)
    async with serving(folder) as engine:
        answers = await gate.posted(engine.generate(PROMPT, LONG, 1, request_id="a"))
        await gate.reached()
        draining = await gate.posted(engine.pause("drain"))
        calls = {"pause": lambda: engine.pause("keep_kv"), "resume": engine.resume, "close": engine.close}
        second = await gate.posted(calls[overtaking]())
        gate.release()
        with pytest.raises(EngineError, match=rf"drain'\) was (overtaken|ended) by {overtaking}"):
            await draining
        await second
        await engine.close()
        assert (await answers)[0].finish_reason in ("abort", "length")


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_a_pause_without_an_update_changes_nothing(
    mode: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old, _ = models
    async with stopped_midway(folder, monkeypatch, mode) as (engine, answers, pausing):
        await pausing
        await engine.resume()
        for answer in await answers:
            assert answer.versions.tolist() == [0] * 40
            assert error(answer, logprobs_of(old, PROMPT, answer)) <= 1e-5


async def test_a_pause_that_is_cancelled_before_it_began_does_not_happen(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = models
    gate = Gate(monkeypatch, STEP)
    async with serving(folder) as engine:
        answers = await gate.posted(engine.generate(PROMPT, LONG, 1, request_id="a"))
        await gate.reached()
        pausing = await gate.posted(engine.pause("keep_kv"))
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        gate.release()
        assert len((await answers)[0].token_ids) == 40


async def test_several_updates_within_one_answer(models: Models) -> None:
    folder, _, _ = models
    versions = [make_model(seed=seed) for seed in range(1, 5)]
    async with serving(folder, max_context=128, max_running=8) as engine:
        calls = [
            asyncio.ensure_future(engine.generate([i], Sampling(max_new_tokens=100, seed=i), 2, request_id=str(i)))
            for i in range(1, 13)
        ]
        for number, model in enumerate(versions, start=1):
            await until_generated(engine, (await engine.health()).generated_tokens + 60)
            await engine.pause("recompute_kv")
            await engine.load(hf_tensors(model).items(), number)
            assert await engine.digest() == {n: slice_digest(t) for n, t in hf_tensors(model).items()}
            await engine.resume()
        assert len(set(np.concatenate([a.versions for call in calls for a in await call]).tolist())) > 1
        everything = [load_model(folder), *versions]
        for prompt, answers in zip(range(1, 13), await asyncio.gather(*calls), strict=True):
            for answer in answers:
                assert (np.diff(answer.versions) >= 0).all()
                expected = torch.stack([logprobs_of(model, [prompt], answer) for model in everything])
                by_version = expected[torch.from_numpy(answer.versions).long(), torch.arange(100)]
                assert error(answer, by_version) <= 1e-5
