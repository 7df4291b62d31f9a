"""The weight bus on GPUs: the digest kernel, packing on the device, and NCCL epochs between processes."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.bus_receiver import CONFIG, HOST, RUN, Process, digests, printed, receiver_process, until, weights
from weight_bus import NonFiniteWeights, Publisher, PublishReport
from weight_bus.digest import TensorSlice, reference_digest, slice_digests
from weight_bus.manifest import plan
from weight_bus.packing import Packer, Pieces
from weight_bus.staging import Staging, view_of

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and torch finds none"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, torch finds {NUM_GPUS}")

GPU = torch.device("cuda", 0)
OVER_NCCL = {"backend": "nccl", "collective_timeout_s": 8.0, "deadline_s": 60.0, "bucket_bytes": 4_000_000}
BUS = CONFIG.model_copy(update=OVER_NCCL)
ROWS = 8000
line = partial(printed, rows=ROWS)
MEMBERS = 4
DTYPES = (torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.int64)
SHAPES = [(), (1,), (2047,), (2048,), (32_768,), (32_769,), (3, 5), (7, 1000), (40, 1024), (130, 4096), (2, 3, 4)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN patterns and negative numbers included."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, device=GPU).bool()
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=GPU).view(dtype).view(shape)


def parts_of(tensor: torch.Tensor) -> list[TensorSlice]:
    """The whole, rows, columns, middles, transposed and strided ones."""
    found = [TensorSlice(tensor)]
    shape, dims = tuple(tensor.shape), tensor.dim()
    if dims:
        found += [TensorSlice(tensor[:0], shape), TensorSlice(tensor[::2])]
        found.append(TensorSlice(tensor, (shape[0] + 1_000_003, *shape[1:]), (1_000_003, *(0,) * (dims - 1))))
    if dims > 1:
        last = shape[-1]
        wide = (*shape[:-1], last + 9)
        found += [TensorSlice(tensor[1:], shape, (1, *(0,) * (dims - 1))), TensorSlice(tensor.transpose(0, -1))]
        found.append(TensorSlice(tensor, wide, (0,) * (dims - 1) + (5,)))
        found.append(TensorSlice(tensor[..., 1:], shape, (0,) * (dims - 1) + (1,)))
        found.append(TensorSlice(tensor[..., last // 4 : last // 2], shape, (0,) * (dims - 1) + (last // 4,)))
    if dims > 2:
        found.append(TensorSlice(tensor[1:, 1:, 1:], shape, (1,) * dims))  # no arithmetic of rows: the slow path
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_finds_what_the_definition_says(dtype: torch.dtype) -> None:
    parts = [part for shape in SHAPES for part in parts_of(random_bits(shape, dtype))]
    assert slice_digests(parts) == [reference_digest(part) for part in parts]
    host = [part._replace(tensor=part.tensor.cpu()) for part in parts]
    assert slice_digests(parts) == slice_digests(host), "the same on both devices"


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_inside_the_kernel_is_the_rounding_of_a_cast(rounded: torch.dtype) -> None:
    spread = torch.randn(600_000, device=GPU) * torch.exp(12 * torch.randn(600_000, device=GPU))
    every = torch.arange(0, 1 << 20, device=GPU, dtype=torch.int32).mul_(1 << 12).view(torch.float32)
    halves = every[every.isfinite()][: 1 << 19]  # subnormal numbers and ties among them; NaN has no bits of its own
    for values in (spread, halves, -halves):
        (found,) = slice_digests([TensorSlice(values.view(-1, 8), (values.numel(), 8), (3, 0), rounded)])
        assert found == slice_digests([TensorSlice(values.to(rounded).view(-1, 8), (values.numel(), 8), (3, 0))])[0]


def test_indices_beyond_32_bits() -> None:
    small = random_bits((3, 4096), torch.bfloat16)
    part = TensorSlice(small, (1 << 22, 1 << 14), ((1 << 22) - 3, 4096))
    assert slice_digests([part]) == [reference_digest(part)]
    large = torch.zeros((1 << 31) + 70_000, dtype=torch.uint8, device=GPU)
    large[-5:] = 7
    assert slice_digests([TensorSlice(large)]) == [reference_digest(TensorSlice(large))]


@pytest.mark.parametrize("where", [GPU, torch.device("cpu")], ids=["on the device", "in host memory"])
def test_packing_is_bit_equal_and_allocates_nothing_later(where: torch.device) -> None:
    packer, staging = Packer(300_000, where), Staging(GPU)
    held: list[list[int]] = []
    for version in range(6):
        named = {name: tensor.to(GPU) for name, tensor in weights(version).items()}
        masters = {
            n: Pieces(tuple(t.shape), t.dtype, [p.reshape(-1) for p in t.float().tensor_split(3)])
            for n, t in named.items()
        }
        before = torch.cuda.memory_allocated(GPU)
        layout, buckets = packer.pack((named if version % 3 else masters).items(), version % 2)
        assert version < 2 or torch.cuda.memory_allocated(GPU) == before
        specs = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named.items()]
        assert layout == plan(specs, 300_000) and all(bucket.device == where for bucket in buckets)
        assert where == GPU or all(bucket.is_pinned() for bucket in buckets)
        assert all(torch.equal(view_of(buckets, entry), named[entry.name].to(where)) for entry in layout.entries)
        held.append([bucket.data_ptr() for bucket in buckets])
        staging.prepare(layout.with_digests(digests(weights(version))), where)
        assert all(bucket.device == where and bucket.is_pinned() == (where != GPU) for bucket in staging.buckets)
        for target, source in zip(staging.buckets, buckets, strict=True):
            target.copy_(source)
        staging.digest(1)  # has come before the others
        assert staging.corrupt() == []
        staging.buckets[2][77] ^= 1
        assert len(staging.corrupt()) == 1
    assert held[0] == held[2] == held[4] and held[1] == held[3] == held[5] and not set(held[0]) & set(held[1])


@pytest.mark.parametrize("where", [GPU, torch.device("cpu")], ids=["on the device", "in host memory"])
def test_a_value_that_is_not_finite_is_named(where: torch.device) -> None:
    packer = Packer(300_000, where)
    named = {name: tensor.to(GPU) for name, tensor in weights(1).items()}
    packer.pack(named.items(), 0)
    named["layers.2.weight"][-1, -1] = float("inf")
    with pytest.raises(NonFiniteWeights, match=r"'layers\.2\.weight' has 1 non-finite of 128500"):
        packer.pack(named.items(), 1)


def worker(publisher: Publisher, name: str, gpu: int, *faults: str, joins: bool = True, **environment: Any) -> Any:
    """A receiver process on a GPU of its own."""
    on_gpu = {"CUDA_VISIBLE_DEVICES": str(gpu), "BUS_CONFIG": json.dumps(OVER_NCCL), **environment}
    return receiver_process(publisher, name, *faults, joins_in_s=90.0 if joins else 0.0, **on_gpu)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    torch.cuda.set_device(GPU)
    with Publisher(BUS, host=HOST, run_id=RUN, incarnation=1) as made:
        yield made


def publish(publisher: Publisher, version: int) -> PublishReport:
    named = {name: tensor.to(GPU) for name, tensor in weights(version, rows=ROWS).items()}
    return publisher.publish(version, named.items(), digests(named))


@two_gpus
def test_versions_travel_from_gpu_to_gpu_in_one_epoch(publisher: Publisher) -> None:
    with worker(publisher, "rollout-0", 1) as receiver:
        for version in range(1, 6):
            report = publish(publisher, version)
            assert (report.served, report.failed) == (["rollout-0"], {}), report
        assert receiver.lines == [line(version) for version in range(1, 6)] and publisher.epoch == 1
        publisher.close()
        until(lambda: receiver.lines[-1] == "closed", "it hears goodbye", 30.0)
        assert receiver.process.wait(30.0) == 0


@two_gpus
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_receiver_lost_in_a_transfer_costs_the_timeout_and_its_place_is_taken(
    publisher: Publisher, action: str
) -> None:
    with worker(publisher, "rollout-0", 1, f"{action}@2"):
        assert publish(publisher, 1).served == ["rollout-0"]
        report = publish(publisher, 2)
        assert report.served == [] and "rollout-0" in report.failed
        until(lambda: not publisher.members(), "it is removed", 30.0)
    with worker(publisher, "rollout-1", 1) as successor:
        until(lambda: successor.lines == [line(2)], "the publisher's process lives, another joins and is filled", 90.0)
        assert publish(publisher, 3).served == ["rollout-1"]


def seat(number: int) -> tuple[int, dict[str, Any]]:
    """GPU and environment of a member, publisher 0: with fewer GPUs than members some share one.

    NCCL takes two ranks on one GPU only where it believes them to be on two hosts; they talk over sockets then.
    """
    return number % NUM_GPUS, {} if NUM_GPUS >= MEMBERS else {"NCCL_HOSTID": f"seat-{number}"}


@contextmanager
def seated(publisher: Publisher, name: str, number: int, *faults: str) -> Iterator[Process]:
    gpu, environment = seat(number)
    with worker(publisher, name, gpu, *faults, **environment) as made:
        yield made


def test_survivors_of_a_loss_inside_a_broadcast_hold_whole_versions(publisher: Publisher) -> None:
    """Four members; one after the other is lost at a point of a version, under one publisher that goes on."""
    specs = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in weights(0, rows=ROWS).items()]
    last = len(plan(specs, BUS.bucket_bytes).bucket_sizes) - 1
    points = ["before-0", "after-0", f"before-{last // 2}", f"after-{last}", "closing"]
    faults = [*(f"kill@2:{point}" for point in points), "stop@2:after-0"]
    with seated(publisher, "survivor-1", 1) as first, seated(publisher, "survivor-2", 2) as second:
        survivors = {"survivor-1": first, "survivor-2": second}
        assert sorted(publish(publisher, 1).served) == [*survivors]
        for version, fault in enumerate(faults, 2):
            victim = f"victim-{version}"
            with seated(publisher, victim, 3, fault) as lost:
                until(lambda: publisher.members()[victim][1] == publisher.version, "it is filled", 30.0)  # noqa: B023
                report = publish(publisher, version)
                assert sorted(report.served) == [*survivors] and report.failed.keys() == {victim}, report
                assert len(lost.lines) == 1
                if fault.startswith("kill"):
                    assert lost.process.wait(10.0) == -signal.SIGKILL
            waited = report.seconds["total"]
            print(f"{fault}: v{version} at both survivors after {waited:.1f} s; {report.failed}")
        for survivor in survivors.values():
            assert survivor.lines == [line(version) for version in range(1, len(faults) + 2)]


@two_gpus
def test_another_environment_of_nccl_is_refused_by_name(publisher: Publisher) -> None:
    with worker(publisher, "rollout-0", 1, joins=False, NCCL_NVLS_ENABLE="1") as misfit:
        until(lambda: misfit.lines, "it is refused", 90.0)
        assert misfit.lines[0].startswith("removed ") and "NCCL_NVLS_ENABLE is 1 there and 0 here" in misfit.lines[0]
