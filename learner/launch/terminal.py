"""The person at the terminal: a line for them, and signals from them."""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from configs.errors import coded
from replay.lifeline import LogForm


class Interrupted(Exception):
    """A signal came, or what started this process is gone; the message says which."""


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
    sys.stderr.write(f"slipstream: {coded(text, '')}\n")
    sys.stderr.flush()


def catch_signals(*more: signal.Signals) -> None:
    """Have SIGINT, SIGTERM and `more` raise Interrupted in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM, *more):
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignore them from now on: what was started is being ended, in order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(f"{signal.Signals(number).name} received")
