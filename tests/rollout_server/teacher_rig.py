"""Processes of teachers on tiny models beside a stand-in for replay, which lists them, and what asks them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs import Config
from replay import messages as m
from replay.channel import AsyncRouter, load_keys
from rollout_server import teacher as entry
from rollout_server.engines import build_engine
from rollout_server.engines.base import Engine, Scored
from rollout_server.teachers.process import TeacherProcess
from rollout_server.teachers.scores import Answer, Teachers
from slipstream.runtime.fingerprint import model_fingerprint
from tests.support.waiting import eventually

ROW = {"prompt": "w5 w9", "ground_truth": "w7", "data_source": "sums", "extra_info": {}, "columns": {"hint": "w8"}}
PROMPT = np.array([5, 9], np.int32)
ANSWERS = [Answer.sampled(PROMPT, np.array(ids, np.int32)) for ids in ([7, 3, 1], [4, 1])]

ASKING: list[Teachers] = []


def config_of(path: Path, k: int = 0, temperature: float = 0.7, **teachers: dict[str, Any]) -> Config:
    kind = {"top_k": {"k": k}} if k else "sampled"
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 8},
            "rollout": {"group_size": 2, "max_new_tokens": 12, "temperature": temperature, "engine": "torch"},
            "network": {"heartbeat_s": 0.05},
            "teachers": teachers,
            "algorithm": {"distillation": kind},
        }
    )


@dataclass
class Stand:
    """In place of replay: admits teachers and lists them."""

    router: AsyncRouter
    hellos: dict[str, m.Hello] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    late_s: float = 0.0
    """After a Hello its Welcome comes so late."""
    said: list[tuple[int, str]] = field(default_factory=list)
    """Version and digest of each Hello."""
    bus: str | None = None
    """Where teachers are refreshed from."""

    @property
    def entries(self) -> list[list[str | int]]:
        return [[one.teacher, one.address, one.version, one.digest] for one in self.hellos.values()]

    async def run(self) -> None:
        while True:
            await self.router.wait(1.0)
            while (came := await self.router.receive()) is not None:
                identity, envelope = came
                match envelope.message:  # type: ignore[union-attr]
                    case m.Hello() as hello:
                        self.hellos[identity] = hello
                        self.said.append((hello.version, hello.digest))
                        await asyncio.sleep(self.late_s)
                        await self.router.send(identity, m.Welcome(incarnation=1, version=0, bus_address=self.bus))
                    case m.Goodbye():
                        self.hellos.pop(identity, None)
                        self.gone.append(identity)

    async def listed(self, count: int) -> list[list[str | int]]:
        """The entries, once there are so many."""
        await eventually(lambda: len(self.hellos) == count, f"{count} teachers")
        return self.entries


@asynccontextmanager
async def standing(late_s: float = 0.0, keys: str | None = None) -> AsyncIterator[Stand]:
    stand = Stand(AsyncRouter("127.0.0.1", 0, "run", m.TO_REPLAY, keys=load_keys(keys)), late_s=late_s)
    running = asyncio.create_task(stand.run())
    try:
        yield stand
    finally:
        while ASKING:  # a test that fails must not leave sockets behind
            ASKING.pop().close()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        stand.router.close()


@asynccontextmanager
async def teaching(config: Config, name: str, stand: Stand, number: int = 0) -> AsyncIterator[TeacherProcess]:
    """A process of this teacher, in this process."""
    made: list[TeacherProcess] = []
    running = asyncio.create_task(
        entry.run(config, name, stand.router.address, f"teacher-{name}-{number}", made=made.append)
    )
    try:
        await eventually(lambda: made or running.done(), "an engine")
        if running.done():
            await running
        yield made[0]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class Fixed:
    """An engine that says what it is given."""

    def __init__(self, scored: Scored) -> None:
        self.scored = scored

    async def score(self, *_: Any, **__: Any) -> Scored:
        return self.scored


def asking(config: Config, engine: Any = None) -> Teachers:
    ASKING.append(Teachers(config, engine, "rollout-0", model_fingerprint(config.model.path)))
    return ASKING[-1]


async def no_encoding(row: dict[str, Any]) -> Any:
    raise AssertionError("nothing is encoded without a context")


async def ask(teachers: Teachers, row: dict[str, Any] = ROW, answers: Sequence[Answer] = ANSWERS) -> dict[str, Any]:
    return await teachers.group(row, answers, [1] * len(answers), no_encoding)


async def expected(config: Config, folder: Path, k: int = 0) -> Scored:
    """What the model of a folder gives to ANSWERS."""
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    engine: Engine = build_engine(changed)
    try:
        whole = [np.concatenate((one.prompt, one.tokens)) for one in ANSWERS]
        return await engine.score(whole, [2, 2], temperature=config.rollout.temperature, top=k)
    finally:
        await engine.close()
