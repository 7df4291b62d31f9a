"""Many requests in one torch engine: continuous batching, aborts, cancelled callers, death, idleness, close."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_oracle import (
    Gate,
    error,
    load_model,
    logprobs_of,
    sample,
    save_folder,
    serving,
)

from rollout_server.engines import EngineError, Partial, Sampling
from rollout_server.engines.torch.model import TorchModel
from rollout_server.engines.torch.rows import Request, RowTable

PROMPTS = [[3, 9, 17], [5], [30, 2, 2, 11, 8, 39, 1], list(range(1, 20)), [7, 7]]


async def test_four_times_more_requests_than_rows(tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 40, size=rng.integers(1, 12)).tolist() for _ in range(64)]
    async with serving(tmp_path, max_running=16) as engine:
        calls = [
            sample(engine, p, str(i), max_new_tokens=1 + i % 23, seed=i, greedy=i % 5 == 0, temperature=1 + i % 2)
            for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*calls)
        health = await engine.health()
    for i, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.token_ids) == 1 + i % 23
        assert error(answer, logprobs_of(model, prompt, answer, temperature=1 + i % 2)) <= 1e-5
    assert health.generated_tokens == sum(len(answer.token_ids) for (answer,) in answers)
    assert (health.running, health.waiting) == (0, 0)


async def test_answers_to_one_prompt_share_one_prefill(tmp_path: Path) -> None:
    save_folder(tmp_path)
    async with serving(tmp_path) as engine:
        await sample(engine, [3, 1, 4], "a", n=16, max_new_tokens=3)
        assert (await engine.health()).detail["live_prefilled_prompts"] == 1


async def test_waiting_requests_start_in_the_order_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path)
    started: list[int] = []
    original = TorchModel.prefill

    def prefill(self: TorchModel, weights: Any, cache: Any, prompts: list[Any], **rest: Any) -> torch.Tensor:
        started.extend(int(prompt[0]) for prompt in prompts)
        return original(self, weights, cache, prompts, **rest)

    monkeypatch.setattr(TorchModel, "prefill", prefill)
    async with serving(tmp_path, max_running=3) as engine:
        await asyncio.gather(*(sample(engine, [i], str(i), max_new_tokens=1 + i % 4) for i in range(1, 20)))
    assert started == list(range(1, 20))


def test_a_prefill_waits_until_an_eighth_of_the_rows_is_free() -> None:
    rows = RowTable(max_running=16, max_context=8)
    assert not rows.ready_to_admit()
    prompt = np.array([1, 2], dtype=np.int32)
    sampling = Sampling(max_new_tokens=4)
    begun = [Partial()] * 40
    rows.enqueue(Request(request_id="a", prompt=prompt, sampling=sampling, keys=list(range(40)), prefixes=begun))
    assert rows.ready_to_admit()
    rows.admit(1000)
    ready = []
    for _ in range(3):
        ready.append(rows.ready_to_admit())
        rows.remove(np.array([0]))
    assert ready == [False, False, True]
    assert [answer.index for answer in rows.answers] == [13, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


async def test_a_prefill_is_bounded_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(save_folder(tmp_path))
    monkeypatch.setattr("rollout_server.engines.torch.lane.MAX_PREFILL_TOKENS", 20)
    padded: list[tuple[int, int]] = []
    original = TorchModel.prefill

    def prefill(self: TorchModel, weights: Any, cache: Any, prompts: list[Any], **rest: Any) -> torch.Tensor:
        padded.append((len(prompts), max(len(prompt) for prompt in prompts)))
        return original(self, weights, cache, prompts, **rest)

    monkeypatch.setattr(TorchModel, "prefill", prefill)
    prompts = [*PROMPTS, [2] * 30, [6] * 4, [8] * 5]
    async with serving(tmp_path) as engine:
        answers = await asyncio.gather(*(sample(engine, p, str(p), n=2) for p in prompts))
    for prompt, group in zip(prompts, answers, strict=True):
        assert max(error(answer, logprobs_of(model, prompt, answer)) for answer in group) <= 1e-5
    assert all(count == 1 or count * longest <= 20 for count, longest in padded)


async def test_abort_ends_running_and_waiting_answers_and_leaves_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(save_folder(tmp_path))
    gate = Gate(monkeypatch, 5)
    async with serving(tmp_path, max_running=4) as engine:
        doomed = await gate.posted(sample(engine, [1, 2], "doomed", n=6, max_new_tokens=60))
        other = await gate.posted(sample(engine, [3], "other", max_new_tokens=30))
        await gate.reached()
        assert engine.running_tokens() == {"doomed": 4 * 5, "other": 0}
        with pytest.raises(EngineError, match="'doomed' is already running"):
            twin = await gate.posted(sample(engine, [1, 2], "doomed"))
            gate.release()
            await twin
        engine.abort("doomed")
        engine.abort("nobody")
        answers = await doomed
        assert [answer.finish_reason for answer in answers] == ["abort"] * 6
        assert [len(answer.token_ids) > 0 for answer in answers] == [True] * 4 + [False] * 2
        assert max(error(a, logprobs_of(model, [1, 2], a)) for a in answers[:4]) <= 1e-5
        (rest,) = await other
        assert rest.finish_reason == "length"
        assert error(rest, logprobs_of(model, [3], rest)) <= 1e-5
        assert engine.running_tokens() == {}


async def test_cancelled_caller_frees_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path)
    gate = Gate(monkeypatch, 3)
    async with serving(tmp_path, max_running=2) as engine:
        task = await gate.posted(sample(engine, [1, 2], "gone", n=2, max_new_tokens=60))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.release()
        await sample(engine, [1], "next", max_new_tokens=2)
        health = await engine.health()
        assert health.generated_tokens < 30
        assert engine.running_tokens() == {}


async def test_death_of_the_thread_reaches_every_waiter_and_every_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path)
    original = TorchModel.decode
    steps = iter(range(100))

    def decode(self: TorchModel, *args: Any) -> torch.Tensor:
        if next(steps) == 4:
            raise MemoryError("no room for logits")
        return original(self, *args)

    monkeypatch.setattr(TorchModel, "decode", decode)
    async with serving(tmp_path, max_running=2) as engine:
        calls = [sample(engine, [i], str(i)) for i in range(1, 6)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError)
            assert "decode thread died: MemoryError: no room for logits" in str(result)
            assert isinstance(result.__cause__, MemoryError)
        for call in (engine.health(), engine.pause("drain"), engine.digest(), sample(engine, [1], "late")):
            with pytest.raises(EngineError, match="no room for logits"):
                await call
        engine.abort("1")
        assert engine.running_tokens() == {}


async def test_an_idle_engine_sleeps(tmp_path: Path) -> None:
    save_folder(tmp_path)
    async with serving(tmp_path) as engine:
        await sample(engine, [1], "a")
        await engine.pause("keep_kv")
        paused = asyncio.ensure_future(sample(engine, [1], "b"))
        await asyncio.sleep(0)
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.1
        await engine.resume()
        await paused


async def test_close_returns_what_runs_as_abort_and_refuses_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path)
    gate = Gate(monkeypatch, 3)
    async with serving(tmp_path, max_running=1) as engine:
        running = await gate.posted(sample(engine, [1], "running"))
        waiting = await gate.posted(sample(engine, [2], "waiting"))
        await gate.reached()
        closing = await gate.posted(engine.close())
        gate.release()
        await closing
        assert [len((await task)[0].token_ids) for task in (running, waiting)] == [4, 0]
        with pytest.raises(EngineError, match="closed"):
            await sample(engine, [1], "late")
