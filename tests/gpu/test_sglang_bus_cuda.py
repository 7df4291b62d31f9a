"""Updates over NCCL into SGLang, received in its scheduler beside decoding (`stage_in: engine`).

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

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import Sampling
from tests.gpu.test_sglang_cuda import GPUS, altered, following, make_folder, run, settings
from tests.support.waiting import eventually
from weight_bus import TransportError
from weight_bus.digest import slice_digest
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
