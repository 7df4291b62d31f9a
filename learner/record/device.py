"""What the GPU of this rank does, for its watch."""

import os
from collections.abc import Mapping

import torch

from slipstream.runtime.vitals import device


def readings() -> Mapping[str, float]:
    """Memory that torch has allocated on it, and its utilization; nothing on a CPU."""
    return device.readings(torch.cuda, [int(os.environ.get("LOCAL_RANK", "0"))], torch.cuda.memory_allocated)
