"""Forced lengths (scripts/bench/server.py) through the real generator, torch engine, tokenizer and rewards."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_generator import PROMPT, config_of, generating, until

from configs import Config
from replay import messages as m
from rollout_server.engines import EngineError, Sampling
from rollout_server.generate import LeaseFailed
from scripts.bench.model import SHAPES, make
from scripts.bench.server import forced_length

GROUP, CAP, MEDIAN, SIGMA = 6, 40, 12, 0.7


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make("tiny", path, 0)
    return config_of(path, GROUP, CAP)


def lease(seed: int) -> m.Lease:
    return m.Lease(pass_=0, index=seed, attempt=1, min_version=0, lease_s=60.0, seed=seed, prompt=PROMPT)


def expected(seed: int) -> list[int]:
    return [forced_length(seed, i, median=MEDIAN, sigma=SIGMA, limit=CAP) for i in range(GROUP)]


@given(
    seed=st.integers(0, 2**31 - 1),
    index=st.integers(0, 100),
    median=st.integers(1, 4096),
    sigma=st.floats(0, 3),
    limit=st.integers(1, 8192),
)
def test_a_length_is_in_bounds_and_always_the_same(
    seed: int, index: int, median: int, sigma: float, limit: int
) -> None:
    length = forced_length(seed, index, median=median, sigma=sigma, limit=limit)
    assert 1 <= length <= limit
    assert length == forced_length(seed, index, median=median, sigma=sigma, limit=limit)


def test_lengths_are_lognormal() -> None:
    drawn = [forced_length(s, i, median=512, sigma=0.7, limit=10**9) for s in range(500) for i in range(8)]
    logs = np.log(drawn)
    assert abs(logs.mean() - np.log(512)) < 0.04
    assert abs(logs.std() - 0.7) < 0.03
    assert abs(((logs - logs.mean()) ** 3).mean() / 0.7**3) < 0.15, "symmetric in the logarithm"


async def test_answers_have_their_lengths_and_no_token_stops_them(config: Config) -> None:
    async with generating(config, MEDIAN, SIGMA) as generator:
        generator.task.stop_token_ids = tuple(range(SHAPES["tiny"]["vocab_size"]))
        first, again, other = await asyncio.gather(
            generator.group(lease(3), "0/3/1"),
            generator.group(lease(3), "0/3/2"),
            generator.group(lease(4), "0/4/1"),
        )
        assert generator.running_tokens() == {}
    assert first.lengths.tolist() == expected(3) and other.lengths.tolist() == expected(4)
    assert first.lengths.tolist() != other.lengths.tolist()
    assert first.finish_reasons == ["length"] * GROUP
    assert first.token_ids.tolist() == again.token_ids.tolist()
    answers = np.split(first.token_ids, np.cumsum(first.lengths)[:-1])
    assert len({tuple(answer[:4].tolist()) for answer in answers}) == GROUP, "each has a random stream of its own"


async def test_without_a_median_stop_tokens_end_answers(config: Config) -> None:
    async with generating(config) as generator:
        generator.task.stop_token_ids = tuple(range(SHAPES["tiny"]["vocab_size"]))
        group = await generator.group(lease(3), "0/3/1")
    assert group.lengths.tolist() == [1] * GROUP
    assert group.finish_reasons == ["stop"] * GROUP


@pytest.mark.parametrize("median", [0, CAP * 100], ids=["one request", "one for each answer"])
async def test_a_lease_is_renewed_and_aborted_by_its_own_name(config: Config, median: int) -> None:
    async with generating(config, median, sigma=0.0) as generator:
        await generator.engine.pause("keep_kv")
        doomed = asyncio.create_task(generator.group(lease(1), "0/1/1"))
        other = asyncio.create_task(generator.group(lease(11), "0/11/1"))
        await until(lambda: len(generator.running_tokens()) == 2)
        await generator.engine.resume()
        await until(lambda: generator.running_tokens().get("0/1/1"))
        await generator.engine.pause("keep_kv")
        assert set(generator.running_tokens()) == {"0/1/1", "0/11/1"}
        generator.abort("0/1/1")
        generator.abort("nobody")
        await generator.engine.resume()
        with pytest.raises(LeaseFailed, match="aborted"):
            await doomed
        assert (await other).lengths.size == GROUP


async def test_when_one_answer_is_refused_the_others_end(config: Config) -> None:
    async with generating(config, CAP * 100) as generator:
        await generator.engine.pause("keep_kv")
        blocker = asyncio.create_task(
            generator.engine.generate([5], Sampling(max_new_tokens=30), 1, request_id="0/1/1#2")
        )
        await until(generator.running_tokens)
        with pytest.raises(EngineError, match="already running"):
            await generator.group(lease(1), "0/1/1")
        await generator.engine.resume()
        await until(lambda: not generator.running_tokens())
        assert (await blocker)[0].finish_reason == "abort"
        assert (await generator.engine.health()).generated_tokens < GROUP * CAP, "nobody decodes for nobody"
