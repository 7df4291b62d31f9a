"""Runs in the sandbox as its first process: the answer once for each test, in a child that sees nothing of the others.

The order is JSON on stdin; for each test a line of JSON comes back: [how, exit code, what it printed]. What is expected
never enters the sandbox, so a program that gets at this process gains nothing by it.

This file is copied into the sandbox: standard library alone, and little of it, because each program waits for it.
"""

import json
import math
import os
import resource
import select
import signal
import sys
import time
import types
from collections import Counter, deque
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

POLL_MS = 20
MAX_PLAIN_INT = 2**53
MAX_NUMBER_CHARS = 3_500
"""Of a number's text, hexadecimal of an int: its `repr` keeps below Python's 4,300 digits."""
SHARED = "answer.py"


def main() -> None:
    """Run every test; a child returns from here as the answer, and ends as Python ends."""
    order = json.load(sys.stdin.buffer)
    with open(SHARED, encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    top, used_s, start = os.getcwd(), 0.0, time.monotonic()
    for number, test in enumerate(order["tests"]):
        os.mkdir(f"{top}/{number}")
        os.chdir(f"{top}/{number}")
        given, printed = _file(test["stdin"]), _file("")
        child = os.fork()
        if child == 0:
            _become_the_answer(test, source, given, printed, order["cpu_s"])
            return
        how, code, cpu_s = _watched(child, printed, order, start + order["wall_s"])
        out = os.pread(printed, order["output_bytes"], 0).decode("utf-8", "replace")
        for fd in (given, printed):
            os.close(fd)
        os.write(1, f"{json.dumps([how, code, out])}\n".encode())
        used_s += cpu_s
        if used_s > order["total_s"] or (not order["partial"] and (how, code) != ("ended", 0)):
            return


def _file(text: str) -> int:
    """An open file without a name."""
    fd = os.open("stream", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink("stream")
    left = memoryview(text.encode("utf-8", "surrogateescape"))
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _watched(child: int, printed: int, order: dict[str, Any], deadline: float) -> tuple[str, int, float]:
    """(how, exit code or negative signal, CPU seconds) of a test; nothing that it has started is left."""
    how, ending = "ended", select.poll()
    ended = os.pidfd_open(child)
    ending.register(ended, select.POLLIN)
    while not ending.poll(POLL_MS):
        if os.fstat(printed).st_size > order["output_bytes"]:
            how = "flooded"
        elif time.monotonic() > deadline:
            how = "timed_out"
        else:
            continue
        os.kill(child, signal.SIGKILL)
        break
    _, status, used = os.wait4(child, 0)
    os.close(ended)
    _end_all(child)
    cpu_s = used.ru_utime + used.ru_stime
    if how == "ended" and (os.WIFSIGNALED(status) and cpu_s >= order["cpu_s"]):
        how = "timed_out"
    if how == "ended" and os.fstat(printed).st_size > order["output_bytes"]:
        how = "flooded"
    return how, os.waitstatus_to_exitcode(status), cpu_s


def _end_all(child: int) -> None:
    """Where this is the first process of a namespace, all others in it are the test's."""
    is_first = os.getpid() == 1
    try:
        if is_first:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        while is_first:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _become_the_answer(test: dict[str, Any], source: str, given: int, printed: int, cpu_s: float) -> None:
    os.setsid()
    seconds, most = math.ceil(cpu_s), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, most), min(seconds + 1, most)))
    for fd, place in ((given, 0), (printed, 1)):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - the program's own
    if "expressions" in test:
        _compute(test, source)
    else:
        exec(compile(source, SHARED, "exec"), _module("__main__"))


def _module(name: str) -> dict[str, Any]:
    module = sys.modules[name] = types.ModuleType(name)
    return module.__dict__


def _compute(test: dict[str, Any], source: str) -> None:
    """Values of expressions with the answer's names, each a line: [kind, value]."""
    results = os.fdopen(os.dup(1), "w")
    sys.modules["__main__"].results = results  # type: ignore[attr-defined]
    os.dup2(2, 1)
    names, entry_point = _module("answer"), test["entry_point"]
    exec("from typing import Dict, List, Optional, Set, Tuple", names)  # LiveCodeBench's starter code does without
    exec(compile(source, SHARED, "exec"), names)
    if entry_point.isidentifier() and entry_point not in names and "Solution" in names:
        names[entry_point] = getattr(names["Solution"](), entry_point)
    exec(compile(test["setup"], "tests.py", "exec"), names)
    for expression in test["expressions"]:
        results.write(f"{_computed(expression, names)}\n")
        results.flush()
    if test["whole"]:
        names["__name__"] = "__main__"
        exec(compile(test["whole"], "tests.py", "exec"), names)
        results.write(json.dumps(["word", sys.stdin.readline().strip()]) + "\n")
    results.close()


def _computed(expression: str, names: dict[str, Any]) -> str:
    try:
        value = eval(expression, names)
    except Exception as error:  # noqa: BLE001 - the answer's: whatever it raises is no value
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return '["raised", null]'
    try:
        return json.dumps(["value", encoded(value)])
    except Exception as error:  # noqa: BLE001 - reading a value runs code of the answer
        sys.stderr.write(f"{type(value).__name__} has no encoding: {error}\n")
        return '["not_encoded", null]'


def encoded(value: Any) -> Any:
    """A value as JSON that says of which built-in type it is, whatever class of the answer it has.

    Example: Counter("aa") is ["Counter", [["a", 2]]]. Raises TypeError: it is none that equals a literal, or too long.
    """
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return _plain(value)
    for name, base in LISTS.items():
        if isinstance(value, base):
            return [name, [encoded(one) for one in value]]
    for name, base in PAIRS.items():
        if isinstance(value, base):
            return [name, [[encoded(key), encoded(one)] for key, one in getattr(value, "items", lambda: value)()]]
    match value:
        case complex():
            return ["complex", [value.real, value.imag]]
        case bytes() | bytearray():
            return ["bytes", value.hex()]
        case range():
            return ["range", [value.start, value.stop, value.step]]
    if kind.__module__ in ("fractions", "decimal"):
        return [kind.__name__, _short(str(value))]
    raise TypeError(kind.__name__)


LISTS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "keys": KeysView,
    "values": ValuesView,
}
PAIRS: dict[str, Any] = {"Counter": Counter, "dict": dict, "items": ItemsView}


def _plain(value: Any) -> Any:
    """What JSON has, without the class of the answer that it may be of."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = int.__index__(value)
        return value if abs(value) < MAX_PLAIN_INT else ["int", _short(hex(value))]
    return str.__str__(value) if isinstance(value, str) else value


def _short(text: str) -> str:
    """Text of a number, as it is. Raises TypeError: too long."""
    if len(text) > MAX_NUMBER_CHARS:
        raise TypeError("a number is too long")
    return text


if __name__ == "__main__":
    main()
