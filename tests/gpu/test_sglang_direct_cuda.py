"""Updates over NCCL straight into SGLang (weight_bus.apply: direct); the publisher is on a GPU of its own."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_sglang_cuda import make_folder, run, settings, started

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import Sampling
from rollout_server.follower import WeightFollower
from weight_bus import EngineSpoiled, Publisher, TransportError
from weight_bus.digest import slice_digest
from weight_bus.transports.direct import DirectNccl

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and torch finds {GPUS}"),
]
as_designed = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The follower's thread ends with the error that ends its server."""
RUN = "direct-cuda"
UPDATES = 5


class Cut(DirectNccl):
    """Lost in the second bucket once `cut` is set."""

    cut = False

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `NcclCollective.broadcast`."""
        if self.cut and index == 1:
            raise TransportError("the publisher was cut off", "closed")
        super().broadcast(bucket, index)


def direct(folder: Path, tensor_parallel: int) -> Config:
    config = settings(folder, tensor_parallel)
    bus = {
        "backend": "nccl",
        "apply": "direct",
        "bucket_bytes": 1 << 20,
        "collective_timeout_s": 20.0,
        "deadline_s": 60.0,
    }
    rollout = config.rollout.model_copy(update={"engine_deadline_s": 40.0})
    return config.model_copy(update={"weight_bus": WeightBus.model_validate(bus), "rollout": rollout})


async def until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def updates(folder: Path, tensors: dict[str, torch.Tensor], tensor_parallel: int) -> None:
    config = direct(folder, tensor_parallel)
    live: list[int] = []
    dark: list[str] = []

    async def went_live(version: int, _: int) -> None:
        live.append(version)

    async def went_dark(reason: str) -> None:
        dark.append(reason)

    ends: list[Cut] = []

    def factory(bus: WeightBus, host: str) -> Cut:
        ends.append(Cut(bus, host))
        return ends[-1]

    async with started(config) as engine:
        with (
            torch.cuda.device(GPUS - 1),
            Publisher(config.weight_bus, host="127.0.0.1", run_id=RUN, incarnation=1, transport_factory=factory) as bus,
        ):
            follower = WeightFollower(config, engine, "one", on_live=went_live, on_quarantine=went_dark)  # type: ignore[arg-type]
            follower.follow(bus.address, RUN)
            await until(bus.members, "it joins")
            for version in range(1, UPDATES + 2):
                request = engine.generate([2, 3, 4], Sampling(max_new_tokens=200), 8, request_id=f"r{version}")  # type: ignore[attr-defined]
                running = asyncio.create_task(request)
                await asyncio.sleep(0.3)
                changed = {n: (t.float() + 0.01 * torch.randn(t.shape)).to(t.dtype) for n, t in tensors.items()}
                want = {name: slice_digest(tensor) for name, tensor in changed.items()}
                ends[0].cut = version > UPDATES
                report = await asyncio.to_thread(bus.publish, version, changed.items(), want)
                print(f"tp {tensor_parallel} v{version}: {report.seconds}, paused {follower.gauges['pause_s']:.3f} s")
                if ends[0].cut:
                    running.cancel()
                    break
                assert (report.served, report.failed, report.epoch) == (["one"], {}, 1), report
                assert await engine.digest() == want  # type: ignore[attr-defined]
                for completion in await running:
                    assert set(completion.versions.tolist()) <= {version - 1, version}
            assert live == list(range(1, UPDATES + 1))
            assert all("spoiled" in reason for reason in dark), (
                "of the engine that waits in the broken group, if at all"
            )
            assert report.served == [] and "one" in report.failed, report
            await until(lambda: follower.failure, "an engine that received a part ends its server")
            assert isinstance(follower.failure, EngineSpoiled), follower.failure
            await asyncio.to_thread(follower.stop)


@as_designed
def test_updates_over_nccl_into_one_rank_and_a_lost_publisher(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: updates(tmp_path, tensors, 1))


@as_designed
@pytest.mark.skipif(GPUS < 3, reason=f"needs three CUDA devices, and torch finds {GPUS}")
def test_updates_over_nccl_into_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: updates(tmp_path, tensors, 2))
