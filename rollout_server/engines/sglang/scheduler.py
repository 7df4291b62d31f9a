"""What SGLang's scheduler processes start with on a GPU."""

import os
from typing import Any


def engine_class() -> Any:
    """SGLang's engine, whose schedulers start by `run_scheduler`."""
    from sglang.srt.entrypoints.engine import Engine

    return type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})


def run_scheduler(*arguments: Any, **options: Any) -> Any:
    """Run a scheduler that loads its CUDA kernels when it starts, not at their first launch.

    Loading a kernel waits for all that runs on the device. While a broadcast hung in the same process, the next
    prefill waited for it until the collective timeout, and the first update of a process took 6 to 7 s instead of
    0.04 s (one H200, SGLang 0.5.15, which sets the variable to lazy loading in its parent process).
    """
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*arguments, **options)
