"""Updates straight into a real SGLang's schedulers, by a real publisher over gloo (weight_bus.apply: direct)."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import torch
from sglang_follower import Faulty, Follower, Learner, following, until
from sglang_served import BUCKET_BYTES, Served, check_logprobs, digests, random_model

from rollout_server.engines.base import EngineError
from weight_bus import EngineSpoiled, RemovedFromBus, Subscriber, TransportError
from weight_bus.transports.direct import DirectGloo

OVERRIDES = (
    "weight_bus.apply=direct",
    f"weight_bus.bucket_bytes={BUCKET_BYTES}",
    "weight_bus.collective_timeout_s=8",
    "weight_bus.heartbeat_s=0.25",
    "weight_bus.max_heals=1",
)


class Reluctant:
    """An engine that cannot be paused."""

    ranks = 1

    def pause(self, version: int) -> None:
        raise TransportError(f"no pause for v{version}", "slow")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: pytest.fail(f"{name} was called")


class Direct(Faulty, DirectGloo):
    """Sends into schedulers."""


def publishing(served: Served) -> Learner:
    return Learner(served, Direct, *OVERRIDES)


def followed(served: Served, publisher: Learner, *overrides: str) -> AbstractAsyncContextManager[Follower]:
    return following(served, publisher, publisher.run_id, *OVERRIDES, *overrides)


async def test_updates_go_straight_into_the_engine_and_its_logprobs_follow(served: Served) -> None:
    first = served.version + 1
    with publishing(served) as publisher:
        async with followed(served, publisher) as follower:
            for version in range(first, first + 3):
                model = random_model(100 + version)
                kept = served.start_sample([3, 1, 2], max_new_tokens=90)
                await served.under_way(kept)
                report = await publisher.send(version, model)
                assert (report.served, report.failed) == (["one"], {}) and report.epoch == 1, "the group is kept"
                assert await served.engine.digest() == digests(model)
                (answer,) = await kept
                assert set(answer.versions) <= {version - 1, version}
                (answer,) = await served.sample([5, 6, 7])
                assert set(answer.versions) == {version}
                check_logprobs(model, [5, 6, 7], answer)
            assert follower.live == [first, first + 1, first + 2] and follower.dark == []
            await a_round_that_is_called_off(served, publisher, first + 3)
            assert follower.live[-1] == first + 3 and follower.dark == []


async def a_round_that_is_called_off(served: Served, publisher: Learner, version: int) -> None:
    """Another member does not pause: nothing is sent, the engine goes on, and is updated in a group of its own."""
    kept = served.start_sample([3, 1, 2], max_new_tokens=90)
    await served.under_way(kept)
    config = served.config(*OVERRIDES).weight_bus
    other = Subscriber(
        publisher.address,
        name="other",
        config=config,
        host="127.0.0.1",
        run_id=publisher.run_id,
        direct=Reluctant(),  # type: ignore[arg-type]  # the rest must not be called
    )
    thread = threading.Thread(target=_receive, args=(other,), daemon=True)
    thread.start()
    await until(lambda: len(publisher.members()) == 2, "it joins")
    model = random_model(7)
    report = await publisher.send(version, model)
    assert report.served == ["one"] and "no pause" in report.failed["other"], report
    assert report.epoch > 2 and await served.engine.digest() == digests(model)
    (answer,) = await kept
    assert set(answer.versions) <= {version - 1, version}
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive(), "it was removed for good"
    served.model, served.version = model, version


def _receive(subscriber: Subscriber) -> None:
    with subscriber, pytest.raises(RemovedFromBus, match="no pause"):
        subscriber.receive(lambda *_: {}, activate=lambda *_: None, quarantine=lambda *_: None)


async def test_an_engine_that_drains_first_is_held_and_then_updated_before_new_requests(served: Served) -> None:
    version, model = served.version + 1, random_model(9)
    with publishing(served) as publisher:
        async with followed(served, publisher, "rollout.on_new_weights=drain") as follower:
            running = served.start_sample([3, 1, 2], max_new_tokens=90)
            await served.under_way(running)
            report = await publisher.send(version, model)
            assert (report.served, report.failed) == ([], {}) and "drains" in report.held["one"], report
            await until(lambda: not served.engine._open.is_set(), "new requests wait")
            waiting = [served.start_sample([5, 6, 7]) for _ in range(3)]
            await until(lambda: follower.live == [version], "it is updated when it has drained")
            assert publisher.epoch == 2 and publisher.stats()["lost_peers"] == 0
            assert set((await running)[0].versions) == {version - 1}
            for task in waiting:
                (answer,) = await task
                assert set(answer.versions) == {version}
                check_logprobs(model, [5, 6, 7], answer)
    served.model, served.version = model, version


async def test_bytes_that_changed_on_the_way_are_found_live_and_healed_by_a_refill(served: Served) -> None:
    def flip(bucket: torch.Tensor) -> None:
        bucket[5] ^= 1

    version, model = served.version + 1, random_model(3)
    with publishing(served) as publisher:
        publisher.end.fault = flip
        async with followed(served, publisher) as follower:
            await publisher.send(version, model)
            await until(lambda: follower.live, "it is healed")
            assert follower.live == [version]
            assert len(follower.dark) == 1 and "1 tensors of the engine differ" in follower.dark[0]
            assert publisher.stats()["quarantines"] == 1 and publisher.stats()["heals"] == 1
    assert await served.engine.digest() == digests(model)
    served.model, served.version = model, version


async def test_a_publisher_lost_in_a_transfer_ends_the_engine_by_name(served: Served) -> None:
    def cut(_: torch.Tensor) -> None:
        raise TransportError("the publisher was cut off", "closed")

    version, model = served.version + 1, random_model(4)
    with publishing(served) as publisher:
        publisher.end.fault = cut
        async with followed(served, publisher) as follower:
            report = await publisher.send(version, model)
            assert report.served == [] and "bucket 2 did not arrive in the engine" in report.failed["one"], report
            assert "its engine is spoiled and restarts" in report.failed["one"] and publisher.members() == {}
            await until(lambda: follower.failure, "the follower fails")
            failure = follower.failure
            assert isinstance(failure, EngineSpoiled)
            assert "it must be restarted: SGLang refuses 'update_weights_from_distributed'" in str(failure)
            assert (follower.live, follower.dark) == ([], [])
    with pytest.raises(EngineError, match=r"half updated .bucket 2 of an update was received and not the last"):
        await served.engine.resume()
    await served.update(5, "keep_kv", version=version)  # a whole update, which a restart would begin with
    check_logprobs(served.model, [5, 6, 7], (await served.sample([5, 6, 7]))[0])
