"""A rollout server's end of the channel: when it gives replay up, and which evaluation it answers."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs import Config
from configs.algorithm import Replay
from replay import messages as m
from replay.channel import AsyncDealer, AsyncRouter, ChannelError, WireError
from rollout_server.engines.base import EngineError, Sampling
from rollout_server.engines.sglang import process as sglang_process
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.sglang.requests import AnswerPart, ResumableAnswer
from rollout_server.generate import Generator
from rollout_server.progress import ProgressReports
from rollout_server.serve import serve
from rollout_server.server import SETTLE_S, RolloutServer

SILENT_AFTER_S = 0.6


class Wire(list[Any]):
    """Takes the dealer's place; has what was sent, in order."""

    async def send(self, message: Any) -> None:
        self.append(message)


def server_of(dealer: AsyncDealer | Wire) -> RolloutServer:
    """With nothing but its channel."""
    network = {"silent_after_s": SILENT_AFTER_S, "heartbeat_s": 0.1}
    config = Config.model_validate(
        {"model": {"path": "none"}, "data": {"train": "none.jsonl"}, "network": network, "rollout": {"engine": "torch"}}
    )
    engine = SimpleNamespace()
    generator: Any = SimpleNamespace(config=config, engine=engine)
    return RolloutServer(config, generator, dealer, name="rollout-0", fingerprint={})  # type: ignore[arg-type]


async def test_a_server_that_the_next_run_finds_at_its_address_ends_and_says_what_it_heard() -> None:
    """The next run's replay refuses each heartbeat of a server that the last one has left behind."""
    router = AsyncRouter("127.0.0.1", 0, "next-run", m.TO_REPLAY)
    dealer = AsyncDealer(router.address, "rollout-0", m.FROM_REPLAY)
    dealer.run_id = "last-run"
    server = server_of(dealer)

    async def refuse() -> None:
        while True:
            if await router.wait(1.0) and (arrived := await router.receive()) is not None:
                await router.send(arrived[0], m.Refused(reason=f"message refused: {arrived[1]}"))

    async def beat() -> None:
        while True:
            await dealer.send(m.Heartbeat(activity="generating", since_s=0.0, gauges={}))
            await asyncio.sleep(SILENT_AFTER_S / 6)

    others = [asyncio.create_task(refuse()), asyncio.create_task(beat())]
    try:
        with pytest.raises(ChannelError, match=r"waited 0.6 s .*refused.*'next-run', this peer belongs to 'last-run'"):
            await asyncio.wait_for(server.next_message(), 10 * SILENT_AFTER_S)
    finally:
        for task in others:
            task.cancel()
        dealer.close()
        router.close()


ASKED = m.EvaluationLease(
    version=4, set="", greedy=True, first=0, samples=1, seed=1, temperature=1.0, max_new_tokens=5, prompts=[{}]
)


async def test_an_evaluation_that_is_closed_ends_and_its_version_may_be_evaluated_again() -> None:
    """A learner that was restarted makes the version again, while a judge still reads answers of the lost one."""
    judged, sent = asyncio.Event(), Wire()
    rewards = iter([0.25, 1.0])

    async def evaluation(lease: m.EvaluationLease) -> m.EvaluationResult:
        reward = next(rewards)
        if reward < 1:
            await judged.wait()
        numbers: Any = {"rewards": np.array([reward], np.float32), "lengths": np.ones(1, np.int32)}
        asked: Any = {name: getattr(lease, name) for name in ("version", "set", "greedy", "first", "samples")}
        return m.EvaluationResult(**asked, **numbers, texts=["7"], finish_reasons=["stop"], seconds=0.0)

    unpinned = list[int]()

    async def unpin(version: int) -> None:
        unpinned.append(version)

    server = server_of(sent)
    server.engine.hold, server.engine.unpin = lambda _: None, unpin  # type: ignore[method-assign]
    server.generator.evaluation = evaluation  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        await server.handle(ASKED, tasks)
        await asyncio.sleep(0.01)
        await server.handle(m.EvaluationClosed(version=3), tasks)
        assert len(server.leases.evaluating) == 1, "another version's goes on"
        await server.handle(m.EvaluationClosed(version=4), tasks)
        await server.handle(ASKED, tasks)
        judged.set()
    assert [result.rewards.tolist() for result in sent] == [[1.0]]
    assert not server.leases.evaluating and unpinned == [3, 4]


async def test_a_server_whose_follower_has_died_ends_with_its_reason() -> None:
    server = server_of(Wire())
    server.follower.failure = OSError("no route")
    with pytest.raises(EngineError, match="no route"):
        await asyncio.wait_for(server.beat(), 10)


@pytest.mark.parametrize("is_over", [False, True])
async def test_answers_are_handed_back_only_where_the_run_goes_on(is_over: bool) -> None:
    """Ctrl-C ends replay at the same time, whose Goodbye may be here first."""
    loop, server = asyncio.get_running_loop(), server_of(sent := Wire())
    server.generator.running_tokens = dict  # type: ignore[method-assign]
    serving: asyncio.Future[bool] = loop.create_future()
    loop.call_later(0.0 if is_over else 3 * SETTLE_S, serving.set_result, False)
    await server.leave(serving)
    assert serving.done() and any(isinstance(message, m.Goodbye) for message in sent) is not is_over


@pytest.mark.parametrize(("lease_s", "least", "most"), [(120.0, 8, 99), (0.8, 1, 7)])
async def test_a_server_whose_loop_is_held_up_beats_for_as_long_as_a_lease_lives(
    lease_s: float, least: int, most: int
) -> None:
    """So one that compiles for long is not ended as silent, and one that stands still is."""
    router = AsyncRouter("127.0.0.1", 0, "run", m.TO_REPLAY)

    async def held_up() -> None:
        time.sleep(2.5)  # noqa: ASYNC251
        raise EngineError("over")

    async def serves() -> None:
        server = server_of(AsyncDealer(router.address, "rollout-0", m.FROM_REPLAY))
        server.config = server.config.model_copy(update={"replay": Replay(lease_s=lease_s)})
        server.engine.health = held_up  # type: ignore[method-assign]
        try:
            await serve(server)
        finally:
            server.dealer.close()

    serving = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(serves())))
    beats = list[m.Heartbeat]()
    while not serving.done():
        await router.wait(0.1)
        while (arrived := await router.receive()) is not None:
            assert not isinstance(arrived[1], WireError) and arrived[0] == "rollout-0"
            beats += [arrived[1].message] if isinstance(arrived[1].message, m.Heartbeat) else []
    router.close()
    with pytest.raises(ExceptionGroup) as ended:
        await serving
    assert ended.group_contains(EngineError, match="over")
    assert least <= len(beats) <= most and {beat.activity for beat in beats} == {"joining"}


async def test_messages_leave_in_the_order_in_which_they_were_said() -> None:
    """What replay takes for lost is told by their order: the second may not overtake one that waits for room."""
    room = asyncio.Event()

    class Slow(Wire):
        async def send(self, message: Any) -> None:
            if message.gauges["n"] == 1.0:
                await room.wait()
            await super().send(message)

    sent = Slow()
    server = server_of(sent)
    async with asyncio.TaskGroup() as tasks:
        for gauges in ({"n": 1.0}, {"n": 2.0}):
            server.leases.outbox.append(m.Heartbeat(gauges=gauges))
            tasks.create_task(server.flush())
            await asyncio.sleep(0)
        room.set()
    assert [message.gauges["n"] for message in sent] == [1.0, 2.0]


@pytest.mark.parametrize("lives", [True, False])
async def test_a_request_that_the_engine_refuses_fails_its_lease_while_the_engine_lives(lives: bool) -> None:
    async def refuse(*_: Any) -> None:
        raise EngineError("too long")

    async def health() -> None:
        if not lives:
            raise EngineError("the engine is dead")

    sent = Wire()
    server = server_of(sent)
    server.generator.group, server.engine.health = refuse, health  # type: ignore[method-assign,assignment]
    given = m.Lease(pass_=0, index=1, attempt=1, min_version=0, lease_s=9.0, seed=1, prompt={})
    if lives:
        async with asyncio.TaskGroup() as tasks:
            await server.handle(given, tasks)
        assert [(one.reason, one.index) for one in sent] == [("engine_error", 1)]
        return
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            await server.handle(given, tasks)
    assert ended.group_contains(EngineError, match="dead") and not sent


async def test_a_lease_whose_prompt_is_still_encoded_is_renewed_with_partial_rollouts_and_sglang(folder: Path) -> None:
    async def close() -> None: ...

    model = {"model": {"path": str(folder)}, "data": {"train": "none"}, "rollout": {"group_size": 2}}
    config = Config.model_validate(model)
    engine = SGLangEngine(config, lambda _: SimpleNamespace(close=close))  # type: ignore[arg-type,return-value]
    generator = Generator(config, engine, None, None)  # type: ignore[arg-type]
    renew = ProgressReports(2, partial_rollouts=True).renew([((0, 1, 1), "0/1/1")], {}, generator)
    assert (renew.leases, renew.progress) == ([[0, 1, 1, 0]], [])
    await engine.close()


async def test_an_update_that_waits_too_long_in_sglang_names_the_key_of_its_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the hang report is written beside the loop: the server goes on."""
    reports = list[Any]()

    def expired(_: str, *, key: str, ends: bool = True, **__: Any) -> str:
        reports.append((key, ends))
        return ""

    monkeypatch.setattr(sglang_process, "expired", expired)
    limits = {"evaluation": {"deadline_s": 0.05}, "replay": {"lease_s": 0.05}, "rollout": {"engine_deadline_s": 0.05}}
    config = Config.model_validate({"model": {"path": str(folder)}, "data": {"train": "none"}, **limits})

    class Process(SGLangProcess):
        def __init__(self, _: Any) -> None:
            self.deadline_s = config.rollout.engine_deadline_s

        def check_alive(self) -> None: ...

        def abort(self, rid: str) -> None: ...

        async def pause(self) -> None: ...

        async def close(self) -> None: ...

    engine = SGLangEngine(config, Process)
    await engine.pin(0)
    engine.hold(0)
    answer = ResumableAnswer("0/1/1", [3], Sampling(max_new_tokens=1), pinned=None)
    answer.part = AnswerPart(rid="a", version=0)
    engine._answers[answer] = None
    for mode, key in (("drain", "replay.lease_s"), ("keep_kv", "rollout.engine_deadline_s")):
        with pytest.raises(EngineError, match=rf"an update waited 0 s for .* \({key}\)"):
            await engine.pause(mode)  # type: ignore[arg-type]
    assert "the evaluation (evaluation.deadline_s)" in caplog.text
    wanted = ["evaluation.deadline_s", "replay.lease_s", "rollout.engine_deadline_s"]
    assert reports == [(key, False) for key in wanted]
    engine._answers.clear()
    await engine.close()
