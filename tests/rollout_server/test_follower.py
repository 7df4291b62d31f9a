"""The weight follower with a real engine and real publishers over gloo: which learner's version is live."""

import asyncio
import contextlib
import multiprocessing
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs import Config
from replay import messages as m
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.generate import Generator
from rollout_server.server import RolloutServer
from tests.rollout_server.torch_oracle import hf_tensors
from tests.support.bus_receiver import digests
from tests.support.runs import free_port
from tests.support.waiting import eventually
from weight_bus import Publisher

RUN = "follower-test"


def welcome(config: Config, incarnation: int) -> m.Welcome:
    """What replay tells a server while this incarnation of the learner is there."""
    return m.Welcome(incarnation=incarnation, version=0, bus_address=f"tcp://127.0.0.1:{config.weight_bus.port}")


class Learner(Publisher):
    """An incarnation of the learner at a fixed port."""

    def __init__(self, config: Config, incarnation: int) -> None:
        super().__init__(config.weight_bus, host="127.0.0.1", run_id=RUN, incarnation=incarnation)

    async def send(self, version: int, model: Any) -> None:
        """Publish a model; it must be served."""
        tensors = hf_tensors(model)
        report = await asyncio.to_thread(self.publish, version, tensors.items(), digests(tensors))
        assert (report.served, report.failed) == (["server"], {}), report


class Wire:
    """Takes the dealer's place; keeps what the server asks for."""

    run_id = RUN

    def __init__(self) -> None:
        self.policies: list[tuple[int, int]] = []
        """(incarnation, version) of each lease request, repetitions left out."""
        self.wishes: list[tuple[int, int]] = []
        """(version, leases) of each lease request."""

    async def send(self, message: Any) -> None:
        if isinstance(message, m.LeaseRequest):
            self.wishes.append((message.version, message.capacity))
        if isinstance(message, m.LeaseRequest) and message.capacity:
            policy = (message.incarnation, message.version)
            if self.policies[-1:] != [policy]:
                self.policies.append(policy)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[RolloutServer, Wire]]:
    wire = Wire()
    engine = TorchEngine(config.model.path, max_context=64, max_running=8)
    generator = Generator(config, engine, None, None)  # type: ignore[arg-type]  # nothing is sampled here
    server = RolloutServer(config, generator, wire, name="server", fingerprint={})  # type: ignore[arg-type]
    try:
        yield server, wire
    finally:
        await asyncio.to_thread(server.follower.stop)
        await engine.close()


@pytest.fixture
def config(models: tuple[Path, Any, Any]) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(models[0])},
            "data": {"train": "none.jsonl"},
            "weight_bus": {"port": free_port(), "heartbeat_s": 0.4, "collective_timeout_s": 10, "deadline_s": 20},
        }
    )


async def handle(server: RolloutServer, message: m.Welcome) -> None:
    async with asyncio.TaskGroup() as tasks:
        await server.handle(message, tasks)


@contextlib.contextmanager
def learner_process(config: Config, model: Any) -> Iterator[BaseProcess]:
    """Incarnation 1 in a process of its own, which publishes version 1; SIGTERM ends it in good order."""

    def serve() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # kept for sigwait, however early it comes
        with Learner(config, 1) as learner:
            tensors = hf_tensors(model)
            learner.publish(1, tensors.items(), digests(tensors))
            signal.sigwait({signal.SIGTERM})

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


async def test_a_learner_that_is_silent_past_the_deadline_leaves_a_hang_report(
    config: Config, reported: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    bus = config.weight_bus.model_copy(update={"deadline_s": 0.5, "heartbeat_s": 0.1})
    address = str(welcome(config, 1).bus_address)  # where nothing listens
    async with serving(config.model_copy(update={"weight_bus": bus})) as (server, _):
        server.follower.follow(address, RUN)
        await eventually(lambda: "; hang report: " in caplog.text, "the deadline")
        assert server.follower.failure is None, "it waits on"
    said = await asyncio.to_thread(reported)
    assert re.fullmatch(
        rf"me waited \S+ s for a sign of the publisher {address} from learner-0 \(\S+deadline_s\)", said
    )


@pytest.mark.parametrize(
    ("end", "welcomed", "version"),
    [(BaseProcess.kill, True, 1), (BaseProcess.terminate, True, 1), (BaseProcess.kill, False, 2)],
    ids=["killed", "ended", "its update overtakes the welcome"],
)
async def test_the_next_learner_at_the_same_port_is_announced_as_the_next_incarnation(
    models: tuple[Path, Any, Any], config: Config, end: Callable[[BaseProcess], None], welcomed: bool, version: int
) -> None:
    with learner_process(config, models[1]) as process:
        async with serving(config) as (server, wire):
            await handle(server, welcome(config, 1))
            await eventually(lambda: wire.policies, "it asks for leases")
            end(process)
            process.join()
            with Learner(config, 2) as second:
                while not second.members():
                    if welcomed:  # replay says it with each heartbeat of a server that is behind
                        await handle(server, welcome(config, 2))
                    await asyncio.sleep(0.01)
                await second.send(version, models[2])
            assert wire.policies == [(1, 1), (2, version)]


async def test_an_update_in_work_is_announced_under_its_own_incarnation_after_the_next_welcome(
    new: Any, config: Config
) -> None:
    async with serving(config) as (server, wire):
        go_on, reached = asyncio.Event(), threading.Event()
        resume = server.engine.resume

        async def held_up() -> None:
            reached.set()
            await go_on.wait()
            await resume()

        server.engine.resume = held_up  # type: ignore[method-assign]
        with Learner(config, 1) as first:
            await handle(server, welcome(config, 1))
            await eventually(first.members, "it joins")
            sending = asyncio.create_task(first.send(1, new))
            await eventually(reached.is_set, "the update is in work")
            await handle(server, welcome(config, 2))
            go_on.set()
            await sending
        assert wire.policies == [(1, 1)]


async def test_an_engine_with_a_flipped_bit_stands_still_and_asks_for_no_lease_until_it_is_healed(
    models: tuple[Path, Any, Any], config: Config
) -> None:
    """The last link of version truth: what is held is wrong, so nothing is sampled from it and nothing leased to it."""
    async with serving(config) as (server, wire):
        engine, done = server.engine, list[Any]()
        load, pause, resume = engine.load, engine.pause, engine.resume

        async def flipping(named_tensors: Any, version: int, expected: Any) -> None:
            assert expected == digests(hf_tensors(models[version])), "with which an engine may go on by itself"
            await load(named_tensors, version, expected)
            done.append(("load", version, server.leases.version))
            if version == 2 and done.count(("load", 2, 1)) == 1 and done[-2:] == [("pause",), ("load", 2, 1)]:
                next(iter(engine.live.weights.tensors.values())).view(-1).view(torch.uint8)[0] ^= 1  # type: ignore[attr-defined]

        async def pausing(mode: Any) -> None:
            done.append(("pause",))
            await pause(mode)

        async def resuming() -> None:
            done.append(("resume",))
            await resume()

        engine.load, engine.pause, engine.resume = flipping, pausing, resuming  # type: ignore[method-assign]
        with Learner(config, 1) as learner:
            await handle(server, welcome(config, 1))
            await eventually(learner.members, "it joins")
            await learner.send(1, models[1])
            tensors = hf_tensors(models[2])
            await asyncio.to_thread(learner.publish, 2, tensors.items(), digests(tensors))
            await eventually(lambda: done[-1] == ("resume",) and len(done) > 4, "it is healed")
        capacity = server.config.lease_capacity
        update = [("pause",), ("load", 1, None), ("resume",)]
        assert done == [*update, ("pause",), ("load", 2, 1), ("load", 2, None), ("resume",)]
        assert wire.wishes == [(1, capacity), (1, 0), (2, capacity)]
        assert server.follower.gauges["quarantines"] == 1


async def test_a_version_that_a_resumed_learner_makes_anew_is_evaluated_with_its_own_weights(
    models: tuple[Path, Any, Any], config: Config
) -> None:
    """Also where the server did not hear that the earlier one is lost; equal weights keep a running evaluation."""
    first, second = hf_tensors(models[1]), hf_tensors(models[2])
    pins = []
    async with serving(config) as (server, _):
        for incarnation, tensors in enumerate((first, first, second), 1):
            with Learner(config, incarnation) as learner:
                while not learner.members():  # replay says it with each heartbeat of a server that is behind
                    await handle(server, welcome(config, incarnation))
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(learner.publish, 4, tensors.items(), digests(tensors), evaluate=True)
                pins.append(server.engine._pins[4])  # type: ignore[attr-defined]
                assert pins[-1].weights.digests() == digests(tensors)
    assert pins[0] is pins[1]


@pytest.mark.parametrize(
    ("held", "runs", "limit_s", "reason"),
    [
        (3, True, 300 + 120 + 20, "evaluates v3, then drains running requests"),
        (3, False, 300 + 20, "evaluates v3"),
        (None, True, 120 + 20, "drains running requests"),
        (None, False, None, ""),
    ],
)
async def test_an_engine_holds_for_all_that_it_waits_for_and_the_update(
    config: Config, held: int | None, runs: bool, limit_s: float | None, reason: str
) -> None:
    """It was slow, and removed, where it drained for as long as it may, or did so after an evaluation."""
    rollout = config.rollout.model_copy(update={"on_new_weights": "drain"})
    async with serving(config.model_copy(update={"rollout": rollout})) as (server, _):
        follower, said = server.follower, []
        follower._subscriber = SimpleNamespace(hold=lambda *what: said.append(what), stop=lambda: None)  # type: ignore[assignment]
        server.engine.holds = lambda: held  # type: ignore[method-assign]
        server.engine.running_tokens = lambda: {"one": 5} if runs else {}  # type: ignore[method-assign]
        await asyncio.to_thread(follower.announce_wait)
        assert said == ([(limit_s, reason)] if limit_s is not None else [])


async def test_an_engine_that_evaluates_takes_the_newest_version_afterwards(
    models: tuple[Path, Any, Any], config: Config
) -> None:
    async with serving(config) as (server, wire):
        with Learner(config, 1) as learner:
            await handle(server, welcome(config, 1))
            await eventually(learner.members, "it joins")
            await learner.send(1, models[1])
            server.engine.holds = lambda: 1  # type: ignore[method-assign]
            tensors = hf_tensors(models[1])
            for version in (2, 3):
                report = await asyncio.to_thread(learner.publish, version, tensors.items(), digests(tensors))
                assert (report.served, report.failed) == ([], {}) and "evaluates v1" in report.held["server"]
            # the publisher waits for no engine that evaluates, so v3 may still be on its way
            subscription = server.follower._subscriber.subscription  # type: ignore[union-attr]
            await eventually(lambda: subscription._due and subscription._due[1].version == 3, "v3 is staged")
            assert server.follower.gauges["weight_updates"] == 1 and server.follower._paused_at is None
            server.engine.holds = lambda: None  # type: ignore[method-assign]
            await eventually(lambda: wire.policies == [(1, 1), (1, 3)], "it is updated")


async def test_the_next_learner_at_another_port_fills_the_buffers_that_the_engine_has_mapped(
    models: tuple[Path, Any, Any], config: Config
) -> None:
    """On a GPU a second set beside them would not fit."""
    at_any_port = config.model_copy(update={"weight_bus": config.weight_bus.model_copy(update={"port": 0})})
    mapped: list[list[Any]] = []  # kept, as schedulers keep what they have mapped
    async with serving(at_any_port) as (server, _):
        load = server.engine.load

        async def mapping(named_tensors: Any, version: int, expected: Any) -> None:
            mapped.append(list(named_tensors))
            await load(mapped[-1], version, expected)

        server.engine.load = mapping  # type: ignore[method-assign]
        for incarnation in (1, 2):
            with Learner(at_any_port, incarnation) as learner:
                await handle(server, m.Welcome(incarnation=incarnation, version=0, bus_address=learner.address))
                await eventually(learner.members, "it joins")
                await learner.send(incarnation, models[incarnation])
    first, second = ({tensor.untyped_storage().data_ptr() for _, tensor in tensors} for tensors in mapped)
    assert first == second
