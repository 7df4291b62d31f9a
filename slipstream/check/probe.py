"""`python -m slipstream.check.probe`: looks at its machine for doctor, as a process of one role would see it.

Orders come as lines of JSON on stdin, {"do": NAME, ...}; each is answered by a line on stdout that begins with MARK:
{"found": ...}, or {"error": text}. What libraries print goes past that. It ends with stdin.
"""

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from configs.loading import parse
from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncRouter, ChannelError, WireError, load_keys
from replay.status_client import ask_replay
from slipstream.check import facts
from slipstream.check.machine import problem_with_port

if TYPE_CHECKING:
    from weight_bus.transports import Transport

MARK = "doctor-answer "
BUCKET_BYTES = 1 << 20
"""What a test group broadcasts."""
CONNECT_S = 3.0
REFUSAL_S = 20.0
"""A server of other keys says nothing: its twenty closed handshakes are a refusal (replay/channel/handshake.py)."""
LISTEN_S = 12.0
"""Less than doctor waits for the answer (links.py)."""


class Probe:
    """The orders, by name."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._transport: Transport | None = None

    def take(self, config: str) -> str:
        """The configuration, as YAML with this node's network.host."""
        self._config = parse(config, "doctor's order")
        return self._config.network.host

    @property
    def config(self) -> Config:
        assert self._config is not None, "`take` comes first"
        return self._config

    def clock(self) -> float:
        return time.time()

    def look(self, modules: list[str], ports: dict[str, int], is_first: bool) -> dict[str, Any]:
        """Facts of this role; kernels and ports are asked by name, devices once a node."""
        model, network = self.config.model, self.config.network
        problems = {key: problem_with_port(network.host, port) for key, port in ports.items()}
        return {
            **facts.of_role(model.path, model.chat_template, network.keys),
            "ports": {key: problem for key, problem in problems.items() if problem},
            "devices": facts.of_devices() if is_first else {},
            "kernels": facts.kernels(modules),
        }

    def listen(self, port: int) -> str:
        """Answer status requests as replay would, with its keys, until this process ends; the address."""
        listening: list[str | Exception] = []
        ready = threading.Event()

        def serve() -> None:
            asyncio.run(_answer_requests(self.config, port, listening, ready))

        threading.Thread(target=serve, name="doctor-replay", daemon=True).start()
        if not ready.wait(LISTEN_S):
            raise ChannelError(f"port {port} was not bound within {LISTEN_S:g} s", "slow")
        (found,) = listening
        if isinstance(found, Exception):
            raise found
        return found

    def reach(self, address: str, timeout_s: float) -> dict[str, str]:
        """Ask the replay at this address for its status: how that fails, by symptom; empty when it answers."""
        problem = unreachable(address, self.config, timeout_s)
        return {} if problem is None else {"problem": problem}

    def prepare(self, backend: str) -> None:
        """Import and make what a member of a test group needs."""
        self._made(backend)

    def open_group(self, backend: str) -> str:
        """Rank 0 only: the endpoint where the members of a test group meet."""
        return self._made(backend).serve()

    def group(self, backend: str, rank: int, endpoint: str, prefix: str) -> dict[str, Any]:
        """Enter a group of two by the weight bus's own transport, broadcast and leave: seconds, and what it found."""
        import torch

        from weight_bus.transports import Formation

        transport = self._transport or self._made(backend)
        started = time.monotonic()
        try:
            transport.form(Formation(epoch=1, rank=rank, size=2, endpoint=endpoint, prefix=prefix))
            formed = time.monotonic()
            pattern = torch.arange(BUCKET_BYTES, dtype=torch.int32).to(torch.uint8)
            bucket = (pattern if rank == 0 else torch.zeros_like(pattern)).to(transport.device)
            transport.broadcast(bucket, 0)
            transport.finish()
            intact = bool((bucket.cpu() == pattern).all())
            return {"form_s": formed - started, "send_s": time.monotonic() - formed, "intact": intact}
        finally:
            transport.close()
            self._transport = None

    def _made(self, backend: str) -> "Transport":
        import torch

        from weight_bus.transports import BACKENDS

        if backend == "nccl" and torch.cuda.is_available():
            torch.cuda.set_device(0)
        bus = self.config.weight_bus.model_copy(update={"backend": backend})
        self._transport = BACKENDS[backend](bus, self.config.network.host)
        return self._transport


def unreachable(address: str, config: Config, timeout_s: float = CONNECT_S) -> str | None:
    """Why the replay at tcp://host:port does not answer, with the class of the symptom; None when it does."""
    match = re.fullmatch(r"tcp://\[?([^\]]+)\]?:(\d+)", address)
    if match is None:
        return f"{address!r} is not of the form tcp://host:port"
    try:
        socket.create_connection((match[1], int(match[2])), timeout=timeout_s).close()
    except TimeoutError:
        return f"nothing at {address} answers a connection within {timeout_s:g} s [silent]"
    except OSError as error:
        return f"{address} cannot be connected to: {error.strerror or error} [closed]"
    try:
        answer = ask_replay(address, config.network.keys, REFUSAL_S)
    except ChannelError as error:
        return str(error)
    if answer is None:
        return f"{address} takes connections and does not answer as replay does within {REFUSAL_S:.0f} s [silent]"
    return None


async def _answer_requests(config: Config, port: int, listening: list[str | Exception], ready: threading.Event) -> None:
    network = config.network
    try:
        keys = load_keys(network.keys)
        router = AsyncRouter(network.host, port, "doctor", m.TO_REPLAY, keys=keys, insecure=network.insecure)
    except (ChannelError, OSError) as error:
        listening.append(error)
        ready.set()
        return
    listening.append(router.address)
    ready.set()
    while True:
        await router.wait(1.0)
        while (arrival := await router.receive()) is not None:
            identity, envelope = arrival
            if not isinstance(envelope, WireError):
                await router.send(identity, m.Status(state={}))


def main() -> int:
    """Entry point; 0 when stdin has ended."""
    probe, out = Probe(), sys.stdout
    names = ["take", "clock", "look", "listen", "reach", "prepare", "open_group", "group"]
    orders: dict[str, Callable[..., Any]] = {name: getattr(probe, name) for name in names}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"found": orders[order.pop("do")](**order)}
        except (OSError, ValueError, RuntimeError) as error:  # of the machine; a mistake of ours ends this process
            answer = {"error": str(error) or type(error).__name__}
        out.write(MARK + json.dumps(answer) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
