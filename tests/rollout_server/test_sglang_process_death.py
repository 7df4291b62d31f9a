"""A scheduler of SGLang that is killed: everybody who waits hears of it. The last of the tests that use it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sglang_host import Host
from sglang_served import Served

from rollout_server.engines.base import EngineError


def test_a_killed_scheduler_is_named_to_everybody_who_waits(sglang: Host) -> None:
    sglang(killed)


async def killed(served: Served) -> None:
    engine = served.engine
    task = served.start_sample([1, 2, 3], 2, max_new_tokens=90)
    await served.under_way(task)
    pid = min(engine.sglang.pids())  # SGLang starts its scheduler first
    assert b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGKILL)
    named = rf"SGLang is dead: .*pid {pid}\) ended with -9.* \[closed\]"
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match=named):
            while True:
                await engine.health()
                await asyncio.sleep(0.05)
    for call in (engine.pause("keep_kv"), served.sample([1, 2, 3]), task):
        with pytest.raises(EngineError, match=named):
            await asyncio.wait_for(call, 30)
