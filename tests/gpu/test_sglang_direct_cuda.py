"""Updates over NCCL straight into SGLang (weight_bus.apply: direct); the publisher is on a GPU of its own."""

import asyncio
from pathlib import Path

import pytest
import torch
from test_sglang_cuda import GPUS, altered, following, make_folder, run, settings, until

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import Sampling
from weight_bus import EngineSpoiled, TransportError
from weight_bus.digest import slice_digest
from weight_bus.transports.direct import DirectNccl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and torch finds {GPUS}"),
]
as_designed = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The follower's thread ends with the error that ends its server."""
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


async def updates(folder: Path, tensors: dict[str, torch.Tensor], tensor_parallel: int) -> None:
    async with following(direct(folder, tensor_parallel), Cut) as run:
        for version in range(1, UPDATES + 2):
            request = run.engine.generate([2, 3, 4], Sampling(max_new_tokens=200), 8, request_id=f"r{version}")
            running = asyncio.create_task(request)
            await asyncio.sleep(0.3)
            changed = altered(tensors)
            want = {name: slice_digest(tensor) for name, tensor in changed.items()}
            run.end.cut = version > UPDATES
            report = await asyncio.to_thread(run.bus.publish, version, changed.items(), want)
            print(f"tp {tensor_parallel} v{version}: {report.seconds}, paused {run.follower.gauges['pause_s']:.3f} s")
            if run.end.cut:
                running.cancel()
                break
            assert (report.served, report.failed, report.epoch) == (["one"], {}, 1), report
            assert await run.engine.digest() == want
            for completion in await running:
                assert set(completion.versions.tolist()) <= {version - 1, version}
        assert run.live == list(range(1, UPDATES + 1))
        assert all("spoiled" in reason for reason in run.dark), "of one that waits in the broken group, if at all"
        assert report.served == [] and "one" in report.failed, report
        await until(lambda: run.follower.failure, "an engine that received a part ends its server")
        assert isinstance(run.follower.failure, EngineSpoiled), run.follower.failure


@as_designed
def test_updates_over_nccl_into_one_rank_and_a_lost_publisher(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: updates(tmp_path, tensors, 1))


@as_designed
@pytest.mark.skipif(GPUS < 3, reason=f"needs three CUDA devices, and torch finds {GPUS}")
def test_updates_over_nccl_into_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: updates(tmp_path, tensors, 2))
