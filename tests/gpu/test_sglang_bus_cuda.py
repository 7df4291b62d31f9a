"""Updates over NCCL into SGLang: received in its scheduler beside decoding (`stage_in: engine`), and `apply: direct`.

The publisher is on a GPU of its own.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sglang_cuda import GPUS, altered, following, make_folder, run, settings

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import Sampling
from tests.support.waiting import eventually
from weight_bus import EngineSpoiled, TransportError
from weight_bus.digest import slice_digest
from weight_bus.transports.direct import DirectNccl
from weight_bus.transports.nccl import NcclCollective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and torch finds {GPUS}"),
]
TIMEOUT_S = 15.0


def over_nccl(folder: Path, tensor_parallel: int, bus: dict[str, Any], **rollout: float) -> Config:
    config = settings(folder, tensor_parallel)
    weight_bus = WeightBus.model_validate({"backend": "nccl", "bucket_bytes": 1 << 20} | bus)
    return config.model_copy(update={"weight_bus": weight_bus, "rollout": config.rollout.model_copy(update=rollout)})


STAGED = {"stage_in": "engine", "collective_timeout_s": TIMEOUT_S, "deadline_s": 90.0}
STAGED_UPDATES = 6
AT_ONCE_S = 5.0
"""For 16 tokens, which take milliseconds: less than a broadcast that hangs takes, by far."""
CORRUPT, CUT = 3, 5
"""Versions whose first bucket is damaged once, or is not sent at first."""


class Faulty(NcclCollective):
    """What `fault` says happens to the first bucket of the next transfer."""

    fault = ""
    damaged: torch.Tensor | None = None
    """Kept, because a broadcast is only launched."""

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `NcclCollective.broadcast`."""
        if index == 0 and self.fault:
            fault, self.fault = self.fault, ""
            if fault == "cut":
                self.leave()
                raise TransportError("the publisher was cut off", "closed")
            bucket = self.damaged = bucket.clone()
            bucket[12] ^= 1
            torch.cuda.synchronize(self.device)
        super().broadcast(bucket, index)


def changed(tensors: dict[str, torch.Tensor], *, sparse: bool) -> dict[str, torch.Tensor]:
    """Every element of them, or a few."""
    if not sparse:
        return altered(tensors)
    return {n: t.where(torch.rand(t.shape) > 0.01, t + 0.25) for n, t in tensors.items()}


@asynccontextmanager
async def decoding(engine: Any) -> AsyncIterator[list[float]]:
    """Short requests one after the other, and how long each took."""
    seconds: list[float] = []

    async def decode() -> None:
        for number in itertools.count():
            started = time.monotonic()
            await engine.generate([5, 6], Sampling(max_new_tokens=16), 4, request_id=f"short-{number}")
            seconds.append(time.monotonic() - started)

    task = asyncio.create_task(decode())
    try:
        yield seconds
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def staged_updates(folder: Path, tensors: dict[str, torch.Tensor], tensor_parallel: int, *, delta: bool) -> None:
    async with following(over_nccl(folder, tensor_parallel, STAGED | {"delta": delta}), Faulty) as run:
        for version in range(1, STAGED_UPDATES + 1):
            request = run.engine.generate([2, 3, 4], Sampling(max_new_tokens=400), 8, request_id=f"r{version}")
            running = asyncio.create_task(request)
            await asyncio.sleep(0.3)
            tensors = changed(tensors, sparse=delta)
            want = {name: slice_digest(tensor) for name, tensor in tensors.items()}
            run.end.fault = {CORRUPT: "flip", CUT: "cut"}.get(version, "")
            async with decoding(run.engine) as seconds:
                began = time.monotonic()
                report = await asyncio.to_thread(run.bus.publish, version, tensors.items(), want)
                await eventually(lambda now=version: now in run.live, f"v{version} is live", 90.0)  # type: ignore[misc]
                took = time.monotonic() - began
            if version == CUT:
                assert took > TIMEOUT_S and len(seconds) > TIMEOUT_S and max(seconds) < AT_ONCE_S, (
                    f"while a broadcast hung for {took:.1f} s, a request took up to {max(seconds):.1f} s"
                )
            print(f"tp {tensor_parallel} v{version}: {report.seconds}, paused {run.follower.gauges['pause_s']:.3f} s")
            assert await run.engine.digest() == want
            for completion in await running:
                assert set(completion.versions.tolist()) <= {version - 1, version}
        assert run.live == list(range(1, STAGED_UPDATES + 1)) and run.dark == []
        assert run.end.fault == "" and run.bus.stats()["epochs"] > 1


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "changes"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_updates_are_received_in_the_scheduler_and_shared_with_the_other_rank(
    tmp_path: Path, tensor_parallel: int, delta: bool
) -> None:
    """With two ranks the publisher is on the GPU of the second one, which is no member of the group."""
    tensors = make_folder(tmp_path)
    run(lambda: staged_updates(tmp_path, tensors, tensor_parallel, delta=delta))


as_designed = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The follower's thread ends with the error that ends its server."""
DIRECT = {"apply": "direct", "collective_timeout_s": 20.0, "deadline_s": 60.0}
DIRECT_UPDATES = 5


class Cut(DirectNccl):
    """Lost in the second bucket once `cut` is set."""

    cut = False

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `NcclCollective.broadcast`."""
        if self.cut and index == 1:
            raise TransportError("the publisher was cut off", "closed")
        super().broadcast(bucket, index)


async def direct_updates(folder: Path, tensors: dict[str, torch.Tensor], tensor_parallel: int) -> None:
    async with following(over_nccl(folder, tensor_parallel, DIRECT, engine_deadline_s=40.0), Cut) as run:
        for version in range(1, DIRECT_UPDATES + 2):
            request = run.engine.generate([2, 3, 4], Sampling(max_new_tokens=200), 8, request_id=f"r{version}")
            running = asyncio.create_task(request)
            await asyncio.sleep(0.3)
            changed = altered(tensors)
            want = {name: slice_digest(tensor) for name, tensor in changed.items()}
            run.end.cut = version > DIRECT_UPDATES
            report = await asyncio.to_thread(run.bus.publish, version, changed.items(), want)
            print(f"tp {tensor_parallel} v{version}: {report.seconds}, paused {run.follower.gauges['pause_s']:.3f} s")
            if run.end.cut:
                running.cancel()
                break
            assert (report.served, report.failed, report.epoch) == (["one"], {}, 1), report
            assert await run.engine.digest() == want
            for completion in await running:
                assert set(completion.versions.tolist()) <= {version - 1, version}
        assert run.live == list(range(1, DIRECT_UPDATES + 1))
        assert all("spoiled" in reason for reason in run.dark), "of one that waits in the broken group, if at all"
        assert report.served == [] and "one" in report.failed, report
        await eventually(lambda: run.follower.failure, "an engine that received a part ends its server", 90.0)
        assert isinstance(run.follower.failure, EngineSpoiled), run.follower.failure


@as_designed
def test_updates_over_nccl_into_one_rank_and_a_lost_publisher(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: direct_updates(tmp_path, tensors, 1))


@as_designed
@pytest.mark.skipif(GPUS < 3, reason=f"needs three CUDA devices, and torch finds {GPUS}")
def test_updates_over_nccl_into_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: direct_updates(tmp_path, tensors, 2))
