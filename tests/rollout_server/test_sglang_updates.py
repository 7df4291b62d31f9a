"""Updates of a real SGLang by a real publisher over gloo, staged in its scheduler."""

import asyncio
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update.orders import REQUEST
from rollout_server.follower import WeightFollower
from tests.rollout_server.sglang_served import BUCKET_BYTES, Served, check_logprobs, digests, random_model
from tests.rollout_server.torch_oracle import hf_tensors
from tests.support.waiting import eventually
from weight_bus import Publisher, PublishReport, TransportError
from weight_bus.errors import NotAvailable
from weight_bus.transports import Formation
from weight_bus.transports.gloo import GlooCollective

RUNS = itertools.count()
TIMEOUT_S = 7.0
AT_ONCE_S = 6.0
"""Less than that, and more than anything takes that does not wait for a broadcast."""
COMMON = (
    f"weight_bus.bucket_bytes={BUCKET_BYTES}",
    "weight_bus.heartbeat_s=0.5",
    "weight_bus.stage_in=engine",
    f"weight_bus.collective_timeout_s={TIMEOUT_S}",
    "weight_bus.max_heals=2",
)


class Staging(GlooCollective):
    """Of a publisher: `fault` happens before the second bucket, once; once `broken`, it forms no group."""

    fault: Callable[[], None] | None = None
    broken = False

    def form(self, formation: Formation) -> None:
        if self.broken:
            raise TransportError("the publisher is lost", "closed")
        super().form(formation)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if index == 1 and self.fault is not None:
            fault, self.fault = self.fault, None
            fault()
        super().broadcast(bucket, index)


class Learner(Publisher):
    """A publisher, and its transport `end`; of a run of its own, or the next incarnation of another's."""

    def __init__(self, served: Served, *overrides: str, after: "Learner | None" = None) -> None:
        self.overrides = (*COMMON, *overrides)
        self.config = served.config(*self.overrides).weight_bus
        self.run_id = after.run_id if after else f"run-{next(RUNS)}"  # SGLang keeps the names of its groups
        self.end = Staging(self.config, "127.0.0.1")
        run: dict[str, Any] = {"host": "127.0.0.1", "run_id": self.run_id, "incarnation": 2 if after else 1}
        super().__init__(self.config, transport_factory=lambda *_: self.end, **run)

    async def send(self, version: int, model: Any) -> PublishReport:
        """Publish a model."""
        return await asyncio.to_thread(self.publish, version, hf_tensors(model).items(), digests(model))

    async def serve(self, served: Served, model: Any) -> PublishReport:
        """Publish a model as the next version, which the engine then holds and decodes with."""
        version = served.version + 1
        report = await self.send(version, model)
        assert (report.served, report.failed) == (["one"], {}), report
        check_staged(served)  # before another request takes the place of this one
        await check_live(served, version, model)
        return report


async def check_live(served: Served, version: int, model: Any) -> None:
    assert await served.engine.digest() == digests(model)
    (answer,) = await served.sample([5, 6, 7])
    assert set(answer.versions) == {version}
    check_logprobs(model, [5, 6, 7], answer)
    served.model, served.version = model, version


def check_staged(served: Served) -> None:
    """What the schedulers were asked to load last lay in the receiver."""
    asked = msgpack.unpackb((served.engine._staging.path / REQUEST).read_bytes())
    assert asked["load"] and {memory["kind"] for memory in asked["memory"]} == {"staged"}


class Follower(WeightFollower):
    """Keeps what it said."""

    def __init__(self, served: Served, *overrides: str) -> None:
        self.live: list[int] = []
        self.dark: list[str] = []
        super().__init__(
            served.config(*overrides), served.engine, "one", on_live=self._went_live, on_quarantine=self._went_dark
        )

    async def join(self, learner: Learner) -> None:
        """Follow this one from now on."""
        self.follow(learner.address, learner.run_id)
        await eventually(lambda: learner.members() or self.failure, "it joins")
        assert self.failure is None, self.failure

    async def _went_live(self, version: int, incarnation: int) -> None:
        self.live.append(version)

    async def _went_dark(self, reason: str) -> None:
        self.dark.append(reason)


@asynccontextmanager
async def following(served: Served, *overrides: str) -> AsyncIterator[tuple[Learner, Follower]]:
    """A learner, and the engine's follower of it."""
    with Learner(served, *overrides) as learner:
        follower = Follower(served, *learner.overrides)
        try:
            await follower.join(learner)
            yield learner, follower
        finally:
            await asyncio.to_thread(follower.stop)


async def test_updates_arrive_beside_decoding_and_digests_and_logprobs_follow(served: Served) -> None:
    first = served.version + 1
    async with following(served) as (learner, follower):
        for version in range(first, first + 3):
            kept = served.start_sample([3, 1, 2], max_new_tokens=180)
            await served.under_way(kept)
            report = await learner.serve(served, random_model(100 + version))
            assert report.epoch == 1, "the group is kept"
            assert set((await kept)[0].versions) <= {version - 1, version}
        assert follower.live == [first, first + 1, first + 2] and follower.dark == []


async def test_a_bit_that_flips_after_the_proof_stops_decoding_until_the_engine_is_healed(served: Served) -> None:
    before, old, new, staging = served.version, served.model, random_model(110), served.engine._staging
    write, read, prove = staging.write_update, staging.replies, staging.proofs
    replies, proofs = list[dict[str, Any]](), list[dict[str, Any]]()

    def flipped(update: Any, expected: Any) -> None:
        tensors = [(name, tensor.clone()) for name, tensor in update]
        if not replies:
            tensors[3][1].view(torch.int32).view(-1)[1] ^= 1
        write(tensors, expected)

    def kept(ranks: int) -> Any:
        replies.extend(found := read(ranks))
        return found

    def proven(ranks: int) -> Any:
        proofs.extend(found := prove(ranks))
        return found

    async with following(served, "weight_bus.stage_in=server") as (learner, follower):
        staging.write_update, staging.replies, staging.proofs = flipped, kept, proven
        running = served.start_sample([3, 1, 2], 2, max_new_tokens=180)
        await served.under_way(running)
        try:
            report = await learner.send(before + 1, new)
        finally:
            staging.write_update, staging.replies, staging.proofs = write, read, prove
        assert (report.served, report.failed) == (["one"], {}), report
        assert len(follower.dark) == 1 and "1 tensors of the engine differ, first " in follower.dark[0]
        assert follower.live == [before + 1]
        assert [reply["proven"] for reply in replies] == [None, None], "requests ran"
        assert [proof["proven"] for proof in proofs] == [False, True]
        first, healed = (reply["tokens"] for reply in replies)
        assert len(first) == 2 and {rid: count - first[rid] for rid, count in healed.items()} == dict.fromkeys(first, 1)
        for answer in await running:
            assert sorted({*answer.versions.tolist()}) == [before, before + 1]
            assert int((answer.versions == before).sum()) in first.values()
            check_logprobs(old, [3, 1, 2], answer, before)
            check_logprobs(new, [3, 1, 2], answer, before + 1)  # sampled anew: what ran beside the digests is gone
    served.model, served.version = new, before + 1


async def test_an_engine_that_drains_first_is_held_and_then_updated_before_new_requests(served: Served) -> None:
    version, model = served.version + 1, random_model(9)
    async with following(served, "rollout.on_new_weights=drain") as (learner, follower):
        running = served.start_sample([3, 1, 2], max_new_tokens=180)
        await served.under_way(running)
        report = await learner.send(version, model)
        assert (report.served, report.failed) == ([], {}) and "drains" in report.held["one"], report
        await eventually(lambda: not served.engine._open.is_set(), "new requests wait")
        waiting = [served.start_sample([5, 6, 7]) for _ in range(3)]
        await eventually(lambda: follower.live == [version], "it is updated when it has drained")
        assert learner.epoch == 1 and learner.stats()["lost_peers"] == 0, (
            "it stays in the group: the tensors are staged"
        )
        assert set((await running)[0].versions) == {version - 1}
        for task in waiting:
            (answer,) = await task
            assert set(answer.versions) == {version}
            check_logprobs(model, [5, 6, 7], answer)
    served.model, served.version = model, version


@asynccontextmanager
async def stuck(learner: Learner, version: int, model: Any) -> AsyncIterator[None]:
    """The publisher stands still before the second bucket of a version, until the end of this."""
    reached, go = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go.wait(30)
        raise TransportError("it is lost", "closed")

    learner.end.fault = wait
    sending = asyncio.create_task(learner.send(version, model))
    try:
        await eventually(reached.is_set, "the second bucket")
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


async def test_changes_are_applied_in_the_scheduler_also_for_the_next_learner_of_the_run(served: Served) -> None:
    model, delta = random_model(5), "weight_bus.delta=true"

    async def serve_two(learner: Learner) -> list[int]:
        sent = []
        for _ in range(2):
            with torch.no_grad():
                model.model.norm.weight[served.version % 8] += 0.5
            sent.append((await learner.serve(served, model)).num_bytes)
        return sent

    async with following(served, delta) as (learner, follower):
        whole, change = await serve_two(learner)
        assert change < whole / 2, "only what has changed has come"
        with Learner(served, delta, after=learner) as restarted:
            await follower.join(restarted)
            assert await serve_two(restarted) == [whole, change]
        assert follower.dark == []


async def test_a_publisher_lost_in_a_broadcast_costs_its_version_and_the_next_one_serves(served: Served) -> None:
    version, model, before = served.version + 1, random_model(7), served.version
    with heard(logging.WARNING) as said:
        async with following(served) as (learner, follower):
            async with stuck(learner, version, model):
                started = time.monotonic()
                (answer,) = await served.sample([5, 6, 7], max_new_tokens=60)
                assert set(answer.versions) == {before}, "it goes on decoding"
                assert time.monotonic() - started < AT_ONCE_S
                named = f"v{version} did not arrive: broadcast of bucket 2 failed: "
                await eventually(lambda: any(named in line for line in said), "the receiver gives up")
            with Learner(served, after=learner) as restarted:
                await follower.join(restarted)
                await restarted.serve(served, model)
                assert follower.live[-1] == version and follower.dark == []


async def test_a_server_that_stops_in_a_broadcast_waits_for_nobody_and_the_next_receiver_works(served: Served) -> None:
    model = random_model(8)
    async with following(served) as (learner, follower), stuck(learner, served.version + 1, model):
        started = time.monotonic()
        await asyncio.to_thread(follower.stop)
        assert time.monotonic() - started < AT_ONCE_S
    async with following(served) as (learner, _):
        await learner.serve(served, model)


async def test_a_receiver_that_cannot_receive_ends_the_follower_by_name(served: Served) -> None:
    with Learner(served) as learner:
        follower = Follower(served, *learner.overrides, "weight_bus.backend=nccl")
        follower.follow(learner.address, learner.run_id)
        await eventually(lambda: follower.failure, "it ends")
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
    with heard(logging.WARNING) as said:
        async with following(served) as (learner, follower), stuck(learner, version, model):
            task = served.start_sample([1, 2, 3], 2, max_new_tokens=180)
            await served.under_way(task)
            os.kill(pid, signal.SIGKILL)
            named = f"v{version} did not arrive: v{version} was not staged: the receiver in the engine hung up [closed]"
            await eventually(lambda: any(named in line for line in said), "it is named", AT_ONCE_S)
            dead = rf"SGLang is dead: .*pid {pid}\) ended with -9.* \[closed\]"
            with pytest.raises(EngineError, match=dead):
                while True:
                    await engine.health()
                    await asyncio.sleep(0.05)
            for call in (engine.pause("keep_kv"), served.sample([1, 2, 3]), task):
                with pytest.raises(EngineError, match=dead):
                    await asyncio.wait_for(call, 30)
            assert (follower.live, follower.dark, follower.failure) == ([], [], None)
