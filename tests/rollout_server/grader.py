"""A reward file as a user might write it, with every way to misbehave; the reward processes of the tests load it."""

import asyncio
import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

KEPT: dict[str, asyncio.AbstractEventLoop] = {}


def grade(sample: dict[str, Any]) -> float | dict[str, float]:
    """The completion says what to do: a word of BEHAVIOUR and, for some, an argument."""
    word, _, argument = sample["completion"].partition(" ")
    return BEHAVIOUR[word](argument)


def score(argument: str) -> dict[str, float]:
    return {"score": float(argument), "pid": os.getpid()}


def sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


def spin(_: str) -> float:
    while True:
        pass


def hold(_: str) -> float:
    """In C for ever, with the interpreter's lock held."""
    return float(bool(re.match("(a+)+$", "a" * 64 + "b")))


def segfault(_: str) -> float:
    print("about to fall", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return sleep("600")


def refuse(_: str) -> float:
    raise ValueError("bad level")


def speak(_: str) -> float:
    print("hello from the grader")
    sys.stdout.write("{}")
    return 1.0


def write(what: str) -> float:
    forged = msgpack.packb([[999, 1.0, {}, None, 0.1]])
    payloads = {
        "garbage": b"x" * 64,
        "huge": struct.pack("<I", 2**31),
        "forged": struct.pack("<I", len(forged)) + forged,
    }
    _to_all_files(3, payloads[what])
    return sleep("600")


def flood(_: str) -> float:
    while True:
        _to_all_files(1, b"\n" * 65536)


def _to_all_files(first: int, payload: bytes) -> None:
    for fd in range(first, 20):
        with contextlib.suppress(OSError):
            os.write(fd, payload)


def close(_: str) -> float:
    os.closerange(3, 20)
    return sleep("600")


def spawn(note: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(note).write_text(str(child.pid))
    return sleep("600")


BEHAVIOUR: dict[str, Callable[[str], Any]] = {
    "score": score,
    "sleep": sleep,
    "hang": lambda _: sleep("600"),
    "spin": spin,
    "hold": hold,
    "segfault": segfault,
    "exit": lambda _: os._exit(3),
    "raise": refuse,
    "nan": lambda _: float("nan"),
    "print": speak,
    "write": write,
    "flood": flood,
    "closed": close,
    "spawn": spawn,
}


async def later(sample: dict[str, Any]) -> float:
    KEPT.setdefault("loop", asyncio.get_running_loop())
    assert KEPT["loop"] is asyncio.get_running_loop()
    if sample["completion"] == "block":
        sleep("600")
    await asyncio.sleep(600 if sample["completion"] == "hang" else 0.1)
    return 1.0


def trl(completions: list[str], **columns: list[Any]) -> list[float]:
    if "exit" in completions:
        os._exit(3)
    return [len(completions) + 0.5 for _ in completions]


def imports(sample: dict[str, Any]) -> dict[str, float]:
    return {"score": 1.0, "torch": float("torch" in sys.modules), "pydantic": float("pydantic" in sys.modules)}
