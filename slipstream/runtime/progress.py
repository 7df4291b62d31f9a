"""Where a long operation stands: a line of the log every EVERY_S while it lasts, none for one that is quick.

    with Progress("loading weights", total=16.1, unit="GiB") as progress:
        progress.add(0.06)

logs `progress: loading weights: 3.2 of 16.1 GiB (20 %), 40 s so far, about 160 s left`. A thread writes the lines, so
that an operation which is one blocking call has them too: `progress: starting SGLang: 40 s so far`. The launcher shows
those of replay, of its machine's first learner rank and first rollout server.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

log = logging.getLogger(__name__)

EVERY_S = 10.0


class Progress(AbstractContextManager["Progress"]):
    """One operation; `add` may be called from any one thread."""

    def __init__(
        self,
        what: str,
        *,
        total: float | None = None,
        unit: str = "",
        measure: Callable[[], float] | None = None,
        say: Callable[[str], None] | None = None,
        every_s: float | None = None,
    ) -> None:
        """Args: total: of `unit`, where it is known; measure: how much is done, in place of `add`; say: gets each line
        in place of the log."""
        self._what, self._total, self._unit, self._every_s = what, total, unit, every_s or EVERY_S
        self._measure = measure
        self._say = say or (lambda text: log.info("%s", text))
        self._done, self._lines = 0.0, 0
        self._started = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def add(self, amount: float) -> None:
        """So much more is done."""
        self._done += amount

    def text(self, now: float) -> str:
        """The line of this moment, in monotonic seconds."""
        took = now - self._started
        if self._total is None or not self._total > 0:
            return f"progress: {self._what}: {took:.0f} s so far"
        done = self._done if self._measure is None else self._measure()
        share = min(1.0, done / self._total)
        amount = f"{done:.4g} of {self._total:.4g}{f' {self._unit}' if self._unit else ''} ({share:.0%})"
        left = f", about {took / share - took:.0f} s left" if share > 0 else ""
        return f"progress: {self._what}: {amount}, {took:.0f} s so far{left}"

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()  # a line that it has begun comes before the last one
        if self._lines:
            how = "done" if kind is None else "broke off"
            self._say(f"progress: {self._what}: {how} after {time.monotonic() - self._started:.0f} s")

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._lines += 1
            self._say(self.text(time.monotonic()))
