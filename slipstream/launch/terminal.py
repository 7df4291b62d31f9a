"""The person at the terminal: a line for them, and signals from them."""

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from configs.errors import coded
from slipstream.runtime.lifeline import LogForm


class Interrupted(Exception):
    """A signal came, or what started this process is gone; the message says which."""

    code = 130
    """Exit code of what it ended."""


class NearLimit(Interrupted):
    """SIGUSR2: a scheduler's notice before the time limit of a job."""

    code = 128 + signal.SIGUSR2


EVENTS_LOG = "launcher.log"
EVENTS = logging.getLogger("slipstream.events")
"""What the launcher shows beside the steps; written to `logs/launcher.log`, not to the terminal a second time."""
EVENTS.propagate = False
EVENTS.addHandler(logging.NullHandler())


def keep_events(run_dir: str | Path) -> None:
    """Write events to `<run_dir>/logs/launcher.log`, in the form of all logs."""
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / EVENTS_LOG)
    handler.setFormatter(LogForm("launcher"))
    EVENTS.handlers[:] = [handler]
    EVENTS.setLevel(logging.INFO)


def say(text: str) -> None:
    """One line on standard error; the code of an error stands at its end."""
    write_line(sys.stderr, f"slipstream: {coded(text, '')}")


def write_line(stream: IO[str], line: str) -> OSError | None:
    """Write one line, if the stream takes it; returns why it takes none any more.

    Its reader may go away and its disk may be full: neither ends a run, so it is silent from then on.
    """
    try:
        encode_anything(stream)
        stream.write(line + "\n")
        stream.flush()
    except OSError as error:
        silence(stream)
        return error
    return None


def encode_anything(stream: IO[str]) -> None:
    """Have `?` in place of a character that the stream's encoding, such as Latin-1, does not have."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


def silence(stream: IO[str]) -> None:
    """Let what is written from now on go nowhere, and what it still holds: Python flushes it at exit."""
    with contextlib.suppress(OSError):  # a stream without a descriptor
        descriptor, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def catch_signals() -> None:
    """Have Ctrl-C, SIGTERM, SIGUSR2 and the end of the session raise Interrupted in the main thread."""
    _handle_signals(_interrupt)


def ignore_signals() -> None:
    """Ignore them from now on: what was started is being ended, in order."""
    _handle_signals(_pass_over)


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it for good
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if not isinstance(sys.exc_info()[1], Interrupted):  # a session that ends may send several: one is on its way
        if number == signal.SIGUSR2:
            raise NearLimit("SIGUSR2 received: the time limit is near")
        raise Interrupted(f"{signal.Signals(number).name} received")


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """Unlike SIG_IGN this is not inherited: what is started from here has its signals as usual."""
