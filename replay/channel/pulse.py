"""Heartbeats of a process that works, from a thread and a socket of their own.

A process that computes, or is blocked in a broadcast or its engine, still lives; one that is stopped does not beat.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

from replay.channel.admission import beating, sequence_numbers
from replay.channel.frames import Message, encode
from replay.channel.keys import Keys
from replay.channel.sockets import configure


class Pulse:
    """Sends what `beat` gives every `period_s` as the peer whose Dealer has this `route`, until `close`.

    `beat` is called in the thread of the pulse; None sends nothing. What is sent while there is no connection is lost.
    """

    def __init__(
        self,
        address: str,
        route: bytes,
        beat: Callable[[], Message | None],
        period_s: float,
        *,
        keys: Keys | None = None,
        run_id: str = "",
    ) -> None:
        self.run_id = run_id
        self._beat, self._period_s = beat, period_s
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, keys)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # beats that nobody heard must not reach a later server
        self._socket.setsockopt(zmq.IDENTITY, beating(route))
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        numbers = sequence_numbers()
        while not self._stop.wait(self._period_s):
            if (message := self._beat()) is not None:
                with suppress(zmq.Again):  # no connection now, or a full queue
                    self._socket.send_multipart(encode(message, self.run_id, next(numbers)), flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()
