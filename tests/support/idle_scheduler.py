"""A scheduler of SGLang that has no requests, as far as updates look at it."""

from types import SimpleNamespace
from typing import Any


class Alone:
    """The group of an engine with one rank."""

    def size(self) -> int:
        return 1


def idle_scheduler(group: Any = None) -> Any:
    """One of an engine whose ranks are in this group; alone by default."""
    batch = SimpleNamespace(reqs=[])
    return SimpleNamespace(
        _engine_paused=False,
        running_batch=batch,
        last_batch=None,
        waiting_queue=[],
        chunked_req=None,
        tp_cpu_group=group or Alone(),
    )
