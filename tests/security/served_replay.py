"""The real replay (router, main loop, service) in a thread, and a router alone."""

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay import keys as make_keys
from replay.channel import MAX_MESSAGE_BYTES, AsyncRouter, Dealer, Envelope, Keys, WireError, load_keys, registry
from replay.channel.frames import Message
from replay.messages import FROM_REPLAY, TO_REPLAY, StatusRequest
from replay.serve import serve
from replay.service import Service
from scripts.bench import core
from tests.replay.simulated_run import bare_service
from tests.replay.simulation.journal import MemoryJournal
from tests.support.waiting import PATIENT_S, until

RUN = "attacked-run"


SETTINGS = {"replay__partial_rollouts": True, "network__silent_after_s": 30.0}


def service(num_prompts: int = 40, num_evaluated: int = 0, **settings: Any) -> Service:
    journal = MemoryJournal()
    made: Service = bare_service(journal, num_prompts, evaluated=num_evaluated, **SETTINGS, **settings)
    return made


class Replay(logging.Handler):
    """A replay that serves, and what it has logged."""

    address = ""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def line(self, part: str) -> str:
        """The first line that has this part, once there is one."""
        until(lambda: any(part in line for line in list(self.lines)), f"a line with {part!r}")
        return next(line for line in self.lines if part in line)


@contextmanager
def served(keys: Keys | None = None, **settings: Any) -> Iterator[Replay]:
    """A replay in a thread of its own; it must go on serving after what is done to it."""
    replay, logger = Replay(), logging.getLogger("replay")
    listening, stop = threading.Event(), threading.Event()

    async def main() -> None:
        router = AsyncRouter("127.0.0.1", 0, RUN, TO_REPLAY, keys=keys)
        try:
            replay.address = router.address
            listening.set()
            await serve(router, service(**settings), 0.2, stop.is_set)
        finally:
            router.close()

    level = logger.level
    logger.addHandler(replay)
    logger.setLevel(logging.INFO)
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(lambda: asyncio.run(main()))
        try:
            assert listening.wait(PATIENT_S)
            yield replay
            with Dealer(replay.address, "honest", FROM_REPLAY, keys=keys) as dealer:
                dealer.send(StatusRequest())
                assert dealer.poll(PATIENT_S) is not None, "a peer that keeps to the rules is not served any more"
        finally:
            logger.removeHandler(replay)
            logger.setLevel(level)
            stop.set()
            serving.result(PATIENT_S)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note(Message):
    text: str = ""
    data: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int32))


NOTES = registry(Note)


def with_router(
    body: Callable[[AsyncRouter], Coroutine[Any, Any, Any]],
    keys: Keys | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    kinds: Any = NOTES,
) -> Any:
    """What `body` makes of a router, within a deadline."""

    async def main() -> Any:
        router = AsyncRouter("127.0.0.1", 0, RUN, kinds, keys=keys, max_message_bytes=max_message_bytes)
        try:
            return await body(router)
        finally:
            router.close()

    return asyncio.run(asyncio.wait_for(main(), 200.0))


async def arrivals(router: AsyncRouter, count: int) -> list[tuple[str, Envelope | WireError]]:
    found: list[tuple[str, Envelope | WireError]] = []
    while len(found) < count:
        assert await router.wait(PATIENT_S), f"{len(found)} of {count} messages came"
        while (arrived := await router.receive()) is not None:
            found.append(arrived)
    return found


def keys_of(folder: Path, *nodes: str) -> dict[str, Keys]:
    """New keys of a learner and these nodes."""
    make_keys.make(folder / "keys", nodes, force=False)
    for name in nodes:
        make_keys.export(folder / "keys", name, folder / name)
    return {"learner": load_keys(folder / "keys")} | {name: load_keys(folder / name) for name in nodes}


def resident_bytes() -> int:
    """Of this process."""
    return core.resident_bytes(os.getpid())
