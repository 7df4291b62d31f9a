"""A publisher or another receiver killed, stopped or cut off inside a broadcast, while SGLang decodes.

Updates arrive in its scheduler (`stage_in: engine`). NCCL takes each member to be on a host of its own: they talk over
sockets, and the other receiver shares the publisher's GPU.
"""

import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import Sampling
from rollout_server.follower import WeightFollower
from scripts.bench.server import make_engine
from tests.gpu.test_sglang_bus_cuda import over_nccl
from tests.gpu.test_sglang_cuda import GPUS, altered, make_folder
from tests.support.bus_receiver import HOST, RUN, Watched, digests, receiver_process, strike
from tests.support.waiting import eventually, until
from weight_bus import Publisher
from weight_bus.transports import Transport, make_transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and torch finds {GPUS}"),
]
MAX_GAP_S = 5.0
BUS = {"stage_in": "engine", "collective_timeout_s": 8.0, "deadline_s": 60.0, "heartbeat_s": 1.0}
POINT = "before-1"
LEARNERS = 4
"""One for each that is lost, and the last."""
SPAWN = multiprocessing.get_context("spawn")


def keep_warnings(said: Path) -> None:
    """Of the weight bus in this process, in a file that all processes add to."""
    handler = logging.FileHandler(said)
    handler.setLevel(logging.WARNING)
    logging.getLogger("weight_bus").addHandler(handler)


def publish(end: Connection, config: Config, incarnation: int, said: Path) -> None:
    """The process of a learner: publishes each version that it is asked for, once these members are filled."""
    os.environ["NCCL_HOSTID"] = f"learner-{incarnation}"
    keep_warnings(said)
    first = torch.load(said.with_name("first.pt"))
    planned: list[str] = []

    def come(_: int, point: str, transport: Transport) -> None:
        if point == POINT and planned:
            strike(planned.pop(), transport)

    def factory(bus: WeightBus, host: str) -> Any:
        return Watched(make_transport(bus, host), come)

    run: dict[str, Any] = {"host": HOST, "run_id": RUN, "incarnation": incarnation, "transport_factory": factory}
    with torch.cuda.device(GPUS - 1), Publisher(config.weight_bus, **run) as bus:
        end.send(bus.address)
        while True:
            version, members, faults = end.recv()
            filled = {name: bus.version for name in members}
            until(lambda: {n: v for n, (_, v) in bus.members().items()} == filled, f"{filled} are filled", 90.0)  # noqa: B023
            planned += faults
            tensors = altered(first)
            want = digests(tensors)
            end.send((want, bus.publish(version, tensors.items(), want).failed))


class Learner:
    """Such a process, which starts up meanwhile."""

    def __init__(self, *arguments: Any) -> None:
        self.end, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=publish, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    @cached_property
    def address(self) -> str:
        """Of its publisher."""
        return str(self.end.recv())


class Rig:
    """An engine that follows the first of some learners."""

    def __init__(self, config: Config, said: Path) -> None:
        self.config, self.said = config, said
        self.learners = [Learner(config, 1 + number, said) for number in range(LEARNERS)]
        self.engine: Any = make_engine(config)
        self.live: list[int] = []
        self.dark: list[str] = []
        self.follower = WeightFollower(
            config, self.engine, "one", on_live=self._went_live, on_quarantine=self._went_dark
        )
        self.version = 0

    async def _went_live(self, version: int, _: int) -> None:
        self.live.append(version)

    async def _went_dark(self, reason: str) -> None:
        self.dark.append(reason)

    def send(self, *members: str, faults: tuple[str, ...] = ()) -> None:
        """Have the first learner publish the next version."""
        self.version += 1
        self.follower.follow(self.learners[0].address, RUN)
        self.learners[0].end.send((self.version, members, faults))

    async def served(self) -> dict[str, str]:
        """Wait until the engine decodes with it; the members that failed."""
        end = self.learners[0].end
        assert await asyncio.to_thread(end.poll, 120.0), f"v{self.version} was not published"
        want, failed = end.recv()
        await eventually(lambda: self.version in self.live, f"v{self.version} is live", 60.0)
        assert await self.engine.digest() == want and self.dark == []
        assert "one" not in failed, failed
        return dict(failed)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[list[float]]:
        """One long request after the other, and when each of their tokens came."""
        came: list[float] = []
        self.engine.sglang.gaps.token = came.append
        sampling = Sampling(max_new_tokens=self.config.rollout.max_new_tokens)

        async def decode() -> None:
            for number in itertools.count():
                await self.engine.generate([5, 6], sampling, 1, request_id=f"v{self.version}-{number}")

        task = asyncio.create_task(decode())
        try:
            await eventually(lambda: came or task.done(), "the first token")
            yield came
            assert not task.done(), task
            came.append(time.monotonic())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextmanager
def running(config: Config, said: Path) -> Iterator[tuple[asyncio.Runner, Rig]]:
    """A rig on a loop that lasts for all cases."""
    import uvloop

    async def make() -> Rig:
        return Rig(config, said)

    async def end() -> None:
        await asyncio.to_thread(rig.follower.stop)
        await rig.engine.close()

    keep_warnings(said)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rig = runner.run(make())
        try:
            yield runner, rig
        finally:
            runner.run(end())
            for learner in rig.learners:
                learner.process.kill()


async def lose(rig: Rig, role: str, fault: str) -> dict[str, Any]:
    """Have one lost inside a broadcast to the engine, and the version after it served; what that was like."""
    learner, peer = rig.learners[0], f"peer-{fault}"
    rig.said.write_text("")
    rig.send("one")
    await rig.served()
    members, faults, name = ["one"], (fault,), f"publisher {learner.address}"
    with ExitStack() as stack:
        if role == "peer":
            members, faults, name = ["one", peer], (), f"subscriber '{peer}'"
            environment = {"BUS_CONFIG": rig.config.weight_bus.model_dump_json(), "CUDA_VISIBLE_DEVICES": str(GPUS - 1)}
            plan = f"{fault}@2:{POINT}"  # it is filled first
            made: Any = receiver_process(
                learner,  # type: ignore[arg-type]  # has its address
                peer, plan, joins_in_s=0.0, NCCL_HOSTID=peer, **environment,
            )  # fmt: skip
            stack.enter_context(made)

        def named() -> list[str]:
            return [line for line in rig.said.read_text().splitlines() if name in line]

        async with rig.streaming() as came:
            began = time.monotonic()
            rig.send(*members, faults=faults)
            await eventually(named, f"the log names {name}", 90.0)
            if role == "peer":
                await rig.served()
            else:
                assert rig.live[-1] < rig.version
                rig.learners.pop(0).process.kill()
            rig.send(*members if fault == "cut" else ["one"])  # a peer that was cut off comes back
            await rig.served()
            seconds = time.monotonic() - began
    gap = max(after - before for before, after in itertools.pairwise(came))
    return {"role": role, "fault": fault, "gap_s": round(gap, 3), "named": named()[0], "seconds": round(seconds, 1)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Rig]]:
    folder = tmp_path_factory.mktemp("model")
    torch.save(make_folder(folder), folder / "first.pt")
    with running(over_nccl(folder, 1, BUS), folder / "said.log") as made:
        yield made


@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
@pytest.mark.parametrize("role", ["peer", "publisher"])
def test_a_member_lost_in_a_broadcast_is_named_and_tokens_go_on(
    rig: tuple[asyncio.Runner, Rig], role: str, fault: str
) -> None:
    runner, made = rig
    found = runner.run(lose(made, role, fault))
    print(json.dumps(found))
    assert found["gap_s"] <= MAX_GAP_S
