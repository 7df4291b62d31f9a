"""Stands in for the plugin torch_ucc: registers a gloo group under the name ucc. It proves routing and nothing else.

UCC_STUB_FAULT names a file: abort@1 in it ends the process of that rank when its group is built.
"""

import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import Backend, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

__version__ = "ucc-stub(gloo)"


def build(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    group = ProcessGroupGloo(store, rank, size, options)
    faults = os.environ.get("UCC_STUB_FAULT")
    if faults and Path(faults).read_text(encoding="ascii") == f"abort@{rank}":
        os.abort()
    return group


Backend.register_backend("ucc", build, devices=["cpu"])
