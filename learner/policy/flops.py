"""FLOPs of a model's rows, and the peaks of GPUs that `perf/mfu` holds them against."""

import re
from collections.abc import Mapping, Sequence

import torch

from learner.rows import Row
from slipstream.families.sizes import Sizes

PEAK_TFLOPS = {
    "B300": 2250,
    "B200": 2250,
    "GB200": 2500,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
}
"""Dense bfloat16 products, by words of the device's name (data sheets of NVIDIA)."""


def peak_flops(device: str) -> float | None:
    """Of bfloat16 in a second; None for a device that the table does not have.

    Example: "NVIDIA H100 80GB HBM3" has 989e12.
    """
    words = set(re.split("[ -]", device))
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split())), None)


def mfu(flops: float, spans: Mapping[str, float], peak: float) -> float:
    """Share of the peak of all devices while gradients were made and applied.

    Args:
        flops: of a step, over all ranks.
        spans: seconds of its phases (learner.record.metrics.Spans).
        peak: FLOPs a second of all devices.
    """
    return flops / (spans["timing_s/gradients"] + spans["timing_s/apply"]) / peak


def flops_of(sizes: Sizes, rows: Sequence[Row], *, frozen: bool = False) -> float:
    """Of forward and backward over rows, whose shared prompts are computed once. What is computed again earns nothing.

    Args:
        sizes: of the model.
        rows: in host memory.
        frozen: adapters are in training, which are too small to count.
    """
    windows = [sizes.window(layer) for layer in range(sizes.layers)]
    pairs = sum(windows.count(window) * _pairs(row, window) for window in set(windows) for row in rows)
    tokens, targets = sum(row.input_ids.numel() for row in rows), sum(len(row.kept) for row in rows)
    return sizes.flops(tokens, pairs / sizes.layers, targets, frozen=frozen)


def _pairs(row: Row, window: int | None) -> int:
    """Queries times the keys that they see, in a layer."""
    seen = _up_to(row.starts.diff(), window)
    if row.prefixes is not None:
        queries, keys = row.prefixes.starts.diff(), row.prefixes.copy_starts.diff()
        seen += _up_to(keys, window) - _up_to(keys - queries, window)
    return seen


def _up_to(lengths: torch.Tensor, window: int | None) -> int:
    """Keys that the first tokens of sequences see, all of them together."""
    lengths = lengths.long()
    full = lengths if window is None else lengths.clamp(max=window)
    return int((full * (full + 1) // 2 + (lengths - full) * full).sum())
