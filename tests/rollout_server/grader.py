"""A reward file as a user might write it, with every way to misbehave; the reward processes of the tests load it."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

HELD: list[Any] = []
UNDER_WAY: list[int] = []


def grade(sample: dict[str, Any]) -> float | dict[str, float]:
    """The completion says what to do: a word of BEHAVIOUR and, for some, an argument."""
    word, _, argument = sample["completion"].partition(" ")
    return BEHAVIOUR[word](argument)


async def later(sample: dict[str, Any]) -> float | dict[str, float]:
    loop = asyncio.get_running_loop()
    assert not HELD or HELD[0] is loop
    HELD[:1] = [loop]
    word, _, argument = sample["completion"].partition(" ")
    if word in ("ok", "wait"):
        UNDER_WAY.append(1)
        await asyncio.sleep(float(argument or 0.1))
        most = len(UNDER_WAY)
        await asyncio.sleep(0)  # all whose time has come have counted
        UNDER_WAY.pop()
        return {"score": 1.0, "at_once": float(most)}
    return grade(sample)


def trl(completions: list[str], **columns: list[Any]) -> list[float]:
    if "exit" in completions:
        os._exit(3)
    return [len(completions) + 0.5 for _ in completions]


def sleep(seconds: str = "600") -> float:
    time.sleep(float(seconds))
    return 1.0


def spread(seconds: str) -> dict[str, float]:
    return {"score": sleep(seconds), "pid": os.getpid()}


def noted(argument: str) -> float:
    """One line of a file for each answer that is judged."""
    note, seconds = argument.split()
    note_down(note, "judged\n")
    return sleep(seconds)


def segfault(_: str) -> float:
    print("about to fall", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return sleep()


def speak(_: str) -> float:
    print("hello from the grader")
    sys.stdout.write("{}")
    return 1.0


def framed(value: Any) -> bytes:
    body = msgpack.packb(value)
    return struct.pack("<I", len(body)) + body


PAYLOADS = {
    "garbage": b"x" * 64,
    "huge": b"\xff" * 4 + b"\0" * 4096,
    "forged": framed([999, [[1.0, {}, None, 0.1]]]),
    "twice": framed([0, [[1.0, {}, None, 0.1]] * 2]),
    "nan": framed([0, [[float("nan"), {}, None, 0.1]]]),
}


def write(what: str) -> float:
    _to_all_files(3, PAYLOADS[what])
    return sleep()


def replies(_: str) -> float:
    """Verdicts without end, for a sample that needs one."""
    while True:
        _to_all_files(3, PAYLOADS["nan"] * 1000)


def _to_all_files(first: int, payload: bytes) -> None:
    for fd in range(first, 20):
        with contextlib.suppress(OSError):
            os.write(fd, payload)


def close(_: str) -> float:
    os.closerange(3, 20)
    return sleep()


class Evil(Exception):
    def __str__(self) -> str:
        raise SystemExit("never")

    __repr__ = __str__


class Endless(Exception):
    """Takes for ever to say what it is."""

    def __str__(self) -> str:
        while True:
            pass


class Number(float):
    def __float__(self) -> float:
        raise KeyError("no number")

    def __str__(self) -> str:
        raise Evil


def throw(what: str) -> float:
    kinds: dict[str, Callable[[], BaseException]] = {
        "evil": Evil,
        "endless": Endless,
        "surrogate": lambda: ValueError("\ud800" * 5),
        "long": lambda: ValueError("x" * 10**7),
    }
    raise kinds[what]()


def give(what: str) -> Any:
    return Number(1.0) if what == "number" else {"score": 1.0, "\ud800": 2.0}


def recurse(depth: str) -> float:
    return recurse(depth) + 1


def hoard(_: str) -> float:
    """Small pieces that stay, until not even the exception's own text finds a place."""
    while True:
        HELD.append(bytes(1000))
        HELD.append([None])


def open_many(num: str) -> float:
    HELD.extend(open(os.devnull, "rb") for _ in range(int(num)))  # noqa: SIM115
    return float(num)


def write_file(num_bytes: str) -> float:
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * int(num_bytes))
    return float(num_bytes)


def abort(words: str) -> float:
    """As native code does that finds no memory."""
    os.write(2, f"terminate called after throwing an instance of '{words}'\n".encode())
    os.abort()


def state(_: str) -> dict[str, float]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    limits = {
        name.lower(): float(max(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))))
        for name in ("AS", "FSIZE", "NOFILE", "CORE")
    }
    secrets = [name for name in os.environ if name.startswith("SECRET") or name.endswith(("_KEY", "_TOKEN"))]
    return {
        "score": 1.0,
        "no_new_privs": float(status["NoNewPrivs"]),
        "secrets": float(len(secrets)),
        "plain": float(os.environ.get("PLAIN_SETTING") == "kept"),
        "leads_session": float(os.getsid(0) == os.getpid() == os.getpgid(0)),
        "heavy_imports": float(len({"torch", "pydantic"} & set(sys.modules))),
    } | limits


def note_down(note: str, text: str) -> None:
    with open(note, "a") as file:
        file.write(text)


def daemon(note: str) -> float:
    """One leaves session, group and parent, and lives on."""
    if os.fork():
        os.wait()
        deadline = time.monotonic() + 10
        while not (Path(note).exists() and Path(note).read_text().endswith("\n")) and time.monotonic() < deadline:
            time.sleep(0.005)
        return 1.0
    os.setsid()
    if os.fork() == 0:
        note_down(note, f"{os.getpid()}\n")
        sleep()
    os._exit(0)


def daemon_then_die(note: str) -> float:
    daemon(note)
    os._exit(9)


def bomb(note: str) -> float:
    """Doubles six times, each process in a session of its own with its parent gone."""
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
    note_down(note, f"{os.getpid()}\n")
    return sleep()


def comet(note: str) -> float:
    """A process that is never the same: each lives as long as it takes to start the next one; this one dies."""
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            note_down(note, ".")
        os._exit(0)
    while not Path(note).exists() or Path(note).stat().st_size < 5:
        time.sleep(0.005)
    os._exit(9)


BEHAVIOUR: dict[str, Callable[[str], Any]] = {
    "score": lambda value: {"score": float(value), "pid": os.getpid()},
    "sleep": sleep,
    "spread": spread,
    "noted": noted,
    "hang": lambda _: sleep(),
    # catastrophic backtracking, in C and with the interpreter's lock held, as the policy's answer may cause it
    "hold": lambda _: float(bool(re.match("(a+)+$", "a" * 64 + "b"))),
    "segfault": segfault,
    "exit": lambda _: os._exit(3),
    "print": speak,
    "write": write,
    "replies": replies,
    "closed": close,
    "throw": throw,
    "give": give,
    "recurse": recurse,
    "allocate": lambda num_bytes: float(len(bytearray(int(num_bytes)))),
    "hoard": hoard,
    "open": open_many,
    "file": write_file,
    "abort": abort,
    "state": state,
    "daemon": daemon,
    "daemon_then_die": daemon_then_die,
    "bomb": bomb,
    "comet": comet,
}
