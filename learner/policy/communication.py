"""How long FSDP's collectives take: gathers of parameters, reductions of gradients. They stay as they are.

On a GPU two events enclose each collective on the stream that waits for it, and are read when the step is over; most
collectives run beside the computation, so their time is no loss by itself. On a CPU a collective blocks.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


class Communication:
    """Seconds in collectives of the units that it was put into."""

    def __init__(self, units: Iterable[FSDPModule], device: torch.device) -> None:
        """Measure all units that are given; without any it measures nothing."""
        self._cuda, self._is_read = device.type == "cuda", False
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        gather, reduce = _timed(DefaultAllGather, self), _timed(DefaultReduceScatter, self)
        for unit in units:
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)

    def take(self) -> float:
        """Seconds since the last call, 0 at the first, which begins the measuring. Waits for what runs on a GPU."""
        self._is_read = True
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def timed(self, collective: Any, *arguments: Any, **options: Any) -> Any:
        """What the collective returns."""
        if not self._is_read:
            return collective(*arguments, **options)
        if not self._cuda:
            started = time.perf_counter()
            found = collective(*arguments, **options)
            self._seconds += time.perf_counter() - started
            return found
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        found = collective(*arguments, **options)
        end.record()
        self._events.append((begin, end))
        return found


def _timed(kind: type[Any], communication: Communication) -> Any:
    """A collective of FSDP that `communication` measures."""

    class Timed(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return communication.timed(super().__call__, *arguments, **options)

    return Timed()
