"""A process of its own for the SGLang of a test session; tests run in it.

Its own, because what SGLang needs on a CPU changes a process (stand-ins on `sys.path`, before transformers comes in);
one for all tests, because it takes a quarter of a minute to start.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.runtime.lifeline import die_with_parent

if TYPE_CHECKING:
    from tests.rollout_server.sglang_served import Served

DEADLINE_S = 380.0


class Host:
    """Runs `async def test(served, ...)` of a test module beside the engine; what it raises comes back."""

    def __init__(self, folder: Path) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(os.getpid(), folder)
        )

    def __call__(self, test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, object]) -> None:
        """Run a test; the engine is started where none runs."""
        self._pool.submit(_run, test, arguments).result(DEADLINE_S)

    def close(self) -> None:
        """End the engine and its process."""
        self._pool.submit(_close).result(DEADLINE_S)
        self._pool.shutdown()


# ---- in the process ---------------------------------------------------------------------------------------

_folder: Path


def _prepare(parent: int, folder: Path) -> None:
    global _folder
    import torch

    from rollout_server.engines.sglang.cpu import prepare_cpu

    die_with_parent(parent)
    os.environ.pop("OMP_NUM_THREADS", None)  # the engine sees to it for its schedulers
    prepare_cpu()
    # should nobody close the host: its exit would wait for the processes of SGLang, which do not end by themselves
    Finalize(None, _kill_children, exitpriority=100)
    torch.set_num_threads(1)
    _folder = folder


@functools.cache
def _served() -> "Served":
    from tests.rollout_server.sglang_served import Served  # brings transformers

    return Served(_folder)


def _run(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, object]) -> None:
    served = _served()
    served.start()
    try:
        served.run(test(served, **arguments))
    except pytest.fail.Exception as failed:  # pytest's own class does not go through pickle
        raise AssertionError(str(failed)) from failed


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _close() -> None:
    _served().close()
