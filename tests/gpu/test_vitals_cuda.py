"""What a GPU says of itself, and the time of collectives by events on its streams."""

import importlib.util
import time

import pytest
import torch

from learner.policy.communication import Communication
from learner.record.profile import readings
from slipstream.runtime.vitals import device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_busy_gpu_says_so_and_its_memory_is_what_was_allocated(monkeypatch):
    monkeypatch.setattr(device, "_silent", False)
    held = torch.ones(256, 2**20, device="cuda")  # 1 GiB
    found = readings()
    assert found["device_memory_bytes"] >= held.numel() * 4
    if importlib.util.find_spec("pynvml") is None:
        assert "gpu_utilization" not in found
        return
    matrix, until = torch.randn(4096, 4096, device="cuda"), time.monotonic() + 3
    while time.monotonic() < until:
        matrix @ matrix
        torch.cuda.synchronize()
    assert 0.5 < readings()["gpu_utilization"] <= 1


def test_collectives_are_timed_by_events_once_they_are_asked_for():
    """A product stands for a collective: both are work that a stream waits for."""
    found = Communication([], torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
    found.timed(torch.matmul, matrix, matrix)
    assert found.take() == 0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        found.timed(torch.matmul, matrix, matrix)
    end.record()
    end.synchronize()
    assert found.take() == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.2)
    assert found.take() == 0
