"""The real replay (router, main loop, service) in a thread, and peers that do not keep to the rules."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from configs import Config
from replay.channel import AsyncRouter, Keys, Limits
from replay.messages import TO_REPLAY
from replay.prompts import PromptSource
from replay.serve import serve
from replay.service import Service
from tests.replay.simulation.journal import MemoryJournal

RUN = "attacked-run"
PATIENT_S = 10.0


def config(**placement: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": 2, "groups_per_step": 4, "max_new_tokens": 8},
            "replay": {"async_lag": 1, "lease_s": 10, "max_attempts": 3},
            "placement": {"device": "cpu"} | (placement or {"split": "1:1"}),
        }
    )


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "ground_truth": str(i), "data_source": "t", "extra_info": {}, "columns": {}}
        for i in range(count)
    ]


def service(**placement: str) -> Service:
    source = PromptSource(rows(40), shuffle=False, seed=0)
    return Service(config(**placement), source, [], time.monotonic(), journal=MemoryJournal())


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def wait_for(self, part: str) -> str:
        """The first line that has this part, once there is one."""
        deadline = time.monotonic() + PATIENT_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if part in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no line with {part!r}: {self.lines}")


class Replay:
    """A replay that serves in a thread of its own."""

    def __init__(self, keys: Keys | None, limits: Limits | None, placement: dict[str, str]) -> None:
        self.address = ""
        self.log = Lines()
        self.failure: BaseException | None = None
        self._keys, self._limits, self._placement = keys, limits, placement
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="served-replay")
        self._thread.start()
        assert self._ready.wait(PATIENT_S)

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - the test that stops this replay fails with it
            self.failure = error
            self._ready.set()

    async def _serve(self) -> None:
        router = AsyncRouter("127.0.0.1", 0, RUN, TO_REPLAY, self._limits, keys=self._keys)
        try:
            self.address = router.address
            self._ready.set()
            await serve(router, service(**self._placement), 0.2, self._stop.is_set)
        finally:
            router.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@contextmanager
def served(keys: Keys | None = None, limits: Limits | None = None, **placement: str) -> Iterator[Replay]:
    """A replay; it must have survived what was done to it."""
    logger = logging.getLogger("replay")
    level = logger.level
    replay = Replay(keys, limits, placement)
    logger.addHandler(replay.log)
    logger.setLevel(logging.INFO)
    try:
        yield replay
    finally:
        logger.removeHandler(replay.log)
        logger.setLevel(level)
        replay.stop()


@contextmanager
def raw_dealer(
    address: str, identity: str, keys: Keys | None = None, *, high_water_mark: int = 1000
) -> Iterator["zmq.Socket[bytes]"]:
    """A DEALER that sends whatever frames it is given."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, identity.encode())
    made.set_hwm(high_water_mark)
    if keys is not None:
        keys.apply(made)
    made.connect(address)
    try:
        yield made
    finally:
        made.close(linger=100)
        context.term()


# ---- ZMTP 3.1 by hand -----------------------------------------------------------------------------------


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes) -> bytes:
    """READY of a DEALER."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return b"\x04" + bytes([len(body)]) + body


def long_frame(size: int, *, command: bool = False, more: bool = False) -> bytes:
    """The beginning of a frame of that size."""
    return bytes([0x02 | 0x04 * command | 0x01 * more]) + size.to_bytes(8, "big")


@contextmanager
def plain_connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENT_S) as connection:
        yield connection


def read_until_closed(connection: socket.socket) -> bytes:
    """What the server says before it closes the connection; fails when it does not."""
    said = b""
    try:
        while data := connection.recv(65536):
            said += data
    except ConnectionResetError:
        pass
    return said


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
