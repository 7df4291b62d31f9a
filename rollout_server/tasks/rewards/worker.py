"""The work of a reward process (children/worker.py): answers requests of rewards/protocol.py until the pool hangs up.

Code of the user runs here and may hang, crash or print: the pool kills this process when it takes too long, and limits
(rewards/limits.py) hold what it takes.
"""

import socket
from typing import Any, BinaryIO

import msgpack

from rollout_server.tasks.rewards import RewardError
from rollout_server.tasks.rewards.judging import Verdict, judge, judge_async, sendable
from rollout_server.tasks.rewards.limits import confine, exceeded, leave
from rollout_server.tasks.rewards.protocol import MAX_ERROR_CHARS
from rollout_server.tasks.rewards.weighted import Order, load_parts
from rollout_server.tasks.workers.frames import LENGTH, pack


def work(channel: socket.socket) -> int:
    """Set the order's limits and judge until the pool closes the channel; the exit code."""
    requests = channel.makefile("rb")
    order = _receive(requests)
    if order is None:
        return 0
    confine(order["limits"])
    try:
        return _judge(channel, requests, order["parts"], order["timeout_s"])
    except MemoryError:
        leave("memory_bytes")


def _judge(channel: socket.socket, requests: BinaryIO, parts: Order, timeout_s: float) -> int:
    """Load the functions and answer requests."""

    def send(verdicts: list[Verdict]) -> None:
        channel.sendall(pack(verdicts))

    try:
        function = load_parts(parts)
    except RewardError as error:
        reason = str(error) + exceeded(error)
        channel.sendall(pack({"error": sendable(reason[:MAX_ERROR_CHARS])}))
        return 1
    channel.sendall(pack({"convention": function.convention, "is_async": function.is_async}))
    if function.is_async:
        import asyncio  # as in judge_async

        # One loop over all requests, so that the function may keep its connections. It ends with this process,
        # without being closed: past a memory limit, tasks of the user must not hold up the end.
        loop = asyncio.Runner()
    while (samples := _receive(requests)) is not None:
        if function.is_async:
            loop.run(judge_async(function, timeout_s, samples, send))
        else:
            judge(function, samples, send)
    return 0


def _receive(requests: BinaryIO) -> Any:
    """The next message; None when the pool has closed the channel."""
    header = requests.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = requests.read(length)
    return msgpack.unpackb(body) if len(body) == length else None
