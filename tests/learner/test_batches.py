"""A rank's end of the replay channel: a part that cannot be trained on is refused before any rank begins."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from learner import batches
from learner import train as loop
from learner.advantages import build_advantage
from learner.batches import BatchReader
from learner.learner import Learner
from learner.rows import BatchError
from replay import messages as m
from replay.channel import AsyncRouter, ChannelError
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import make_config

STEP = 3
WELCOME = m.Welcome(incarnation=1, version=0, bus_address=None)
PART = batch_of(random_step(STEP), STEP, rank=1, world_size=2)


class Entered(BatchError):
    """The rank began with the update."""


class Rank(Learner):
    """The learner's look at a batch, without a model."""

    def __init__(self, config: Any, ranks: Any, batches: Any) -> None:
        self.config = config
        self.policy = SimpleNamespace(vocab_size=64)  # type: ignore
        self.trainer = SimpleNamespace(experts=None, advantage=build_advantage(config.algorithm))  # type: ignore

    def start(self, *, resume: bool) -> int:
        return STEP - 1

    def publish(self, version: int) -> None:
        pass

    def span(self, name: str) -> Any:
        return nullcontext()

    def update(self, batch: m.Batch) -> Any:
        raise Entered(f"step {batch.step}")


@contextmanager
def second_rank(config: Any) -> Iterator[Any]:
    yield SimpleNamespace(rank=1, mesh=None, device=torch.device("cpu"))


class Peer:
    """Replay's end: what a rank has said, and its answers to Hello and Take."""

    def __init__(self, config: Any, run_id: str = "run", part: m.Batch = PART) -> None:
        self.router, self.part, self.said = AsyncRouter("127.0.0.1", 0, run_id, m.TO_REPLAY), part, list[m.Message]()
        self.reader = BatchReader(config, self.router.address, rank=0, fingerprint={})

    async def hear(self, until: Callable[[], bool]) -> bytes:
        """Go on until this is so; the identity of the last that spoke."""
        identity = b""
        while not until():
            await self.router.wait(0.1)
            while (arrived := await self.router.receive()) is not None:
                identity, envelope = arrived
                self.said.append(envelope.message)  # type: ignore[union-attr]
                match self.said[-1]:
                    case m.Hello():
                        await self.router.send(identity, WELCOME)
                    case m.Take(have=have):
                        await self.router.send(identity, m.Proceed(step=STEP) if have else self.part)
        return identity


@asynccontextmanager
async def peer(config: Any, **options: Any) -> AsyncIterator[Peer]:
    made = Peer(config, **options)
    try:
        yield made
    finally:
        made.router.close()
        made.reader.abandon()


def trained_on(part: m.Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Exception, list[m.Message]]:
    """What the loop of rank 1 raises with this part, and what replay hears."""
    monkeypatch.setattr(loop, "join_ranks", second_rank)
    monkeypatch.setattr(loop, "run_fingerprint", lambda config: {})
    config = make_config(tmp_path)

    async def both() -> tuple[Exception, list[m.Message]]:
        async with peer(config, part=part) as replay:
            address = replay.router.address
            run = asyncio.create_task(asyncio.to_thread(loop.train, config, address, resume=False, make_learner=Rank))
            await asyncio.wait_for(replay.hear(lambda: bool(replay.said) and type(replay.said[-1]) is m.Goodbye), 30)
            (error,) = await asyncio.gather(run, return_exceptions=True)
        assert isinstance(error, Exception), error
        return error, replay.said

    return asyncio.run(both())


def test_a_good_part_is_reported_as_held_and_trained_on(tmp_path, monkeypatch):
    error, said = trained_on(PART, tmp_path, monkeypatch)
    assert isinstance(error, Entered)
    assert [take.have for take in said if isinstance(take, m.Take)][:2] == [False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("versions", PART.versions - 4),
        ("logprobs", np.full_like(PART.logprobs, np.nan)),
        ("all_loss_tokens", PART.all_loss_tokens + 1),
        ("token_ids", PART.token_ids + 64),
    ],
)
def test_a_part_that_cannot_be_trained_on_is_refused_before_it_is_reported_as_held(tmp_path, monkeypatch, field, value):
    error, said = trained_on(dataclasses.replace(PART, **{field: value}), tmp_path, monkeypatch)
    assert isinstance(error, BatchError) and not isinstance(error, Entered), error
    assert not any(take.have for take in said if isinstance(take, m.Take)), "the other ranks begin when all hold it"
    assert isinstance(said[-1], m.Goodbye) and said[-1].failed and "rank 1" in said[-1].reason


def test_a_rank_beats_while_it_computes_from_welcome_on(tmp_path):
    """An update that takes longer than every deadline, as the first one that compiles: nobody reads its socket."""
    config = make_config(tmp_path, network={"heartbeat_s": 0.1})

    async def heard() -> list[m.Message]:
        async with peer(config) as replay:
            work = asyncio.create_task(asyncio.to_thread(computes, replay.reader))
            await replay.hear(work.done)
            await work
        return replay.said

    def computes(reader: BatchReader) -> None:
        time.sleep(0.5)
        reader.join(version=0, digest="d", bus_address=None, cursor=None)
        reader.take(STEP, lambda part: None)
        time.sleep(1.5)

    said = asyncio.run(asyncio.wait_for(heard(), 30))
    assert isinstance(said[0], m.Hello), "before it is a peer, a beat would be refused"
    beats = [beat for beat in said[said.index(m.Take(step=STEP, rank=0, have=True)) :] if isinstance(beat, m.Heartbeat)]
    assert len(beats) >= 5 and {beat.activity for beat in beats[1:]} == {f"training step {STEP}"}
    assert beats[-1].since_s > 1.0


def test_a_rank_that_waits_for_its_evaluations_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "ASK_AGAIN_S", 0.1)

    async def heard() -> list[m.Message]:
        async with peer(make_config(tmp_path)) as replay:
            for version in (5, 7):
                replay.reader.announce(m.Evaluate(version=version))
            waits = asyncio.create_task(asyncio.to_thread(replay.reader.wait_for_evaluations, 30.0))
            identity = await asyncio.wait_for(replay.hear(lambda: len(replay.said) >= 6), 30)
            await replay.router.send(identity, m.EvaluationClosed(version=7))
            await asyncio.sleep(1.0)
            assert not waits.done(), "an earlier version is evaluated still"
            await replay.router.send(identity, m.EvaluationClosed(version=5))
            await asyncio.wait_for(waits, 30)
        return replay.said

    first, second, *others = asyncio.run(heard())
    assert isinstance(first, m.Evaluate) and isinstance(second, m.Evaluate)
    assert all(isinstance(message, m.Heartbeat) for message in others)


def test_what_is_refused_is_no_sign_of_replay(tmp_path):
    """A rank that is left over from a killed run, and finds the next run's replay at its address."""

    async def heard() -> None:
        config = make_config(tmp_path, network={"silent_after_s": 1.0, "heartbeat_s": 0.1})
        async with peer(config, run_id="next") as replay:
            dealer = replay.reader._dealer
            dealer.run_id = "last"
            replay.reader.announce(m.Evaluate(version=5))
            waits = asyncio.create_task(asyncio.to_thread(replay.reader.wait_for_evaluations, 20.0))
            while not waits.done():
                await replay.router.send(dealer.identity, m.Heartbeat())
                await asyncio.sleep(0.1)
            await waits

    said = r"the evaluation of version 5, but replay at .* was last heard \d+\.\d s ago"
    with pytest.raises(ChannelError, match=said):
        asyncio.run(heard())


def test_all_evaluations_share_a_deadline(tmp_path, caplog):
    async def closed() -> dict[int, str]:
        async with peer(make_config(tmp_path)) as replay:
            for version in range(8):
                replay.reader.announce(m.Evaluate(version=version))
            await asyncio.wait_for(asyncio.to_thread(replay.reader.wait_for_evaluations, 0.5), 3)
        return replay.reader.inbox.closed

    assert asyncio.run(closed()) == dict.fromkeys(range(8), "not done within 0.5 s")
