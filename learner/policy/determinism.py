"""Deterministic kernels (learner.deterministic), and what the process needs for them.

Of the learner's own code, the Triton kernels and chunked products add nothing up across programs; sums over
trajectories are segment reductions. torch's flag decides about the rest: the backward of flash and memory-efficient
attention, and of indexing. cuBLAS needs a workspace that is not shared, NCCL one algorithm, the compiler no benchmarks.
"""

import logging
import os

import torch

from configs.machine import DETERMINISTIC

log = logging.getLogger(__name__)


def set_deterministic(wanted: bool) -> None:
    """Switch this process, before its first kernel; a rank that was started by hand has no environment yet."""
    if wanted:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = wanted, False
    log.info("deterministic kernels: %s (learner.deterministic)", "on" if wanted else "off")
