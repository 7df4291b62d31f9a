"""Between rollout servers and reward servers, over real sockets: each request is answered once, whatever dies."""

import asyncio
import itertools
import math
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_runs import sample

from configs import Config
from configs.loading import load
from learner.launch.hosts.key_files import keys_for, write_keys
from replay import keys as make_keys
from replay.channel import AsyncDealer, AsyncRouter, Keys, load_keys
from rollout_server.reward_model import client as client_module
from rollout_server.reward_model import server as server_module
from rollout_server.reward_model.client import RewardClient
from rollout_server.reward_model.combined import Combined, rewards_of
from rollout_server.reward_model.messages import FROM_REWARD, MAX_SAMPLES, TO_REWARD, Score, Scores
from rollout_server.reward_model.server import RewardServer, problem_of
from rollout_server.rewards import RewardError, RewardOutcome, Sample
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REPEAT_S", 0.1)
    monkeypatch.setattr(client_module, "HELLO_S", 0.05)
    monkeypatch.setattr(client_module, "UNANSWERED_HELLO_S", 0.1)
    monkeypatch.setattr(client_module, "TURN_S", 0.02)


class Counting:
    """A model whose scores no two calls share: 1000 a call, and the place in it."""

    def __init__(self, first: float = 0.0, *, waits: bool = False) -> None:
        self.first, self.go_on = first, threading.Event()
        self.calls: list[list[str]] = []
        if not waits:
            self.go_on.set()

    def score(self, samples: Sequence[tuple[Any, str]]) -> list[tuple[float, str]]:
        self.calls.append([completion for _, completion in samples])
        assert self.go_on.wait(30)
        base = self.first + 1000 * len(self.calls)
        return [(math.nan, "bad") if text == "bad" else (base + n, "") for n, (_, text) in enumerate(samples)]


class Life:
    """A reward server in this process, until `end`: as abrupt as a kill, for those at the other end."""

    def __init__(self, model: Counting, port: int = 0, path: str = "models/reward", keys: Keys | None = None) -> None:
        self.model = model
        self._router = AsyncRouter("127.0.0.1", port, "rewards of test", TO_REWARD, keys=keys)
        self.address = self._router.address
        self.port = int(self.address.rpartition(":")[2])
        self._serving = asyncio.create_task(RewardServer(self._router, lambda: model, path).serve())

    async def end(self) -> None:
        if not self._serving.done():
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            if self._router._gate is None:
                self._router._socket.close(linger=0)
            self._router.close()
        self.model.go_on.set()


def config_of(**keys: Any) -> Config:
    settings = {"reward.model.path": "models/reward", "reward.function": "model", "reward.model.timeout_s": 30} | keys
    return load("quickstart", [f"{key}={value}" for key, value in settings.items()])


@asynccontextmanager
async def asking(*lives: Life, **keys: Any) -> AsyncIterator[RewardClient]:
    try:
        async with RewardClient(config_of(**keys), [life.address for life in lives], "rollout-0") as client:
            yield client
    finally:
        for life in lives:
            await life.end()


def samples_of(*texts: str) -> list[Sample]:
    return [sample(text) for text in texts]


async def test_scores_come_in_the_order_of_the_samples_in_requests_of_a_bounded_size() -> None:
    texts = [str(number) for number in range(MAX_SAMPLES + 3)]
    life = Life(Counting())
    async with asking(life) as client:
        judged = await client.score(samples_of(*texts))
        assert sorted(itertools.chain(*life.model.calls), key=int) == texts
        assert all(error == "" for _, error in judged)
        assert [int(score) % 1000 for score, _ in judged[:MAX_SAMPLES]] == list(range(MAX_SAMPLES))
        (_, error), (score, fine) = await client.score(samples_of("bad", "good"))
        assert error == "bad" and fine == "" and math.isfinite(score)
        assert await client.score([]) == []


async def test_a_request_that_comes_again_is_scored_once_and_has_one_answer() -> None:
    life = Life(Counting(waits=True))
    dealer = AsyncDealer(life.address, "asks-often", FROM_REWARD)
    request = Score(number=7, prompts=["1+1="], completions=["2"])
    try:
        for _ in range(3):
            await dealer.send(request)
        await eventually(lambda: life.model.calls, "the request is being scored")
        await dealer.send(request)
        life.model.go_on.set()
        answers = [await dealer.receive(10)]
        await dealer.send(request)
        while (envelope := await dealer.receive(0.3)) is not None:
            answers.append(envelope)
        assert life.model.calls == [["2"]] and len(answers) >= 2
        found = [envelope.message for envelope in answers if envelope is not None]
        assert {(type(m), m.number, *m.scores.tolist()) for m in found} == {(Scores, 7, 1000.0)}  # type: ignore[attr-defined]
    finally:
        dealer.close()
        await life.end()


async def test_a_reward_server_that_dies_in_the_middle_of_a_batch_is_asked_again() -> None:
    """Every group has the scores of one life alone."""
    first = Life(Counting(first=1e6, waits=True))
    async with asking(first) as client:
        groups = [asyncio.create_task(client.score(samples_of(*"abcd"))) for _ in range(5)]
        await eventually(lambda: first.model.calls, "the first life is in the middle of a batch")
        await first.end()
        assert not any(group.done() for group in groups)
        second = Life(Counting(first=2e6), first.port)
        try:
            for judged in await asyncio.gather(*groups):
                assert [(score > 2e6, error) for score, error in judged] == [(True, "")] * 4
                assert [score - judged[0][0] for score, _ in judged] == [0, 1, 2, 3]
            assert sorted(itertools.chain(*second.model.calls)) == sorted("abcd" * 5), "none is scored twice"
        finally:
            await second.end()


async def test_past_its_deadline_a_request_is_an_error_that_says_of_whom_and_why() -> None:
    life = Life(Counting(waits=True))
    async with asking(life, **{"reward.model.timeout_s": 0.3}) as client:
        (score, error), other = await client.score(samples_of("1", "2"))
        assert math.isnan(score) and other[1] == error
        assert error.startswith("waited 0.3 s for the reward model (reward.model.timeout_s)")
        assert life.address in error and error.endswith("ready [slow]")
        await life.end()
        ((_, error),) = await client.score(samples_of("1"))
        assert "waited 0.3 s" in error and "last heard" in error


async def test_requests_move_to_another_reward_server_when_theirs_falls_silent() -> None:
    dies, lives = Life(Counting(first=1e6, waits=True)), Life(Counting(first=2e6))
    async with asking(dies, lives, **{"network.silent_after_s": 0.3}) as client:
        await eventually(lambda: all(line.activity == "ready" for line in client._lines), "both are ready")
        groups = [asyncio.create_task(client.score(samples_of("a", "b"))) for _ in range(4)]
        await eventually(lambda: dies.model.calls and lives.model.calls, "both have work")
        await dies.end()
        assert all(score > 2e6 for judged in await asyncio.gather(*groups) for score, _ in judged)


async def test_who_waits_in_vain_at_the_start_names_the_reward_server() -> None:
    life = Life(Counting())
    await life.end()
    with pytest.raises(RewardError, match=r"waited 0\.2 s .*rollout\.wait_for_servers_s.*nothing was heard \[silent\]"):
        async with asking(life, **{"rollout.wait_for_servers_s": 0.2}):
            pass
    with pytest.raises(RewardError, match=r"refused 'rollout-0': this reward server has .*models/other"):
        async with asking(Life(Counting(), path="models/other")):
            pass
    with pytest.raises(RewardError, match=r"reward\.model\.path: no address of a reward server.*--reward"):
        async with rewards_of(config_of(), [], "rollout-0"):
            pass


async def test_calls_that_wait_end_with_the_connection() -> None:
    life = Life(Counting(waits=True))
    async with asking(life) as client:
        waiting = asyncio.create_task(client.score(samples_of("1")))
        await eventually(lambda: life.model.calls, "the request is being scored")
        await client.close()
        with pytest.raises(RewardError, match="was closed"):
            await waiting
        with pytest.raises(RewardError, match="was closed"):
            await client.score(samples_of("1"))


async def test_a_request_that_its_sender_has_given_up_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GONE_S", 0.3)
    life = Life(Counting(waits=True))
    async with asking(life, **{"reward.model.timeout_s": 0.1}) as client:
        for texts in (["now"], ["abandoned"] * 100):
            assert all(error for _, error in await client.score(samples_of(*texts)))
        await asyncio.sleep(0.6)
        life.model.go_on.set()
        client._model = client._model.model_copy(update={"timeout_s": 30.0})
        ((_, error),) = await client.score(samples_of("later"))
        assert error == "" and life.model.calls == [["now"], ["later"]]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Keys of the learner's node, as they are shipped to two others, and of a stranger who knows a public one."""
    monkeypatch.setattr(client_module, "is_loopback", lambda _: False)
    made = {name: tmp_path / name for name in ("node0", "node1", "node2", "stranger")}
    make_keys.make(made["node0"], ["node1", "node2"], force=False)
    for name in ("node1", "node2"):
        write_keys(str(made[name]), keys_for(str(made["node0"]), name, serves=False, meets_others=True))
    make_keys.make(made["stranger"], ["node2"], force=False)
    shutil.copy(made["node0"] / "clients" / "node1.key", made["stranger"] / "clients")
    return made


def client_of(address: str, keys: Path | None) -> RewardClient:
    placement = {"placement.rollout": "node2:0", "placement.learner": "node0:0", "rollout.wait_for_servers_s": 10}
    return RewardClient(config_of(**placement, **{"network.keys": keys or "null"}), [address], "rollout-0")


@pytest.mark.parametrize("node", ["node0", "node1"])
async def test_between_nodes_both_ends_prove_themselves(folders: dict[str, Path], node: str) -> None:
    """On the learner's node with the server's key, elsewhere with that node's own, which no other one has."""
    keys = load_keys(folders[node]).on_this_node()
    assert (keys.serving_secret() == keys.client_secret) is (node == "node1")
    life = Life(Counting(), keys=keys)
    try:
        async with client_of(f"{node}={life.address}", folders["node2"]) as client:
            assert await client.score(samples_of("a")) == [(1000.0, "")]
    finally:
        await life.end()


@pytest.mark.parametrize(("who", "words"), [("stranger", "refused the key of this node"), ("", "wants CURVE keys")])
async def test_a_reward_server_of_another_node_refuses_strangers(
    folders: dict[str, Path], who: str, words: str
) -> None:
    life = Life(Counting(), keys=load_keys(folders["node1"]).on_this_node())
    try:
        with pytest.raises(RewardError, match=words):
            async with client_of(f"node1={life.address}", folders[who] if who else None):
                pass
        assert life.model.calls == []
    finally:
        await life.end()


@pytest.mark.parametrize(
    ("prompts", "completions", "problem"),
    [
        (["1"], ["2"], None),
        ([[{"role": "user", "content": "1"}]], ["2"], None),
        (["1"], [], "1 prompts and 0 answers"),
        ([], [], "0 prompts and 0 answers"),
        (["1", "2"], ["2"], "2 prompts and 1 answers"),
        ([[]], ["2"], "neither text nor chat messages"),
        ([3], ["2"], "neither text nor chat messages"),
        ([[{"role": "user"}]], ["2"], "neither text nor chat messages"),
        ([[{"role": "user", "content": [1]}]], ["2"], "neither text nor chat messages"),
        (["1"] * (MAX_SAMPLES + 1), ["2"] * (MAX_SAMPLES + 1), "65 prompts and 65 answers"),
    ],
)
def test_requests_are_checked(prompts: list[Any], completions: list[str], problem: str | None) -> None:
    found = problem_of(Score(number=0, prompts=prompts, completions=completions))
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("scores", "errors", "fits"),
    [
        ([1.0, 2.0], ["", ""], True),
        ([1.0, math.nan], ["", "bad"], True),
        ([1.0], [""], False),
        ([1.0, 2.0], [""], False),
        ([1.0, 2.0], ["", "bad"], False),
        ([1.0, math.inf], ["", ""], False),
    ],
)
def test_answers_are_checked(scores: list[float], errors: list[str], fits: bool) -> None:
    answer = Scores(number=0, scores=np.array(scores, np.float32), errors=errors)
    assert (client_module.problem_of(answer, 2) is None) is fits


# ---- with a function ----------------------------------------------------------------------------------------


class Of:
    """Stands for a pool or a client."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.seen = answer, []

    async def score(self, samples: Sequence[Sample]) -> Any:
        self.seen.append([dict(each) for each in samples])
        return self.answer


def outcome(score: float, **keys: Any) -> RewardOutcome:
    return RewardOutcome(score=score, seconds=0.5, **keys)


async def test_a_function_gets_the_models_score_and_both_are_added_by_weight() -> None:
    model = Of([(2.0, ""), (math.nan, "too long"), (4.0, ""), (1.0, "")])
    function = Of([outcome(1.0, metrics={"has_number": 1.0}), outcome(0.0), outcome(math.nan, error="raised")])
    combined = Combined(model, function, 0.5)  # type: ignore[arg-type]
    outcomes = await combined.score(samples_of("a", "b", "c", "d"))
    assert [each["model_score"] for each in function.seen[0]] == [2.0, 4.0, 1.0]
    assert [each["completion"] for each in function.seen[0]] == ["a", "c", "d"]
    assert [o.score for o in outcomes if not o.error] == [1.0 + 0.5 * 2.0, 0.5 * 4.0]
    assert [o.error for o in outcomes] == [None, "too long", None, "raised"]
    metrics = dict(outcomes[0].metrics)
    assert metrics.pop("model_seconds") >= 0
    assert metrics == {"has_number": 1.0, "function_score": 1.0, "model_score": 2.0}


async def test_a_model_alone_needs_no_processes_for_a_function() -> None:
    outcomes = await Combined(Of([(2.0, ""), (math.nan, "bad")]), None, 0.0).score(samples_of("a", "b"))  # type: ignore[arg-type]
    assert (outcomes[0].score, outcomes[0].metrics["model_score"], outcomes[1].error) == (2.0, 2.0, "bad")
    life = Life(Counting())
    async with rewards_of(config_of(), [life.address], "rollout-0") as rewards:
        assert isinstance(rewards, Combined) and rewards._functions is None
        (found,) = await rewards.score(samples_of("a"))
        assert found.score == 1000.0 and found.error is None
    await life.end()


async def test_without_a_model_all_is_as_it_was(tmp_path: Path) -> None:
    config = config_of(**{"reward.model.path": "null", "reward.function": "exact"})
    async with rewards_of(config, [], "rollout-0") as rewards:
        (found,) = await rewards.score([sample("42", "42")])
        assert found.score == 1.0 and found.metrics == {}
