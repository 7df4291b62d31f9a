"""The processes of UCC as the transport (collective.py) sees them: the starter, the process of a group, their memory.

A process that does not answer in time, or hangs up, is killed and reaped. The messages: process.py.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgpack
import torch

from weight_bus.errors import TransportError
from weight_bus.transports.meeting import lost

log = logging.getLogger(__name__)

MODULE = "weight_bus.transports.ucc.process"
HOPELESS_S = 60.0  # a starter that has not imported torch after so long is given up
REAP_S = 3.0  # for the kernel to end or to fork a process
MAX_ANSWER_BYTES = 64 * 1024


class SharedBytes:
    """Memory without a name, freed when all its processes have ended; made new, or by another one's descriptor."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("slipstream-ucc") if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> torch.Tensor:
        """The first bytes, flat uint8. Grows to them. Raises OSError: there is not so much memory."""
        if num_bytes > self._bytes.numel():
            os.posix_fallocate(self.fd, 0, num_bytes)  # an error here, where a page that is missing later is a SIGBUS
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, num_bytes), dtype=torch.uint8)
        return self._bytes[:num_bytes]

    def close(self) -> None:
        """Give it back, when the last tensor of it is gone."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class Starter:
    """The process that forks those of the groups, one at a time. Dies with the thread that has made this."""

    def __init__(self, memory: SharedBytes, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            numbers = (os.getpid(), theirs.fileno(), memory.fd)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # UCX logs there
                env=environment,
                pass_fds=numbers[1:],
                start_new_session=True,  # an interrupt is for its parent, with which it ends
            )
        self.pid = self._process.pid
        self._name = f"the process that starts those of UCC (pid {self.pid})"
        self._started = time.monotonic()
        self._ready = self._killed = False

    @property
    def ended(self) -> bool:
        """Whether it is dead, or given up."""
        return self._killed or self._process.poll() is not None

    def await_ready(self, limit_s: float) -> None:
        """Wait until it has imported torch; a late one goes on, unless hopeless. Raises TransportError: not ready."""
        if self._ready:
            return
        try:
            answer = _exchange(self._channel, None, limit_s)
        except TimeoutError as error:
            age = time.monotonic() - self._started
            if age >= HOPELESS_S:
                self.kill()
            raise TransportError(f"{self._name} is not ready after {age:.1f} s", "silent") from error
        if answer is None:
            self.kill()
            raise TransportError(f"{self._name} {_ending(self._process.returncode)}", "closed")
        self._ready = True

    def fork(self, limit_s: float) -> "UccProcess":
        """A process for a group. Raises TransportError: there is none, and this one is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            answer = self._command("fork", limit_s, theirs.fileno())
        if answer is None:
            ours.close()
            raise TransportError(f"{self._name} is gone", "closed")
        return UccProcess(self, ours, int(answer["pid"]))

    def end(self) -> int | None:
        """Kill the process of the group and reap it; its exit code. None if it had to go with this one."""
        answer = self._command("end", REAP_S)
        return None if answer is None else int(answer["code"])

    def kill(self) -> None:
        """End it, and with it the process of its group; whatever they do."""
        self._killed = True
        self._process.kill()  # one that was reaped already gets no signal
        self._channel.close()
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:  # deep in the kernel, for example in a driver
            log.error("weight bus: UCC's process (pid %d) does not end %g s after SIGKILL", self.pid, REAP_S)

    def _command(self, what: str, limit_s: float, *fds: int) -> dict[str, Any] | None:
        """Its answer, or None when it has none; then it is gone."""
        answer = None
        if not self._killed:
            with suppress(TimeoutError):
                answer = _exchange(self._channel, {"do": what}, limit_s, *fds)
        if answer is None:
            self.kill()
        return answer


class UccProcess:
    """The process of one group, seen from the transport."""

    def __init__(self, starter: Starter, channel: socket.socket, pid: int) -> None:
        self._starter, self._channel, self.pid = starter, channel, pid
        self._killed = False

    def ask(self, limit_s: float, **order: Any) -> None:
        """Have one order carried out. Raises TransportError: it was not, and the process is gone."""
        try:
            answer = _exchange(self._channel, order, limit_s)
        except TimeoutError as error:
            self.kill()
            silence = f"the UCC process (pid {self.pid}) did not answer in {limit_s:.1f} s and was killed"
            raise TransportError(silence, "silent") from error
        if answer is None:
            raise TransportError(f"the UCC process (pid {self.pid}) {_ending(self.kill())}", "closed")
        if "failed" in answer:
            self.kill()
            text, symptom = str(answer["failed"]), str(answer["symptom"])
            raise TransportError(text, symptom) if symptom else lost(RuntimeError(text))

    def kill(self) -> int | None:
        """End it, whatever it does, and reap it; see `Starter.end`. Has no effect a second time."""
        if self._killed:
            return None
        self._killed = True
        self._channel.close()
        return self._starter.end()


def _exchange(
    channel: socket.socket, order: Mapping[str, Any] | None, limit_s: float, *fds: int
) -> dict[str, Any] | None:
    """Send an order, if there is one, and wait for the answer, None if the other end hung up. Raises TimeoutError."""
    channel.settimeout(limit_s)
    try:
        if order is not None:
            socket.send_fds(channel, [msgpack.packb(order)], fds)
        body = channel.recv(MAX_ANSWER_BYTES)
    except ConnectionError:
        return None
    return msgpack.unpackb(body) if body else None


def _ending(code: int | None) -> str:
    if code is None:
        return "is gone"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how} (what it said is on stderr)"
