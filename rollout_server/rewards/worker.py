"""A reward process: `python -m rollout_server.rewards.worker <pid of the pool>`, with a socket as stdin.

consumes      samples, framed (rewards/framing.py), on the socket
produces      a verdict per sample, on the same socket
waits for     the next request, for as long as the pool lives
unblocked by  the pool, or its end: the socket closes, and the parent-death signal arrives

Code of the user runs here and may hang, crash or print: the pool kills this process when it takes too long,
prints go to stderr, and the socket is not fd 0, 1 or 2 any more when that code is loaded. A supervisor of its own
(rewards/supervisor.py) ends everything that it leaves behind, and limits (rewards/limits.py) hold what it takes.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from rollout_server.rewards import limits
from rollout_server.rewards.base import RewardError
from rollout_server.rewards.framing import LENGTH, MAX_ERROR_CHARS, pack, unpack
from rollout_server.rewards.judging import Verdict, judge, sendable
from rollout_server.rewards.loading import RewardFunction, load_function
from rollout_server.rewards.supervisor import supervise


def main() -> int:
    """Entry point."""
    supervise(int(sys.argv[1]))
    channel = private_channel()
    threading.Thread(target=_die_with_channel, args=(channel,), daemon=True).start()
    order = receive(channel)
    if order is None:
        return 0
    limits.confine(order["limits"])
    try:
        return work(channel, order["function"], order["timeout_s"])
    except MemoryError:
        limits.leave("memory_bytes")


def work(channel: socket.socket, name: str, timeout_s: float) -> int:
    """Load the function and serve until the pool closes the channel."""
    try:
        function = load_function(name)
    except RewardError as error:
        key = limits.reached(error)
        if key in limits.EXIT_CODES:
            limits.leave(key)
        channel.sendall(pack({"error": sendable(str(error)[:MAX_ERROR_CHARS])}))
        return 1
    channel.sendall(pack({"convention": function.convention, "is_async": function.is_async}))
    serve(channel, function, timeout_s)
    return 0


def serve(channel: socket.socket, function: RewardFunction, timeout_s: float) -> None:
    """Answer requests until the pool closes the channel."""

    def send(verdicts: list[Verdict]) -> None:
        channel.sendall(pack(verdicts))

    def answer_all(answer: Callable[[Any], None]) -> None:
        while (samples := receive(channel)) is not None:
            try:
                answer(samples)
            except limits.LimitReached as limit:
                limits.leave(limit.key)
            except MemoryError:
                limits.leave("memory_bytes")

    if function.is_async:
        # asyncio costs 40 ms of start-up that synchronous functions do not need.
        from rollout_server.rewards.judging_async import AsyncJudge

        with AsyncJudge(function, timeout_s) as async_judge:
            answer_all(lambda samples: async_judge.judge(samples, send))
    else:
        answer_all(lambda samples: judge(function, samples, send))


def private_channel() -> socket.socket:
    """Move the socket away from stdin, and let what the user prints go to stderr line by line."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return channel


def _die_with_channel(channel: socket.socket) -> None:
    """Kill this process and what it has started as soon as the pool closes its end, even amid a call."""
    poll = select.poll()
    poll.register(channel, 0)  # only hang-up and errors, never readable data
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def receive(channel: socket.socket) -> Any:
    """The next message; None when the pool has closed the channel."""
    header = _exactly(channel, LENGTH.size)
    if header is None:
        return None
    body = _exactly(channel, LENGTH.unpack(header)[0])
    return None if body is None else unpack(body)


def _exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = channel.recv(num_bytes, socket.MSG_WAITALL)
    while len(data) < num_bytes:
        more = channel.recv(num_bytes - len(data))
        if not more:
            return None
        data += more
    return data


if __name__ == "__main__":
    sys.exit(main())
