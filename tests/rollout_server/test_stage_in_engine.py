"""Updates that are received in the scheduler of a real SGLang, by a real publisher over gloo (stage_in: engine)."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from sglang_follower import Faulty, Follower, Learner, following, until
from sglang_served import BUCKET_BYTES, Served, check_logprobs, digests, random_model

from configs.infrastructure import WeightBus
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update.orders import REQUEST
from weight_bus import TransportError
from weight_bus.errors import NotAvailable
from weight_bus.transports import Formation
from weight_bus.transports.gloo import Collective

TIMEOUT_S = 4.0
AT_ONCE_S = 3.0
"""Less than that, and more than anything takes that does not wait for a broadcast."""
OVERRIDES = (
    "weight_bus.stage_in=engine",
    f"weight_bus.bucket_bytes={BUCKET_BYTES}",
    f"weight_bus.collective_timeout_s={TIMEOUT_S}",
    "weight_bus.heartbeat_s=0.25",
    "weight_bus.max_heals=2",
)


class Staging(Faulty, Collective):
    """Counts the bytes of each version; once `broken`, it forms no group."""

    broken = False

    def __init__(self, config: WeightBus, host: str) -> None:
        super().__init__(config, host)
        self.sent: list[int] = []

    def form(self, formation: Formation) -> None:
        if self.broken:
            raise TransportError("the publisher is lost", "closed")
        super().form(formation)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if index == 0:
            self.sent.append(0)
        self.sent[-1] += bucket.numel()
        super().broadcast(bucket, index)


def publishing(served: Served, *overrides: str, **run: Any) -> Learner:
    return Learner(served, Staging, *OVERRIDES, *overrides, **run)


@asynccontextmanager
async def stuck(learner: Learner, version: int, model: Any) -> AsyncIterator[None]:
    """The publisher stands still before the second bucket of a version, until the end of this."""
    reached, go = threading.Event(), threading.Event()

    def wait(_: torch.Tensor) -> None:
        reached.set()
        go.wait(30)
        raise TransportError("it is lost", "closed")

    learner.end.fault = wait
    sending = asyncio.create_task(learner.send(version, model))
    try:
        await until(reached.is_set, "the second bucket")
        yield
    finally:
        learner.end.broken = True
        go.set()
        await sending


@contextmanager
def heard(level: int) -> Iterator[list[str]]:
    """What the weight bus logs meanwhile."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("weight_bus")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def followed(served: Served, learner: Learner, *overrides: str) -> AbstractAsyncContextManager[Follower]:
    return following(served, learner, learner.run_id, *OVERRIDES, *overrides)


def request(served: Served) -> dict[str, Any]:
    """What the schedulers were asked for last."""
    body: dict[str, Any] = msgpack.unpackb((served.engine._staging.path / REQUEST).read_bytes())
    return body


async def check_live(served: Served, version: int, model: Any) -> None:
    """The engine holds the version, got it from the receiver, and decodes with it."""
    asked = request(served)
    assert asked["load"] and {memory["kind"] for memory in asked["memory"]} == {"staged"}
    assert await served.engine.digest() == digests(model)
    (answer,) = await served.sample([5, 6, 7])
    assert set(answer.versions) == {version}
    check_logprobs(model, [5, 6, 7], answer)
    served.model, served.version = model, version


async def test_updates_are_staged_beside_decoding_and_go_live_with_equal_digests(served: Served) -> None:
    first = served.version + 1
    with publishing(served) as learner:
        async with followed(served, learner) as follower:
            for version in range(first, first + 3):
                model = random_model(200 + version)
                kept = served.start_sample([3, 1, 2], max_new_tokens=90)
                await served.under_way(kept)
                report = await learner.send(version, model)
                assert (report.served, report.failed) == (["one"], {}) and report.epoch == 1, report
                assert set((await kept)[0].versions) <= {version - 1, version}
                await check_live(served, version, model)
            assert follower.live == [first, first + 1, first + 2] and follower.dark == []


async def test_changes_are_applied_in_the_scheduler_also_for_the_next_learner_of_the_run(served: Served) -> None:
    model, delta = random_model(5), "weight_bus.delta=true"
    with publishing(served, delta) as learner:
        async with followed(served, learner, delta) as follower:
            for _ in range(2):
                await one_more(served, learner, model)
            whole, change = learner.end.sent
            assert change < whole / 2, "only what has changed has come"
            with publishing(served, delta, run_id=learner.run_id, incarnation=2) as restarted:
                await follower.join(restarted, learner.run_id)
                for _ in range(2):
                    await one_more(served, restarted, model)
                assert restarted.end.sent == [whole, change]
            assert follower.dark == []


async def one_more(served: Served, learner: Learner, model: Any) -> None:
    """A version with one other element."""
    version = served.version + 1
    with torch.no_grad():
        model.model.norm.weight[version % 8] += 0.5
    report = await learner.send(version, model)
    assert (report.served, report.failed) == (["one"], {}), report
    await check_live(served, version, model)


async def test_bytes_that_changed_on_the_way_are_refused_beside_the_engine_and_sent_again(served: Served) -> None:
    def flip(bucket: torch.Tensor) -> None:
        bucket[5] ^= 1

    version, model = served.version + 1, random_model(6)
    with publishing(served) as learner:
        async with followed(served, learner) as follower:
            learner.end.fault = flip
            await learner.send(version, model)
            await until(lambda: follower.live, "it is healed")
            assert (follower.live, follower.dark) == ([version], []), "the engine was never touched by them"
            assert learner.stats()["heals"] == 1 and learner.stats()["quarantines"] == 0
            await check_live(served, version, model)


async def test_a_publisher_lost_in_a_broadcast_costs_its_version_and_the_next_one_serves(served: Served) -> None:
    version, model, before = served.version + 1, random_model(7), served.version
    with publishing(served) as learner, heard(logging.WARNING) as said:
        async with followed(served, learner) as follower:
            async with stuck(learner, version, model):
                started = time.monotonic()
                (answer,) = await served.sample([5, 6, 7], max_new_tokens=60)
                assert set(answer.versions) == {before} and time.monotonic() - started < AT_ONCE_S, (
                    "it goes on decoding"
                )
                await until(lambda: any("did not arrive" in line for line in said), "the receiver gives up")
                assert any(f"v{version} did not arrive: broadcast of bucket 2 failed: " in line for line in said), said
            with publishing(served, run_id=learner.run_id, incarnation=2) as restarted:
                await follower.join(restarted, learner.run_id)
                report = await restarted.send(version, model)
                assert (report.served, report.failed) == (["one"], {}), report
                assert follower.live[-1] == version and follower.dark == []
                await check_live(served, version, model)


async def test_a_server_that_stops_in_a_broadcast_waits_for_nobody_and_the_next_receiver_works(served: Served) -> None:
    version, model = served.version + 1, random_model(8)
    with publishing(served) as learner:
        async with followed(served, learner) as follower, stuck(learner, version, model):
            started = time.monotonic()
            await asyncio.to_thread(follower.stop)
            assert time.monotonic() - started < AT_ONCE_S
    with publishing(served) as learner:
        async with followed(served, learner):
            report = await learner.send(version, model)
            assert (report.served, report.failed) == (["one"], {}), report
            await check_live(served, version, model)


async def test_a_receiver_that_cannot_receive_ends_the_follower_by_name(served: Served) -> None:
    with publishing(served) as learner:
        follower = Follower(served, *OVERRIDES, "weight_bus.backend=nccl")
        follower.follow(learner.address, learner.run_id)
        await until(lambda: follower.failure, "it ends")
        assert isinstance(follower.failure, NotAvailable), "which the launcher does not start again"
        assert "nothing can be staged in the engine" in str(follower.failure)
        assert "weight_bus.backend 'nccl' cannot be used: there is no CUDA device" in str(follower.failure)
        await asyncio.to_thread(follower.stop)
    assert await served.engine.digest() == digests(served.model), "the engine goes on"


async def test_a_scheduler_killed_in_a_broadcast_is_named_at_once(served: Served) -> None:
    """The last of SGLang's tests: another one would start it anew."""
    version, model, engine = served.version + 1, random_model(9), served.engine
    pid = min(engine.sglang.pids())  # SGLang starts its scheduler first
    assert b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    task = served.start_sample([1, 2, 3], 2, max_new_tokens=90)
    with publishing(served) as learner, heard(logging.WARNING) as said:
        async with followed(served, learner) as follower, stuck(learner, version, model):
            await served.under_way(task)
            os.kill(pid, signal.SIGKILL)
            named = f"v{version} did not arrive: v{version} was not staged: the receiver in the engine hung up [closed]"
            await until(lambda: any(named in line for line in said), "it is named", AT_ONCE_S)
            dead = rf"SGLang is dead: .*pid {pid}\) ended with -9.* \[closed\]"
            with pytest.raises(EngineError, match=dead):
                while True:
                    await engine.health()
                    await asyncio.sleep(0.05)
            for call in (engine.pause("keep_kv"), served.sample([1, 2, 3]), task):
                with pytest.raises(EngineError, match=dead):
                    await asyncio.wait_for(call, 30)
            assert (follower.live, follower.dark, follower.failure) == ([], [], None)
