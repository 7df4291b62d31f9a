"""Stands in for the plugin torch_ucc: registers a gloo group under the name ucc. It proves routing and nothing else.

UCC_STUB_FAULT names a file: what stands in it, such as abort@1 or stop@1, hits the process of that rank when its group
is built.
"""

import os
import signal
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
    action, _, hit = Path(faults).read_text(encoding="ascii").partition("@") if faults else ("", "", "")
    if hit == str(rank):
        os.kill(os.getpid(), {"abort": signal.SIGABRT, "stop": signal.SIGSTOP}[action])
    return group


Backend.register_backend("ucc", build, devices=["cpu"])
