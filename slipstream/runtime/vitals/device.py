"""What NVIDIA's driver and torch say of a process's GPUs. torch comes from the caller: this package imports none."""

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

log = logging.getLogger(__name__)
_silent = False
"""The driver's library could not be asked once; that is logged, and it is asked no more."""


def readings(cuda: Any, devices: Sequence[int], memory: Callable[[int], int]) -> Mapping[str, float]:
    """`device_memory_bytes` and `gpu_utilization` of these visible devices; nothing before CUDA is in use.

    Args:
        cuda: torch.cuda.
        memory: bytes in use on a device.
    """
    if not cuda.is_available() or not cuda.is_initialized():
        return {}
    found = {"device_memory_bytes": float(sum(memory(device) for device in devices))}
    shares = utilization(cuda, devices)
    return found | ({"gpu_utilization": fmean(shares)} if shares else {})


def utilization(cuda: Any, devices: Sequence[int]) -> list[float]:
    """Share of the driver's last sample period in which a kernel ran, by device; none where NVML does not say."""
    global _silent
    if _silent:
        return []
    try:
        return [cuda.utilization(device) / 100 for device in devices]
    except Exception as error:  # noqa: BLE001 - NVMLError, as with MIG or a lost GPU, is a plain Exception
        _silent = True
        log.info("GPU utilization is not measured: %s: %s", type(error).__name__, error)
        return []
