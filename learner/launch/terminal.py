"""The person at the terminal: a line for them, and signals from them."""

import signal
import sys
from types import FrameType


class Interrupted(Exception):
    """A signal came, or what started this process is gone; the message says which."""


def say(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"slipstream: {text}\n")
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
