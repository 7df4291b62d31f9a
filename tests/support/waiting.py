"""Waits for a condition, until a deadline that a busy machine meets as well."""

import asyncio
import time
from collections.abc import Callable

PATIENT_S = 120.0
LOOK_S = 0.01


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(LOOK_S)


async def eventually(condition: Callable[[], object], what: str, timeout_s: float = PATIENT_S) -> None:
    """The same beside an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(LOOK_S / 10)
