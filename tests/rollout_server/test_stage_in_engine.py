"""Updates that are received in the scheduler of a real SGLang, by a real publisher over gloo (stage_in: engine)."""

import asyncio
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from sglang_follower import Follower, following, until
from sglang_host import Host
from sglang_served import BUCKET_BYTES, Served, check_logprobs, digests, random_model, update_of

from configs.infrastructure import WeightBus
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update.orders import REQUEST
from weight_bus import Publisher, PublishReport, TransportError
from weight_bus.errors import NotAvailable
from weight_bus.transports import Formation
from weight_bus.transports.gloo import Collective

RUNS = itertools.count()
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


class Faulty(Collective):
    """The fault that is set happens to the second bucket, once; counts the bytes of each version."""

    def __init__(self, config: WeightBus, host: str) -> None:
        super().__init__(config, host)
        self.fault: Callable[[torch.Tensor], None] | None = None
        self.broken = False
        self.sent: list[int] = []

    def form(self, formation: Formation) -> None:
        """See `Collective.form`."""
        if self.broken:
            raise TransportError("the publisher is lost", "closed")
        super().form(formation)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `Collective.broadcast`."""
        if index == 0:
            self.sent.append(0)
        self.sent[-1] += bucket.numel()
        if index == 1 and self.fault is not None:
            fault, self.fault = self.fault, None
            bucket = bucket.clone()
            fault(bucket)
        super().broadcast(bucket, index)


class Learner(Publisher):
    """A publisher, and its transport; of a run of its own, or another one of a run."""

    def __init__(self, served: Served, *overrides: str, run_id: str = "", incarnation: int = 1) -> None:
        self.run_id = run_id or f"staged-{next(RUNS)}"
        self.incarnation = incarnation
        made: list[Faulty] = []

        def factory(config: WeightBus, host: str) -> Faulty:
            made.append(Faulty(config, host))
            return made[0]

        super().__init__(
            served.config(*OVERRIDES, *overrides).weight_bus,
            host="127.0.0.1",
            run_id=self.run_id,
            incarnation=incarnation,
            transport_factory=factory,
        )
        self.end = made[0]

    async def send(self, version: int, model: Any) -> PublishReport:
        """Publish a model."""
        return await asyncio.to_thread(self.publish, version, update_of(model).items(), digests(model))


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


def test_updates_are_staged_beside_decoding_and_go_live_with_equal_digests(sglang: Host) -> None:
    sglang(staged_in_the_scheduler)


async def staged_in_the_scheduler(served: Served) -> None:
    first = served.version + 1
    with Learner(served) as learner:
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


def test_changes_are_applied_in_the_scheduler_also_for_the_next_learner_of_the_run(sglang: Host) -> None:
    sglang(changed)


async def changed(served: Served) -> None:
    model, delta = random_model(5), "weight_bus.delta=true"
    with Learner(served, delta) as learner:
        async with followed(served, learner, delta) as follower:
            for _ in range(2):
                await one_more(served, learner, model)
            whole, change = learner.end.sent
            assert change < whole / 2, "only what has changed has come"
            with Learner(served, delta, run_id=learner.run_id, incarnation=2) as restarted:
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


def test_bytes_that_changed_on_the_way_are_refused_beside_the_engine_and_sent_again(sglang: Host) -> None:
    sglang(corrupt)


async def corrupt(served: Served) -> None:
    def flip(bucket: torch.Tensor) -> None:
        bucket[5] ^= 1

    version, model = served.version + 1, random_model(6)
    with Learner(served) as learner:
        async with followed(served, learner) as follower:
            learner.end.fault = flip
            await learner.send(version, model)
            await until(lambda: follower.live, "it is healed")
            assert (follower.live, follower.dark) == ([version], []), "the engine was never touched by them"
            assert learner.stats()["heals"] == 1 and learner.stats()["quarantines"] == 0
            await check_live(served, version, model)


def test_a_publisher_lost_in_a_broadcast_costs_its_version_and_the_next_one_serves(sglang: Host) -> None:
    sglang(lost)


async def lost(served: Served) -> None:
    version, model, before = served.version + 1, random_model(7), served.version
    with Learner(served) as learner, heard(logging.WARNING) as said:
        async with followed(served, learner) as follower:
            async with stuck(learner, version, model):
                started = time.monotonic()
                (answer,) = await served.sample([5, 6, 7], max_new_tokens=60)
                assert set(answer.versions) == {before} and time.monotonic() - started < AT_ONCE_S, (
                    "it goes on decoding"
                )
                await until(lambda: any("did not arrive" in line for line in said), "the receiver gives up")
                assert any(f"v{version} did not arrive: broadcast of bucket 2 failed: " in line for line in said), said
            with Learner(served, run_id=learner.run_id, incarnation=2) as restarted:
                await follower.join(restarted, learner.run_id)
                report = await restarted.send(version, model)
                assert (report.served, report.failed) == (["one"], {}), report
                assert follower.live[-1] == version and follower.dark == []
                await check_live(served, version, model)


def test_a_server_that_stops_in_a_broadcast_waits_for_nobody_and_the_next_receiver_works(sglang: Host) -> None:
    sglang(stopped)


async def stopped(served: Served) -> None:
    version, model = served.version + 1, random_model(8)
    with Learner(served) as learner:
        async with followed(served, learner) as follower, stuck(learner, version, model):
            started = time.monotonic()
            await asyncio.to_thread(follower.stop)
            assert time.monotonic() - started < AT_ONCE_S
    with Learner(served) as learner:
        async with followed(served, learner):
            report = await learner.send(version, model)
            assert (report.served, report.failed) == (["one"], {}), report
            await check_live(served, version, model)


def test_a_receiver_that_cannot_receive_ends_the_follower_by_name(sglang: Host) -> None:
    sglang(without_nccl)


async def without_nccl(served: Served) -> None:
    with Learner(served) as learner:
        follower = Follower(served, *OVERRIDES, "weight_bus.backend=nccl")
        follower.follow(learner.address, learner.run_id)
        await until(lambda: follower.failure, "it ends")
        assert isinstance(follower.failure, NotAvailable), "which the launcher does not start again"
        assert "nothing can be staged in the engine" in str(follower.failure)
        assert "weight_bus.backend 'nccl' cannot be used: there is no CUDA device" in str(follower.failure)
        await asyncio.to_thread(follower.stop)
    assert await served.engine.digest() == digests(served.model), "the engine goes on"


def test_a_scheduler_killed_in_a_broadcast_is_named_at_once(sglang: Host) -> None:
    sglang(killed)


async def killed(served: Served) -> None:
    version, model = served.version + 1, random_model(9)
    pid = min(served.engine.sglang.pids())
    assert b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    with Learner(served) as learner, heard(logging.WARNING) as said:
        async with followed(served, learner) as follower, stuck(learner, version, model):
            os.kill(pid, signal.SIGKILL)
            named = f"v{version} did not arrive: v{version} was not staged: the receiver in the engine hung up [closed]"
            await until(lambda: any(named in line for line in said), "it is named", AT_ONCE_S)
            with pytest.raises(EngineError, match=rf"SGLang is dead: .*pid {pid}\) ended with -9"):
                while True:
                    await served.engine.health()
                    await asyncio.sleep(0.05)
            assert (follower.live, follower.dark, follower.failure) == ([], [], None)
