"""The server's side of keys: admits the listed clients (ZAP, ZeroMQ RFC 27), and counts and names who was refused."""

import logging
import threading
import time
from collections import Counter
from typing import Any

import zmq

from replay.channel.handshake import CRYPTOGRAPHIC, MECHANISM_MISMATCH, Monitor
from replay.channel.keys import Keys
from replay.channel.roster import Roster

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
QUIET_S = 10.0
"""A refused peer tries again and again: one line for each reason within this time, with the count so far."""
REASONS = {
    MECHANISM_MISMATCH: "it has no keys (its network.keys is not set)",
    CRYPTOGRAPHIC: "it has the public key of another server (its server.key)",
}
LEFT = "it left during the handshake (it has no keys, is no peer of ours, or just died)"
"""Which side of a pair with and without keys finds out first is chance."""


class Gate:
    """Answers for all server sockets of one context, in a thread of its own; ends with the context.

    To be made before the socket is bound, and closed before the socket.
    """

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", keys: Keys) -> None:
        self.refused: Counter[str] = Counter()
        """Handshakes by the reason of their refusal."""
        self.roster = Roster(keys)
        self._reason = f"its key is not in {self.roster.folder}"
        self._quiet_until: dict[str, float] = {}
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ENDPOINT)
        events = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = Monitor(context, socket, events)
        self._thread = threading.Thread(target=self._run, name="curve-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the watched socket; the thread ends when the context is terminated."""
        self._monitor.detach()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
                if self._monitor.socket in ready:
                    self._note()
        except zmq.ContextTerminated:
            log.debug("the gate ends with its context")
        finally:
            self._zap.close()
            self._monitor.socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Reply to a ZAP request: version, request id, domain, address, identity, mechanism, credentials..."""
        version, number, _, address, _, mechanism, *credentials = request
        is_curve = version == VERSION and mechanism == b"CURVE" and len(credentials) == 1
        user = self.roster.user(credentials[0], time.monotonic()) if is_curve else None
        if user is not None:
            return [VERSION, number, b"200", b"OK", user.encode(), b""]
        self._refuse(self._reason, f" at {address.decode('ascii', 'replace')}")
        return [VERSION, number, b"400", b"unknown key", b"", b""]

    def _note(self) -> None:
        while (seen := self._monitor.read()) is not None:
            event, code = seen
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refuse(LEFT, "")
            else:
                self._refuse(REASONS.get(code, f"its handshake is malformed (code {code:#x})"), "")

    def _refuse(self, reason: str, where: str) -> None:
        self.refused[reason] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(reason, 0.0):
            self._quiet_until[reason] = now + QUIET_S
            log.warning("refused a peer%s: %s; %d times so far [closed]", where, reason, self.refused[reason])
