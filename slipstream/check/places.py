"""A role on a node, and the probe that looks at its machine from there, by whatever command leads there."""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.errors import SlipstreamError
from configs.loading import dump
from configs.schema import Config
from slipstream.check.probe import MARK

CLOSE_S = 3.0
LAST_LINES = 20


class ProbeFailed(SlipstreamError, RuntimeError, code="SLIP-DOCTOR-01"):
    """A probe could not be started, did not answer in time, or could not do what it was asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One role on one node."""

    node: str
    role: str
    config: Config
    """With this node's network.host."""
    ports: Mapping[str, int]
    """What its processes listen at, by key; 0 is a free one."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    planned: frozenset[str]
    """Variables that the plan sets, differently for each role if at all."""
    is_here: bool = True
    """Whether the command starts on this machine, and not over ssh or srun."""

    def __str__(self) -> str:
        return f"{self.role} of {self.node}"


@dataclass(slots=True)
class RunningProbe:
    """A probe that runs at a place; used by one thread."""

    place: Place
    process: "subprocess.Popen[str]"
    answers: "queue.Queue[dict[str, Any] | None]" = field(default_factory=queue.Queue)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @classmethod
    def at(cls, place: Place) -> "RunningProbe":
        """Start it and give it the configuration. Raises ProbeFailed."""
        environment = {**os.environ, **place.environment} if place.is_here else dict(os.environ)
        try:
            process = subprocess.Popen(
                place.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ProbeFailed(f"{place.command[0]} cannot be started: {error.strerror}") from error
        asked = cls(place, process)
        threading.Thread(target=asked._read, name=f"doctor-{place.node}-{place.role}", daemon=True).start()
        asked.send("take", config=dump(place.config))
        return asked

    def send(self, what: str, **arguments: Any) -> None:
        """Give an order; `answer` takes its result, in order."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
            self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self.process.stdin.flush()

    def answer(self, limit_s: float) -> Any:
        """The result of the oldest order without one. Raises ProbeFailed."""
        started = time.monotonic()
        try:
            answer = self.answers.get(timeout=limit_s)
        except queue.Empty as error:
            self.process.kill()
            raise ProbeFailed(f"no answer within {time.monotonic() - started:.0f} s [silent]") from error
        if answer is None:
            self.answers.put(None)
            last = next((line for line in reversed(self.last_lines) if line.strip()), "it said nothing")
            raise ProbeFailed(f"its probe ended with exit code {self._code()}: {last}")
        if "error" in answer:
            raise ProbeFailed(str(answer["error"]))
        return answer["found"]

    def ask(self, what: str, limit_s: float, **arguments: Any) -> Any:
        """One order and its result. Raises ProbeFailed."""
        self.send(what, **arguments)
        return self.answer(limit_s)

    def _code(self) -> int:
        return _ended(self.process, time.monotonic() + CLOSE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line.removeprefix(MARK)))
            else:
                self.last_lines.append(line.rstrip())
        self.answers.put(None)


@contextlib.contextmanager
def ended(probes: Sequence[RunningProbe]) -> Iterator[None]:
    """End all of them, whatever happens: their stdin first, then by pid."""
    try:
        yield
    finally:
        for probe in probes:
            assert probe.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                probe.process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        for probe in probes:
            _ended(probe.process, deadline)


def _ended(process: "subprocess.Popen[str]", deadline: float) -> int:
    """Its exit code; killed by its own pid after the deadline (time.monotonic)."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
