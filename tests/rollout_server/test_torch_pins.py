"""Pinned evaluations of the torch engine during updates, and updates that break off half way."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch_oracle import (
    DEADLINE_S,
    LONG,
    PROMPT,
    STEP,
    Gate,
    Models,
    error,
    hf_tensors,
    logprobs_of,
    serving,
    stopped_midway,
)

from rollout_server.engines import EngineError


async def test_pinned_evaluation_goes_on_while_live_requests_are_paused_and_updated(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old, new = models
    async with stopped_midway(folder, monkeypatch, "keep_kv") as (engine, answers, pausing):
        await pausing
        await engine.pin(0)
        paused = await engine.generate([5, 6], LONG, 2, request_id="while paused", pinned=0)
        with pytest.raises(EngineError, match="'a' is already running"):
            await engine.generate([5], LONG, 1, request_id="a", pinned=0)
        await engine.load(hf_tensors(new).items(), 1)
        await engine.resume()
        updated = await engine.generate([5, 6], LONG, 2, request_id="after the update", pinned=0)
        for answer in [*paused, *updated]:
            assert answer.versions.tolist() == [0] * 40
            assert error(answer, logprobs_of(old, [5, 6], answer)) <= 1e-5
        assert (await answers)[0].versions.tolist() == [0] * (STEP + 1) + [1] * (40 - STEP - 1)


async def test_drain_waits_for_live_requests_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, old, new = models
    async with serving(folder) as engine:
        await engine.pin(0)
        gate = Gate(monkeypatch, 3, lambda weights: weights is not engine.live.weights)
        pinned = await gate.posted(engine.generate([5], LONG, 1, request_id="pinned", pinned=0))
        await gate.reached()
        draining = await gate.posted(engine.pause("drain"))
        gate.release()
        await draining
        await engine.load(hf_tensors(new).items(), 1)
        (answer,) = await pinned
        assert error(answer, logprobs_of(old, [5], answer)) <= 1e-5


async def test_live_and_pinned_requests_advance_at_the_same_pace(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = models
    async with serving(folder) as engine:
        await engine.pin(0)
        start = Gate(monkeypatch, 1)
        pinned = await start.posted(engine.generate([2], LONG, 1, request_id="pinned", pinned=0))
        await start.reached()
        live = await start.posted(engine.generate([1], LONG, 1, request_id="live"))
        gate = Gate(monkeypatch, 20, lambda weights: weights is not engine.live.weights)
        start.release()
        await gate.reached()
        counts = engine.running_tokens()
        gate.release()
        await asyncio.gather(live, pinned)
        assert counts["pinned"] > 15
        assert abs(counts["live"] - counts["pinned"]) <= 2


async def test_several_pins_and_unpin(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, old, new = models
    async with serving(folder) as engine:
        with pytest.raises(EngineError, match="pin of version 1 refused: the live version is 0"):
            await engine.pin(1)
        await engine.pin(0)
        with pytest.raises(EngineError, match="pause first"):
            await engine.load(hf_tensors(new).items(), 1)
        await engine.pause("drain")
        await engine.load(hf_tensors(new).items(), 1)
        await engine.resume()
        await engine.pin(1)
        await engine.pin(0)
        health = await engine.health()
        weights = sum(tensor.nbytes for tensor in engine.live.weights.tensors.values())
        assert (health.detail["pins"], health.memory_bytes) == (2, 3 * weights)
        for version, model in ((0, old), (1, new)):
            (answer,) = await engine.generate([8], LONG, 1, request_id="e", pinned=version)
            assert answer.versions.tolist() == [version] * 40
            assert error(answer, logprobs_of(model, [8], answer)) <= 1e-5
        gate = Gate(monkeypatch, 3)
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


def broken_updates(new: Any) -> dict[str, tuple[Iterator[tuple[str, torch.Tensor]], type[Exception], str]]:
    tensors = list(hf_tensors(new).items())

    def bus() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:5]
        raise BusBrokeError("peer lost")

    return {
        "missing": (iter(tensors[1:]), EngineError, "tensors are missing"),
        "shape": (iter([*tensors[:5], (tensors[5][0], torch.zeros(3))]), EngineError, r"shape \(3,\)"),
        "bus": (bus(), BusBrokeError, "peer lost"),
    }


@pytest.mark.parametrize("case", ["missing", "shape", "bus"])
async def test_a_half_updated_engine_does_not_serve_until_it_is_refilled(case: str, models: Models) -> None:
    folder, old, new = models
    update, kind, message = broken_updates(new)[case]
    async with serving(folder) as engine:
        await engine.pin(0)
        await engine.pause("keep_kv")
        with pytest.raises(kind, match=message):
            await engine.load(update, 1)
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
    models: Models,
) -> None:
    folder, old, new = models
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


async def test_weights_that_were_not_finite_leave_nothing_behind(models: Models) -> None:
    folder, _, new = models
    async with serving(folder) as engine:
        await engine.pause("keep_kv")
        await engine.load(((n, torch.full_like(t, float("nan"))) for n, t in hf_tensors(new).items()), 1)
        await engine.resume()
        poisoned = await engine.generate(PROMPT, LONG, 4, request_id="a")
        assert np.isnan(poisoned[0].logprobs).all()
        await engine.pause("keep_kv")
        await engine.load(hf_tensors(new).items(), 2)
        await engine.resume()
        for answer in await engine.generate(PROMPT, LONG, 4, request_id="b"):
            assert error(answer, logprobs_of(new, PROMPT, answer)) <= 1e-5
