"""A reward file as a user might write it, with every way to misbehave; the reward processes of the tests load it."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
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


def framed(value: Any) -> bytes:
    body = msgpack.packb(value)
    return struct.pack("<I", len(body)) + body


def verdict(score: Any = 1.0, metrics: Any = None, error: Any = None, seconds: Any = 0.1) -> bytes:
    return framed([[0, score, metrics or {}, error, seconds]])


def announcing(head: bytes) -> bytes:
    """Levels that each announce more than there is."""
    body = head * 1000
    return struct.pack("<I", len(body)) + body


PAYLOADS: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"x" * 64,
    "huge": lambda: struct.pack("<I", 2**31),
    "hugest": lambda: b"\xff" * 4 + b"\0" * 4096,
    "forged": lambda: framed([[999, 1.0, {}, None, 0.1]]),
    "twice": lambda: framed([[0, 1.0, {}, None, 0.1]] * 2),
    "nested": lambda: announcing(b"\x91")[:-1] + b"\xc0",
    "deeper": lambda: struct.pack("<I", 100_001) + b"\x91" * 100_000 + b"\xc0",
    "wide": lambda: announcing(b"\xdd\x00\x00\x04\x01"),
    "widest": lambda: struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    "nan": lambda: verdict(float("nan")),
    "inf": lambda: verdict(float("inf")),
    "integer": lambda: verdict(2**63),
    "true": lambda: verdict(True),
    "text": lambda: verdict("1.0"),
    "neither": lambda: verdict(None),
    "both": lambda: verdict(1.0, error="and why not"),
    "metrics": lambda: verdict(1.0, {"a": [1.0]}),
    "names": lambda: verdict(1.0, {7: 1.0}),
    "many": lambda: verdict(1.0, {str(i): 1.0 for i in range(65)}),
    "backwards": lambda: verdict(1.0, seconds=-1.0),
    "map": lambda: framed({"verdicts": [[0, 1.0, {}, None, 0.1]]}),
    "extension": lambda: framed([[0, msgpack.ExtType(5, b"xx"), {}, None, 0.1]]),
    "long": lambda: framed([[0, None, {}, "x" * 500_000, 0.1]]),
}


def write(what: str) -> float:
    _to_all_files(3, PAYLOADS[what]())
    return sleep("600")


def replies(_: str) -> float:
    """Verdicts without end, for a sample that needs one."""
    while True:
        _to_all_files(3, verdict(float("nan")) * 1000)


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


class Evil(Exception):
    """Its own text and form are code."""

    def __str__(self) -> str:
        raise SystemExit("never")

    __repr__ = __str__


class Endless(Exception):
    """Takes for ever to say what it is."""

    def __str__(self) -> str:
        return spin("")  # type: ignore[return-value]


class Hydra(Exception):
    """Fails where its causes are looked up."""

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise self


class Number(float):
    """A score that is code."""

    def __float__(self) -> float:
        raise KeyError("no number")

    def __str__(self) -> str:
        raise Evil


def throw(what: str) -> float:
    kinds: dict[str, Callable[[], BaseException]] = {
        "evil": Evil,
        "endless": Endless,
        "hydra": Hydra,
        "interrupt": KeyboardInterrupt,
        "generator": GeneratorExit,
        "surrogate": lambda: ValueError("\ud800" * 5),
        "long": lambda: ValueError("x" * 10**7),
    }
    raise kinds[what]()


def give(what: str) -> Any:
    values: dict[str, Callable[[], Any]] = {
        "number": lambda: Number(1.0),
        "object": Evil,
        "integer": lambda: 10**5000,
        "names": lambda: {"score": 1.0, "\ud800": 2.0},
        "bytes": lambda: b"1.0",
    }
    return values[what]()


def recurse(depth: str) -> float:
    return recurse(depth) + 1


HELD: list[Any] = []


def allocate(num_bytes: str) -> float:
    return float(len(bytearray(int(num_bytes))))


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
    } | limits


def escape(note: str) -> None:
    """Leave session, group and parent, and live on."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(note, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)
    os._exit(0)


def daemon(note: str) -> float:
    escape(note)
    deadline = time.monotonic() + 10
    while not (Path(note).exists() and Path(note).read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.005)
    return 1.0


def daemon_then_die(note: str) -> float:
    daemon(note)
    os._exit(9)


def bomb(note: str) -> float:
    """Doubles six times, each process in a session of its own with its parent gone, and notes who there is."""
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
    with open(note, "a") as file:
        file.write(f"{os.getpid()}\n")
    return sleep("600")


def comet(note: str) -> float:
    """A process that is never the same: each lives as long as it takes to start the next one."""
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            with open(note, "a") as file:
                file.write(".")
        os._exit(0)
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
    "replies": replies,
    "throw": throw,
    "give": give,
    "recurse": recurse,
    "allocate": allocate,
    "hoard": hoard,
    "open": open_many,
    "file": write_file,
    "abort": abort,
    "state": state,
    "daemon": daemon,
    "daemon_then_die": daemon_then_die,
    "bomb": bomb,
    "comet": comet,
    "match": lambda answer: float(bool(re.match("(a+)+$", answer))),
}


async def later(sample: dict[str, Any]) -> float:
    KEPT.setdefault("loop", asyncio.get_running_loop())
    assert KEPT["loop"] is asyncio.get_running_loop()
    if sample["completion"] == "block":
        sleep("600")
    if sample["completion"].startswith(("allocate", "open", "throw")):
        return grade(sample)  # type: ignore[return-value]
    await asyncio.sleep(600 if sample["completion"] == "hang" else 0.1)
    return 1.0


def trl(completions: list[str], **columns: list[Any]) -> list[float]:
    if "exit" in completions:
        os._exit(3)
    return [len(completions) + 0.5 for _ in completions]


def imports(sample: dict[str, Any]) -> dict[str, float]:
    return {"score": 1.0, "torch": float("torch" in sys.modules), "pydantic": float("pydantic" in sys.modules)}
