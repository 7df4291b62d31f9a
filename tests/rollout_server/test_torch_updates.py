"""Updates of the torch engine while it works: versions per token, KV, drains, pins, updates that break off."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines import EngineError
from tests.rollout_server.torch_oracle import (
    check_versions,
    error,
    hf_tensors,
    logprobs_of,
    logprobs_over_kept_kv,
)
from tests.rollout_server.torch_served import DEADLINE_S, LONG, PROMPT, STEP, Gates, serving, stopped_midway, update


async def test_keep_kv_goes_on_over_the_old_kv(folder: Path, old: Any, new: Any, gate_at: Gates) -> None:
    async with stopped_midway(folder, gate_at, "keep_kv") as (engine, answers, pausing):
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
    prefill_tokens: int, folder: Path, old: Any, new: Any, monkeypatch: pytest.MonkeyPatch, gate_at: Gates
) -> None:
    monkeypatch.setattr("rollout_server.engines.torch.lane.MAX_PREFILL_TOKENS", prefill_tokens)
    async with stopped_midway(folder, gate_at, "recompute_kv", n=5) as (engine, answers, pausing):
        await pausing
        await engine.load(iter(hf_tensors(new).items()), 1)
        await engine.resume()
        for answer in await answers:
            assert answer.versions.tolist() == [0] * (STEP + 1) + [1] * (40 - STEP - 1)
            check_versions({0: old, 1: new}, PROMPT, answer)


async def test_drain_finishes_what_runs_and_starts_nothing(folder: Path, old: Any, new: Any, gate_at: Gates) -> None:
    async with stopped_midway(folder, gate_at, "drain") as (engine, answers, pausing):
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
async def test_a_drain_that_is_overtaken_ends(overtaking: str, folder: Path, new: Any, gate_at: Gates) -> None:
    gate = gate_at(STEP)
    async with serving(folder) as engine:
        answers = await gate.posted(engine.generate(PROMPT, LONG, 1, request_id="a"))
        await gate.reached()
        draining = await gate.posted(engine.pause("drain"))
        calls = {"pause": lambda: engine.pause("keep_kv"), "resume": engine.resume, "close": engine.close}
        second = await gate.posted(calls[overtaking]())
        gate.release()
        (ended,) = await asyncio.gather(draining, return_exceptions=True)
        assert isinstance(ended, EngineError) == (overtaking == "close")
        await second
        if overtaking == "resume":
            with pytest.raises(EngineError, match="pause first"):
                await engine.load(hf_tensors(new).items(), 1)
        await engine.close()
        assert (await answers)[0].finish_reason in ("abort", "length")


async def test_drain_waits_for_live_requests_only(folder: Path, old: Any, new: Any, gate_at: Gates) -> None:
    async with serving(folder) as engine:
        await engine.pin(0)
        gate = gate_at(3, lambda weights: weights is not engine.live.weights)
        pinned = await gate.posted(engine.generate([5], LONG, 1, request_id="pinned", pinned=0))
        await gate.reached()
        draining = await gate.posted(engine.pause("drain"))
        gate.release()
        await draining
        await engine.load(hf_tensors(new).items(), 1)
        (answer,) = await pinned
        assert error(answer, logprobs_of(old, [5], answer)) <= 1e-5


async def test_several_pins_and_unpin(folder: Path, old: Any, new: Any, gate_at: Gates) -> None:
    async with serving(folder) as engine:
        with pytest.raises(EngineError, match="pin of version 1 refused: the live version is 0"):
            await engine.pin(1)
        await engine.pin(0)
        with pytest.raises(EngineError, match="pause first"):
            await engine.load(hf_tensors(new).items(), 1)
        await update(engine, new, 1, "drain")
        await engine.pin(1)
        await engine.pin(0)
        health = await engine.health()
        weights = sum(tensor.nbytes for tensor in engine.live.weights.tensors.values())
        assert (health.detail["pins"], health.memory_bytes) == (2, 3 * weights)
        for version, model in ((0, old), (1, new)):
            (answer,) = await engine.generate([8], LONG, 1, request_id="e", pinned=version)
            assert answer.versions.tolist() == [version] * 40
            assert error(answer, logprobs_of(model, [8], answer)) <= 1e-5
        gate = gate_at(3)
        running = await gate.posted(engine.generate([8], LONG, 1, request_id="f", pinned=0))
        await gate.reached()
        unpinning = await gate.posted(engine.unpin(0))
        gate.release()
        await unpinning
        assert ((await running)[0].finish_reason, len((await running)[0].token_ids)) == ("abort", 4)
        await engine.unpin(0)
        await engine.unpin(17)
        with pytest.raises(EngineError, match=r"version 0 is not pinned here \(pinned: \[1\]\)"):
            await engine.generate([8], LONG, 1, request_id="g", pinned=0)
        assert (await engine.health()).generated_tokens == 2 * 40 + 4


class BusBrokeError(Exception):
    """Stands for what a weight bus raises in the middle of an update."""


async def test_a_half_updated_engine_does_not_serve_until_it_is_refilled(folder: Path, old: Any, new: Any) -> None:
    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(hf_tensors(new).items())[:5]
        raise BusBrokeError("peer lost")

    async with serving(folder) as engine:
        await engine.pin(0)
        await engine.pause("keep_kv")
        with pytest.raises(BusBrokeError, match="peer lost"):
            await engine.load(breaking_off(), 1)
        assert engine.version == 0
        assert (await engine.health()).detail["half_updated"] == 1.0
        refusal = "refused: the load of version 1 over version 0 did not complete"
        with pytest.raises(EngineError, match=f"resume {refusal}"):
            await engine.resume()
        with pytest.raises(EngineError, match=f"pin of version 1 {refusal}"):
            await engine.pin(1)
        (pinned,) = await engine.generate([8], LONG, 1, request_id="p", pinned=0)
        assert error(pinned, logprobs_of(old, [8], pinned)) <= 1e-5
        waiting = asyncio.ensure_future(engine.generate([8], LONG, 1, request_id="w"))
        await engine.load(hf_tensors(new).items(), 1)
        await engine.resume()
        (answer,) = await waiting
        assert answer.versions.tolist() == [1] * 40
        assert error(answer, logprobs_of(new, [8], answer)) <= 1e-5


async def test_pinned_requests_go_on_and_nothing_else_touches_the_weights_while_a_load_waits_for_the_bus(
    folder: Path, old: Any, new: Any
) -> None:
    bus, stuck = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(hf_tensors(new).items()):
            if number == 5:
                stuck.set()
                assert bus.wait(DEADLINE_S)
            yield named

    async with serving(folder) as engine:
        await engine.pin(0)
        await engine.pause("keep_kv")
        loading = asyncio.ensure_future(engine.load(slow(), 1))
        assert await asyncio.to_thread(stuck.wait, DEADLINE_S)
        (pinned,) = await engine.generate([8], LONG, 1, request_id="p", pinned=0)
        assert error(pinned, logprobs_of(old, [8], pinned)) <= 1e-5
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        with pytest.raises(EngineError, match="load of version 2 while another load runs"):
            await engine.load(hf_tensors(old).items(), 2)
        with pytest.raises(EngineError, match="resume refused"):
            await engine.resume()
        bus.set()
        refused = True
        while refused:
            try:
                await engine.load(hf_tensors(new).items(), 2)
                refused = False
            except EngineError:
                await asyncio.sleep(0.001)
        await engine.resume()
        (answer,) = await engine.generate([8], LONG, 1, request_id="a")
        assert error(answer, logprobs_of(new, [8], answer)) <= 1e-5


async def test_weights_that_were_not_finite_leave_nothing_behind(folder: Path, new: Any) -> None:
    async with serving(folder) as engine:
        await engine.pause("keep_kv")
        await engine.load(((n, torch.full_like(t, float("nan"))) for n, t in hf_tensors(new).items()), 1)
        await engine.resume()
        poisoned = await engine.generate(PROMPT, LONG, 4, request_id="a")
        assert np.isnan(poisoned[0].logprobs).all()
        await update(engine, new, 2)
        for answer in await engine.generate(PROMPT, LONG, 4, request_id="b"):
            assert error(answer, logprobs_of(new, PROMPT, answer)) <= 1e-5
