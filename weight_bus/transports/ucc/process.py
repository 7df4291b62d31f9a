"""The processes in which UCC runs, for the transport (collective.py): a starter, and the one that it forks for a group.

usage: python -m weight_bus.transports.ucc.process PARENT_PID CHANNEL_FD MEMORY_FD

The starter imports torch once, and loads no UCC. Each message is msgpack in a packet:

| order of the transport                                                | answer of the starter                      |
|-----------------------------------------------------------------------|--------------------------------------------|
| (none)                                                                | {} when it is ready                        |
| {"do": "fork"}, and a file descriptor: the channel of the new process | {"pid": int}                               |
| {"do": "end"}: kill that process                                      | {"code": int}, below 0 a signal            |
| {"do": "form", fields of Formation, "timeout_s", "patience_s"}, once  | of the new process: {} when it is done; or |
| {"do": "broadcast", "bytes": int}: of the shared memory, to all       | {"failed": reason, "symptom": of errors.py |
| {"do": "finish"}                                                      | or ""}, and it ends                        |

Both end when the transport hangs up, and with their parents; always by os._exit, because an interpreter with a UCC
group whose peer is gone never ends.
"""

import logging
import os
import signal
import socket
import sys
import time
from dataclasses import fields
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from slipstream.runtime.lifeline import die_with_parent
from weight_bus.errors import TransportError
from weight_bus.transports.base import Formation
from weight_bus.transports.meeting import Meeting
from weight_bus.transports.ucc import resolve_ucc
from weight_bus.transports.ucc.member import SharedBytes

log = logging.getLogger("weight_bus.ucc_process")

MAX_ORDER_BYTES = 64 * 1024
MAX_REASON = 2000


class UccGroup:
    """The UCC group of this process: torch.distributed's default group, unused otherwise here."""

    def __init__(self, memory: SharedBytes) -> None:
        self._memory = memory
        self._size = 0
        self._buckets = 0  # since the last closing sum

    def form(self, order: dict[str, Any]) -> None:
        """Meet all members, build the group and send something, for building alone does not touch UCC."""
        resolve_ucc()
        formation = Formation(**{field.name: order[field.name] for field in fields(Formation)})
        timeout, deadline = timedelta(seconds=order["timeout_s"]), time.monotonic() + order["patience_s"]
        meeting = Meeting("", timeout)
        store = meeting.at(formation)
        meeting.show_up(store, formation, max(0.1, deadline - time.monotonic()))
        rank, self._size = formation.rank, formation.size
        dist.init_process_group("cpu:ucc", store=store, rank=rank, world_size=self._size, timeout=timeout)
        probe = torch.tensor([formation.epoch if rank == 0 else 0])
        dist.broadcast(probe, 0)
        if probe.item() != formation.epoch:
            raise TransportError(f"the first broadcast brought {probe.item()}, not {formation.epoch}", "corrupt")
        self.finish()

    def broadcast(self, num_bytes: int) -> None:
        """One bucket. Returns on rank 0 before it is anywhere else, and may do so where a peer is dead."""
        if num_bytes:
            dist.broadcast(self._memory.room(num_bytes), 0)
        self._buckets += 1

    def finish(self) -> None:
        """A sum to which every member adds once it has every bucket; it comes out right here when all have."""
        mine = torch.tensor([1, self._buckets])
        expected = (mine * self._size).tolist()
        dist.all_reduce(mine)
        if mine.tolist() != expected:
            raise TransportError(f"members and their buckets are {mine.tolist()}, not {expected}", "corrupt")
        self._buckets = 0


def main(parent: int, channel_fd: int, memory_fd: int) -> int:
    """The starter, or a process of a group that it has forked; the exit code."""
    die_with_parent(parent)
    me, pid = os.getpid(), 0
    with socket.socket(fileno=channel_fd) as channel:
        channel.send(msgpack.packb({}))
        while True:
            body, fds, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
            if not body:
                return 0
            if msgpack.unpackb(body)["do"] == "fork":
                pid = os.fork()
                if not pid:
                    break
                os.close(fds[0])
                channel.send(msgpack.packb({"pid": pid}))
            elif pid:  # never signal a pid that is not a child
                os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                pid = 0
                channel.send(msgpack.packb({"code": code}))
    die_with_parent(me)
    with socket.socket(fileno=fds[0]) as channel:
        return serve(channel, UccGroup(SharedBytes(memory_fd)))


def serve(channel: socket.socket, group: UccGroup) -> int:
    """Carry out the orders for a group until one fails or there are no more; the exit code."""
    while body := channel.recv(MAX_ORDER_BYTES):
        order = msgpack.unpackb(body)
        try:
            match order["do"]:
                case "form":
                    group.form(order)
                case "broadcast":
                    group.broadcast(order["bytes"])
                case "finish":
                    group.finish()
        except Exception as error:
            known = error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}")
            text, symptom = (known.message, known.symptom) if isinstance(known, TransportError) else (str(known), "")
            channel.send(msgpack.packb({"failed": text[:MAX_REASON], "symptom": symptom}))
            if known is not error:
                raise  # its traceback is for the log
            return 1
        channel.send(msgpack.packb({}))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s ucc-process %(levelname)s %(message)s")
    code = 1
    try:
        code = main(*map(int, sys.argv[1:]))
    except BaseException:
        log.exception("the UCC process fails")
    finally:
        os._exit(code)
