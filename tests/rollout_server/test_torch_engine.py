"""The torch engine: tokens and logprobs against transformers, streams, ends, refusals, batching, death, close."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines import Completion, EngineError, Partial, Sampling
from rollout_server.engines.torch.model import TorchModel
from rollout_server.engines.torch.rows import Request, RowTable
from rollout_server.engines.torch.sampling import choose, stream_key, uniforms
from tests.rollout_server.torch_oracle import VARIANTS, error, load_model, logprobs_of, save_folder
from tests.rollout_server.torch_served import Gates, sample, serving
from tests.support.waiting import eventually

PROMPTS = [[3, 9, 17], [5], [30, 2, 2, 11, 8, 39, 1], list(range(1, 20)), [7, 7]]


def same(a: Completion, b: Completion) -> bool:
    return a.token_ids.tolist() == b.token_ids.tolist() and float(np.abs(a.logprobs - b.logprobs).max()) <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_and_sampled_logprobs_are_those_of_hf(variant: str, tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, **VARIANTS[variant]))
    asked = list(zip(PROMPTS, [1.0, 0.7, 1.9, 1.0, 0.7], strict=True))
    async with serving(tmp_path, max_running=7) as engine:
        answers = await asyncio.gather(*(sample(engine, p, str(p), greedy=True) for p in PROMPTS))
        calls = (sample(engine, p, str(p), n=4, temperature=t, seed=len(p)) for p, t in asked)
        sampled = await asyncio.gather(*calls)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert answer.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert answer.finish_reason == "length"
        assert error(answer, logprobs_of(model, prompt, answer)) <= 1e-5

    for (prompt, temperature), group in zip(asked, sampled, strict=True):
        assert len({tuple(answer.token_ids.tolist()) for answer in group}) == 4
        for answer in group:
            assert error(answer, logprobs_of(model, prompt, answer, temperature=temperature)) <= 1e-5


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


def test_tokens_are_those_of_one_running_sum_over_the_vocabulary() -> None:
    logits = 3 * torch.randn(80, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, 120:260] = float("-inf")  # a block of the sum without any weight, and ends of its neighbours
    uniform = np.random.default_rng(0).random(80)
    uniform[:2] = 0.0, 1.0 - 2**-53
    temperature, greedy = np.where(np.arange(80) % 2, 0.7, 1.0).astype(np.float32), np.arange(80) % 5 == 4
    tokens, logprobs = choose(logits, temperature=temperature, greedy=greedy, uniform=uniform)
    exact = torch.log_softmax(logits.double() / torch.from_numpy(temperature)[:, None], dim=-1).numpy()
    sums = np.exp(exact).cumsum(-1)
    sampled = [min(np.searchsorted(row, at, "right"), 999) for row, at in zip(sums, uniform, strict=True)]
    assert tokens.tolist() == np.where(greedy, exact.argmax(-1), sampled).tolist()
    assert np.abs(logprobs - exact[np.arange(80), tokens]).max() < 1e-6

    at_the_gap = np.concatenate([sums[row, 119] + np.linspace(-2e-7, 2e-7, 500) for row in range(0, 16, 2)])
    ones, no = np.ones(4000, np.float32), np.zeros(4000, np.bool_)
    _, at_gap = choose(logits[:16:2].repeat_interleave(500, 0), temperature=ones, greedy=no, uniform=at_the_gap)
    assert np.isfinite(at_gap).all(), "what rounding leaves over at the end of a block is no token of the next one"

    logits[0] = float("nan")
    tokens, logprobs = choose(logits, temperature=temperature, greedy=greedy, uniform=uniform)
    assert np.isnan(logprobs[0]) and tokens[0] < 1000 and np.isfinite(logprobs[1:]).all()


async def test_streams_depend_on_seed_and_answer_and_not_on_the_batch(folder: Path) -> None:
    async with serving(folder, seed=1) as engine:
        alone = await sample(engine, [3, 1], "alone", n=3, seed=5)
        others = [sample(engine, p, f"o{p}", n=5, seed=len(p), temperature=2.0) for p in PROMPTS]
        crowd, *_ = await asyncio.gather(sample(engine, [3, 1], "crowd", n=3, seed=5), *others)
        assert all(same(a, b) for a, b in zip(alone, crowd, strict=True))
        fewer = await sample(engine, [3, 1], "fewer", n=2, seed=5)
        assert all(same(a, b) for a, b in zip(alone, fewer, strict=False))
        (other,) = await sample(engine, [3, 1], "other", n=1, seed=6)
        assert not same(other, alone[0])
    async with serving(folder, seed=2) as engine:
        (reseeded,) = await sample(engine, [3, 1], "alone", seed=5)
        assert not same(reseeded, alone[0])


async def test_stop_tokens_and_limits_of_each_request_hold_in_one_batch(folder: Path) -> None:
    async with serving(folder) as engine:
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


REFUSED: list[tuple[list[int], dict[str, Any], str]] = [
    ([1] * 10, {"max_new_tokens": 7}, r"10 tokens \+ max_new_tokens 7 = 17 exceeds the context of 16"),
    ([1, 40], {}, "token id 40 is outside the vocabulary of 40"),
    ([], {}, "prompt of 0 tokens"),
    ([1], {"temperature": 0.0}, r"temperature 0\.0"),
]


async def test_requests_that_cannot_be_served_are_refused_by_number(folder: Path) -> None:
    async with serving(folder, max_context=16) as engine:
        for prompt, given, said in REFUSED:
            with pytest.raises(EngineError, match=said):
                await sample(engine, prompt, "a", **{"max_new_tokens": 6, **given})
        (answer,) = await sample(engine, [1] * 10, "a", max_new_tokens=6)
        assert len(answer.token_ids) == 6


async def test_four_times_more_requests_than_rows(folder: Path, old: Any) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 40, size=rng.integers(1, 12)).tolist() for _ in range(64)]
    async with serving(folder, max_running=16) as engine:
        calls = [
            sample(engine, p, str(i), max_new_tokens=1 + i % 23, seed=i, greedy=i % 5 == 0, temperature=1 + i % 2)
            for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*calls)
        health = await engine.health()
    for i, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.token_ids) == 1 + i % 23
        assert error(answer, logprobs_of(old, prompt, answer, temperature=1 + i % 2)) <= 1e-5
    assert health.generated_tokens == sum(len(answer.token_ids) for (answer,) in answers)
    assert (health.running, health.waiting) == (0, 0) and health.busy_s > 0


async def test_answers_to_one_prompt_share_one_prefill(folder: Path) -> None:
    async with serving(folder) as engine:
        await sample(engine, [3, 1, 4], "a", n=16, max_new_tokens=3)
        assert (await engine.health()).detail["live_prefilled_prompts"] == 1


def prefills(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The prompts of each prefill from now on."""
    seen: list[list[Any]] = []
    original = TorchModel.prefill

    def prefill(self: TorchModel, weights: Any, cache: Any, prompts: list[Any], **rest: Any) -> torch.Tensor:
        seen.append(prompts)
        return original(self, weights, cache, prompts, **rest)

    monkeypatch.setattr(TorchModel, "prefill", prefill)
    return seen


async def test_waiting_requests_start_in_the_order_they_came(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = prefills(monkeypatch)
    async with serving(folder, max_running=3) as engine:
        await asyncio.gather(*(sample(engine, [i], str(i), max_new_tokens=1 + i % 4) for i in range(1, 20)))
    assert [int(prompt[0]) for prompts in prefilled for prompt in prompts] == list(range(1, 20))


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


async def test_a_prefill_is_bounded_in_tokens(folder: Path, old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.engines.torch.lane.MAX_PREFILL_TOKENS", 20)
    prefilled = prefills(monkeypatch)
    prompts = [*PROMPTS, [2] * 30, [6] * 4, [8] * 5]
    async with serving(folder) as engine:
        answers = await asyncio.gather(*(sample(engine, p, str(p), n=2) for p in prompts))
    for prompt, group in zip(prompts, answers, strict=True):
        assert max(error(answer, logprobs_of(old, prompt, answer)) for answer in group) <= 1e-5
    assert all(len(prompts) == 1 or len(prompts) * max(map(len, prompts)) <= 20 for prompts in prefilled)


async def test_abort_ends_running_and_waiting_answers_and_leaves_others(folder: Path, old: Any, gate_at: Gates) -> None:
    gate = gate_at(5)
    async with serving(folder, max_running=4) as engine:
        doomed = await gate.posted(sample(engine, [1, 2], "doomed", n=6, max_new_tokens=60))
        other = await gate.posted(sample(engine, [3], "other", max_new_tokens=30))
        await gate.reached()
        assert {"other": 0, **engine.running_tokens()} == {"doomed": 4 * 5, "other": 0}
        with pytest.raises(EngineError, match="'doomed' is already running"):
            twin = await gate.posted(sample(engine, [1, 2], "doomed"))
            gate.release()
            await twin
        engine.abort("doomed")
        engine.abort("nobody")
        answers = await doomed
        assert [answer.finish_reason for answer in answers] == ["abort"] * 6
        assert [len(answer.token_ids) > 0 for answer in answers] == [True] * 4 + [False] * 2
        assert max(error(a, logprobs_of(old, [1, 2], a)) for a in answers[:4]) <= 1e-5
        (rest,) = await other
        assert rest.finish_reason == "length"
        assert error(rest, logprobs_of(old, [3], rest)) <= 1e-5
        assert engine.running_tokens() == {}


async def test_a_request_waits_while_none_of_its_answers_has_a_row(folder: Path, gate_at: Gates) -> None:
    gate = gate_at(5)
    async with serving(folder, max_running=4) as engine:
        await engine.pause("keep_kv")
        names = ("whole", "part", "none")
        calls = [asyncio.ensure_future(sample(engine, [1, 2], name, n=3, max_new_tokens=8)) for name in names]
        await eventually(lambda: engine.waiting() == set(names), "all of them, while it is paused")
        await engine.resume()
        await gate.reached()
        assert engine.waiting() == {"none"}
        gate.release()
        await asyncio.gather(*calls)
        assert engine.waiting() == set()


async def test_cancelled_caller_frees_its_rows(folder: Path, gate_at: Gates) -> None:
    gate = gate_at(3)
    async with serving(folder, max_running=2) as engine:
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
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchModel.decode
    steps = iter(range(100))

    def decode(self: TorchModel, *args: Any) -> torch.Tensor:
        if next(steps) == 4:
            raise MemoryError("no room for logits")
        return original(self, *args)

    monkeypatch.setattr(TorchModel, "decode", decode)
    async with serving(folder, max_running=2) as engine:
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


async def test_close_returns_what_runs_as_abort_and_refuses_more(folder: Path, gate_at: Gates) -> None:
    gate = gate_at(3)
    async with serving(folder, max_running=1) as engine:
        running = await gate.posted(sample(engine, [1], "running"))
        waiting = await gate.posted(sample(engine, [2], "waiting"))
        await gate.reached()
        closing = await gate.posted(engine.close())
        gate.release()
        await closing
        assert [len((await task)[0].token_ids) for task in (running, waiting)] == [4, 0]
        with pytest.raises(EngineError, match="closed"):
            await sample(engine, [1], "late")
