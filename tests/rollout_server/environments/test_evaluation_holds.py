"""An evaluation whose episodes wait for their slots: it keeps its version from its lease on, and comes first."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replay import messages as m
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.server import RolloutServer
from rollout_server.tasks.environments.pool import Places
from tests.rollout_server.environments.test_episodes import CAP, lease, playing
from tests.rollout_server.small_generator import PROMPT, evaluation_lease
from tests.support.waiting import eventually

EVALUATION = evaluation_lease(CAP, prompts=[{**PROMPT, "ground_truth": "0"}])


class StandIn:
    """In place of SGLang's process: each answer is one token."""

    vocab_size, deadline_s, late_tokens = 100, 30.0, 0
    until = SGLangProcess.until

    def __init__(self, _: Any) -> None:
        pass

    def check_alive(self) -> None:
        pass

    async def death(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        meta = {"output_token_logprobs": [(-0.5, 7, None)], "finish_reason": {"type": "length"}}
        yield {"output_ids": [7], "meta_info": meta}

    def abort(self, _: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Sent(list[Any]):
    """In place of the channel to replay."""

    async def send(self, message: Any) -> None:
        self.append(message)


async def test_an_accepted_evaluation_keeps_its_version_while_its_episodes_wait(folder: Path) -> None:
    async with playing(folder, "lingers", max_episodes=1) as generator, asyncio.TaskGroup() as tasks:
        engine = SGLangEngine(generator.config, StandIn)  # type: ignore[arg-type]
        generator, sent = replace(generator, engine=engine), Sent()
        server = RolloutServer(generator.config, generator, sent, name="server", fingerprint={})  # type: ignore[arg-type]
        await engine.pin(0)
        for index in (1, 2):  # one of six episodes runs
            await server.handle(lease(index, ground_truth="600"), tasks)
        await eventually(lambda: sum(generator.running_tokens().values()) > 0, "a turn")
        await server.handle(EVALUATION, tasks)
        pausing = tasks.create_task(engine.pause("keep_kv"))
        await asyncio.sleep(0.1)
        assert not pausing.done() and engine.holds() == 0
        generator.abort("0/1/1")
        await eventually(lambda: any(not isinstance(one, m.Cancel) for one in sent), "what the evaluation came to")
        (result,) = [one for one in sent if not isinstance(one, m.Cancel)]
        assert isinstance(result, m.EvaluationResult) and result.lengths.tolist() == [1, 1], result
        assert not pausing.done()
        await server.handle(m.EvaluationClosed(version=0), tasks)
        await pausing
        assert engine.holds() is None
        generator.abort("0/2/1")
        await engine.close()


async def test_a_slot_goes_first_to_evaluations_and_comes_back_from_those_called_off() -> None:
    places, order = Places(1), list[str]()

    def place(pinned: int | None = None) -> Any:
        return places.one(SimpleNamespace(pinned=pinned, aborted=False))  # type: ignore[arg-type]

    async def take(name: str, pinned: int | None = None) -> None:
        async with place(pinned):
            order.append(name)

    async with asyncio.timeout(5):
        async with place():
            wanted = [take("called off", 0), take("a"), take("b"), take("evaluation", 0)]
            tasks = [asyncio.create_task(one) for one in wanted]
            await asyncio.sleep(0)
            tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["evaluation", "a", "b"]
        async with place():
            late = asyncio.create_task(take("late"))
            await asyncio.sleep(0)
        late.cancel()  # in the moment in which it is given the place
        await asyncio.gather(late, return_exceptions=True)
        await take("after it")
    assert places.free == 1 and not places.waiting


async def test_a_renewal_says_which_leases_wait_for_a_place(folder: Path) -> None:
    async with playing(folder, "lingers", max_episodes=1) as generator, asyncio.TaskGroup() as tasks:
        sent = Sent()
        server = RolloutServer(generator.config, generator, sent, name="server", fingerprint={})  # type: ignore[arg-type]
        for index in (1, 2):
            await server.handle(lease(index, ground_truth="600"), tasks)
        await eventually(lambda: sum(generator.running_tokens().values()) > 0, "a turn")
        server.leases.beat(time.monotonic(), {}, generator, sampled=5)
        _, renew = server.leases.outbox
        assert isinstance(renew, m.Renew) and (renew.leases[1], renew.queued, renew.sampled) == ([0, 2, 1, 0], [1], 5)
        generator.abort("0/1/1")
        await eventually(lambda: generator.queued() == set(), "the place is free")
        generator.abort("0/2/1")


async def test_a_request_without_a_token_waits_in_sglang(folder: Path) -> None:
    go_on = asyncio.Event()

    class Slow(StandIn):
        async def generate(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"output_ids": [7], "meta_info": {"completion_tokens": 1}}
            await go_on.wait()
            async for output in super().generate():
                yield output

    async with playing(folder, "lingers") as generator:
        rollout = generator.config.rollout.model_copy(update={"max_running": 2})
        engine = SGLangEngine(generator.config.model_copy(update={"rollout": rollout}), Slow)  # type: ignore[arg-type]
        sampling = generator.sampling(1)
        calls = [asyncio.ensure_future(engine.generate([1], sampling, 2, request_id=name)) for name in ("a", "b")]
        await eventually(lambda: engine.running_tokens() == {"a": 2, "b": 0}, "tokens of the first")
        assert engine.waiting() == {"b"}
        go_on.set()
        await asyncio.gather(*calls)
        assert engine.waiting() == set()
        await engine.close()


async def test_an_evaluation_of_other_prompts_takes_the_place_of_the_one_that_runs(folder: Path) -> None:
    """Replay was restarted with others; the same again is what it came to, without any work."""
    async with playing(folder, "lingers", max_episodes=2) as generator, asyncio.TaskGroup() as tasks:
        await generator.engine.pin(0)
        sent = Sent()
        server = RolloutServer(generator.config, generator, sent, name="server", fingerprint={})  # type: ignore[arg-type]
        before = replace(EVALUATION, asked="before", prompts=[{**PROMPT, "ground_truth": "600"}])
        now = replace(EVALUATION, asked="now")
        await server.handle(before, tasks)
        await asyncio.sleep(0.1)
        await server.handle(now, tasks)
        await server.handle(now, tasks)
        await eventually(lambda: bool(sent), "a result")
        tokens = (await generator.engine.health()).generated_tokens
        await server.handle(now, tasks)
        await eventually(lambda: len(sent) == 2, "the result again")
        assert [one.asked for one in sent] == ["now", "now"] and sent[0] is sent[1] and not server.leases.evaluating
        assert (await generator.engine.health()).generated_tokens == tokens
        await server.handle(m.EvaluationClosed(version=0), tasks)
