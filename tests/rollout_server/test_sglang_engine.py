"""SGLang as an engine: answers, prefixes, refusals, half updates, evaluations; its logprobs over twenty updates.

The tests of one part fail when the guard against what SGLang does wrong without a word is removed: KV of older weights
in the prefix cache that serves new requests, and a pause that aborts and hands back half an answer as if it were one.
"""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.base import Completion, EngineError, Partial, Sampling
from tests.rollout_server.sglang_served import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    TOLERANCE,
    Served,
    check_logprobs,
    digests,
    random_model,
    staged,
)
from tests.rollout_server.torch_oracle import error, logprobs_of, logprobs_over_kept_kv

PROMPT = [(5 * i + 1) % 40 for i in range(24)]
MANY = 160
"""So many tokens last longer than a busy machine takes to do something meanwhile."""
LONG = Sampling(max_new_tokens=MANY)


async def shown_midway(served: Served, n: int, name: str) -> list[Partial]:
    """What the answers of a request had shown when it was called off."""
    task = served.loop.create_task(served.engine.generate(PROMPT, LONG, n, request_id=name), name=name)
    await served.under_way(task)
    while min(part.token_ids.size for part in served.engine.progress(name)) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    shown: list[Partial] = served.engine.progress(name)
    served.engine.abort(name)
    for part, answer in zip(shown, await task, strict=True):
        assert answer.finish_reason == "abort" and 1 < part.token_ids.size <= answer.token_ids.size < MANY
        count = part.token_ids.size
        for name in ("token_ids", "logprobs", "versions"):
            assert getattr(part, name).tolist() == getattr(answer, name)[:count].tolist()
    assert served.engine.progress(task.get_name()) == []
    return shown


async def test_an_answer_goes_on_under_other_weights(served: Served) -> None:
    old, before = served.model, served.version
    shown = await shown_midway(served, 3, "first")
    new = await served.update(301, "keep_kv")
    first = {name: getattr(shown[2], name)[:2] for name in ("token_ids", "logprobs", "versions")}
    ended = Partial(**first, finish_reason="stop")
    answers = await served.engine.generate(PROMPT, LONG, 3, request_id="second", prefixes=[*shown[:2], ended])
    assert answers[2].finish_reason == "stop" and answers[2].token_ids.tolist() == ended.token_ids.tolist()
    for part, answer in zip(shown[:2], answers, strict=False):
        count = part.token_ids.size
        assert answer.finish_reason == "length"
        assert answer.versions.tolist() == [before] * count + [before + 1] * (MANY - count)
        assert answer.token_ids[:count].tolist() == part.token_ids.tolist()
        check_logprobs(old, PROMPT, answer, before)
        check_logprobs(new, PROMPT, answer, before + 1)
    with pytest.raises(EngineError, match="1 prefixes for 2 answers"):
        await served.engine.generate(PROMPT, LONG, 2, request_id="x", prefixes=[ended])


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_what_is_shown_over_an_update_is_never_newer_than_it_is(served: Served, mode: str) -> None:
    before = served.version
    task = served.loop.create_task(served.engine.generate(PROMPT, LONG, 2, request_id="a"), name="a")
    await served.under_way(task)
    pieces = [served.engine.progress("a")]
    told = [part.token_ids.size for part in pieces[0]]
    await served.update(302, mode)
    while not task.done():
        new = served.engine.progress("a", told)
        if any(part.token_ids.size for part in new):
            pieces.append(new)
            told = [count + part.token_ids.size for count, part in zip(told, new, strict=True)]
        await asyncio.sleep(0.002)
    for index, answer in enumerate(task.result()):
        tokens, versions = (np.concatenate([getattr(p[index], k) for p in pieces]) for k in ("token_ids", "versions"))
        count = tokens.size
        assert len(pieces) > 2 and count > MANY // 2
        assert answer.token_ids.size == MANY, "what an update interrupts comes back whole"
        assert tokens.tolist() == answer.token_ids[:count].tolist()
        assert (versions <= answer.versions[:count]).all() and (np.diff(versions) >= 0).all()
        assert set(answer.versions.tolist()) == {before, before + 1} == set(versions.tolist())


async def test_what_is_sampled_since_an_order_is_shown_once_the_caller_has_compared(served: Served) -> None:
    before, old, new = served.version, served.model, random_model(306)
    long, short = (served.start_sample(PROMPT, max_new_tokens=count) for count in (MANY, 32))
    for task in (long, short):
        await served.under_way(task)
    await served.engine.pause("keep_kv")
    await served.engine.load(staged(new), before + 1, digests(new))
    shown = [served.engine.progress(task.get_name())[0].token_ids.size for task in (long, short)]
    decoding = served.engine.sglang._manager.rid_to_state
    while len(decoding) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.002)  # SGLang goes on, and the short one ends there
    assert shown == [served.engine.progress(task.get_name())[0].token_ids.size for task in (long, short)]
    assert not short.done()
    assert await served.engine.digest() == digests(new)
    await served.engine.resume()
    served.model, served.version = new, before + 1
    for task in (short, long):
        check_in_flight("keep_kv", {before: old, before + 1: new}, PROMPT, (await task)[0])
        assert set((await task)[0].versions.tolist()) == {before, before + 1}


async def refused(call: Any, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        await call


async def test_answers_of_version_0_and_their_digests(served: Served) -> None:
    await served.update(0, "drain")
    assert await served.engine.digest() == digests(served.model)  # taken anew, without an update
    (warm,) = await served.sample(PROMPT, temperature=0.6)
    assert error(warm, logprobs_of(served.model, PROMPT, warm, temperature=0.6)) <= TOLERANCE
    answers = await served.sample(PROMPT, 4)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1, "all answers are the same"
    for answer in answers:
        assert answer.finish_reason == "length"
        check_logprobs(served.model, PROMPT, answer)
    (greedy,) = await served.sample(PROMPT, greedy=True)
    with torch.inference_mode():
        logits = served.model(torch.tensor([PROMPT + greedy.token_ids.tolist()])).logits[0]
    assert greedy.token_ids.tolist() == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    stop = int(greedy.token_ids[3])
    (stopped,) = await served.sample(PROMPT, greedy=True, stop_token_ids=(stop,))
    first = greedy.token_ids.tolist().index(stop)
    assert stopped.finish_reason == "stop" and stopped.token_ids.tolist() == greedy.token_ids[: first + 1].tolist()


async def test_its_processes_take_the_threads_that_they_are_given(served: Served) -> None:
    assert served.config().rollout.num_threads == 1
    for pid in served.engine.sglang.pids():
        assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_requests_that_do_not_fit_are_refused(served: Served) -> None:
    await refused(served.sample([1] * PROMPT_TOKENS, max_new_tokens=NEW_TOKENS + 1), "exceeds the context of")
    await refused(served.engine.load(staged(served.model), 99), "while the engine decodes; pause it first")


async def test_a_half_updated_engine_does_not_serve_until_it_is_healed(served: Served) -> None:
    before = served.version
    model = random_model(201)
    await served.engine.pause("keep_kv")
    name = "model.layers.1.self_attn.q_proj.weight"
    broken = [(n, t.T.contiguous() if n == "model.embed_tokens.weight" else t) for n, t in staged(model)]
    await refused(served.engine.load(broken, before + 1), "scheduler 0 could not load")
    await refused(served.engine.resume(), "half updated")
    missing = [(n, t) for n, t in staged(model) if n != name]
    await served.engine.load(missing, before + 1)
    assert digests(model).items() > (await served.engine.digest()).items(), "a tensor that is missing shows"
    await served.engine.load(staged(model), before + 1)
    assert await served.engine.digest() == digests(model)
    await served.engine.resume()
    served.model, served.version = model, before + 1
    (answer,) = await served.sample(PROMPT)
    assert set(answer.versions.tolist()) == {before + 1}
    check_logprobs(model, PROMPT, answer)


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv"])
async def test_a_pause_that_fails_lets_requests_go_on(served: Served, mode: str) -> None:
    async def refuse(*_: Any) -> None:
        raise EngineError("no pause")

    kept = served.start_sample(PROMPT, max_new_tokens=MANY)
    await served.under_way(kept)
    until = served.engine.sglang.until
    served.engine.sglang.until = refuse
    try:
        await refused(served.engine.pause(mode), "no pause")
    finally:
        served.engine.sglang.until = until
    async with asyncio.timeout(20):
        (new,) = await served.sample(PROMPT)
        (old,) = await kept
    assert new.finish_reason != "abort" and old.finish_reason != "abort"
    check_logprobs(served.model, PROMPT, old)


async def test_an_evaluation_keeps_its_version_until_it_is_over(served: Served) -> None:
    version, model = served.version, served.model
    await served.engine.pin(version)
    request = served.engine.generate
    sampling = Sampling(max_new_tokens=60, greedy=True)
    assert served.engine.holds() is None, "another server may evaluate"
    served.engine.hold(version)
    assert served.engine.holds() == version
    (answer,) = await request(PROMPT, sampling, 1, request_id="first", pinned=version)
    updating = asyncio.ensure_future(served.update(202, "keep_kv"))
    (later,) = await request(PROMPT, sampling, 1, request_id="second", pinned=version)
    assert not updating.done()
    for one in (answer, later):
        assert set(one.versions.tolist()) == {version}
        check_logprobs(model, PROMPT, one)
    left = asyncio.ensure_future(request(PROMPT, sampling, 16, request_id="left", pinned=version))
    await asyncio.sleep(0)
    await served.engine.unpin(version)
    assert {one.finish_reason for one in await left} == {"abort"}, "nobody waits for it any more"
    await updating
    assert served.engine.version == version + 1 and served.engine.holds() is None
    await refused(request(PROMPT, sampling, 1, request_id="third", pinned=version), f"version {version} is not held")


# ---- what would go wrong without a word -------------------------------------------------------------------


def check_cached(served: Served, expected: int) -> None:
    """How many tokens of the last request's prompt came from the prefix cache."""
    assert served.cached[-1] == expected, f"{served.cached[-1]} cached tokens, expected {expected}"


async def test_what_a_request_computed_over_an_update_serves_no_other(served: Served) -> None:
    task = served.start_sample(PROMPT, max_new_tokens=MANY)
    await served.under_way(task)
    await served.update(102, "keep_kv")
    (mixed,) = await task  # its KV, of two versions, goes into the cache as it ends
    assert len(set(mixed.versions.tolist())) == 2
    prompt = PROMPT + mixed.token_ids[:-8].tolist()
    (answer,) = await served.sample(prompt)
    check_cached(served, 0)
    check_logprobs(served.model, prompt, answer)


async def test_a_version_that_is_loaded_again_with_other_weights_is_another_one(served: Served) -> None:
    """As after a learner's restart, which makes the versions after its checkpoint a second time."""
    await served.update(103, "keep_kv")
    await served.sample(PROMPT)
    await served.update(104, "keep_kv", version=served.version)
    (answer,) = await served.sample(PROMPT)
    check_cached(served, 0)
    check_logprobs(served.model, PROMPT, answer)


async def test_what_a_caller_aborts_keeps_its_tokens_and_says_so(served: Served) -> None:
    task, other = (served.start_sample(PROMPT, 2, max_new_tokens=MANY) for _ in range(2))
    await served.under_way(task)
    served.engine.abort(task.get_name())
    for answer in await task:
        assert answer.finish_reason == "abort" and 0 < len(answer.token_ids) < MANY
        check_logprobs(served.model, PROMPT, answer)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in await other] == [("length", MANY)] * 2


# ---- twenty updates under load ----------------------------------------------------------------------------

UPDATES = 20
RUNNING = 4
VOCABULARY = 40
PREFIX = [random.Random(1).randrange(VOCABULARY) for _ in range(32)]
"""What all prompts begin with."""


class Load:
    """Requests that share a prefix, RUNNING of them at any time, until it is stopped."""

    def __init__(self, served: Served, rng: random.Random) -> None:
        self.served = served
        self.rng = rng
        self.answers: list[tuple[list[int], Completion]] = []
        self.running: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._workers = [asyncio.ensure_future(self._work()) for _ in range(RUNNING)]

    async def _work(self) -> None:
        while not self._stopping:
            prompt = PREFIX + [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(4))]
            task = self.served.start_sample(prompt, max_new_tokens=self.rng.randrange(NEW_TOKENS // 2, NEW_TOKENS))
            self.running.add(task)
            self.answers += [(prompt, answer) for answer in await task]
            self.running.discard(task)

    async def under_way(self) -> None:
        """Wait until one of the requests shows a token."""
        while not any(self.served.engine.running_tokens().get(task.get_name()) for task in self.running):
            for worker in self._workers:
                assert not worker.done(), worker
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Let the running ones end."""
        self._stopping = True
        await asyncio.gather(*self._workers)


async def update_under_load(served: Served, load: Load, mode: str) -> tuple[Any, list[tuple[list[int], Completion]]]:
    """One update; the new model, and answers to requests that came while the engine was paused or after that."""
    await load.under_way()
    model = random_model(load.rng.randrange(2**32))
    await served.engine.pause(mode)
    came_early = served.start_sample(PREFIX)
    await served.engine.load(staged(model), served.version + 1, digests(model))
    assert (served.engine.stood() is not None) is (mode == "keep_kv"), "the schedulers go on by themselves"
    assert await served.engine.digest() == digests(model)
    await served.engine.resume()
    served.model, served.version = model, served.engine.version
    longer = [*PREFIX, load.rng.randrange(VOCABULARY)]
    first, again = await asyncio.gather(served.sample(longer, 2), served.sample(PREFIX, 2))
    extended = longer + first[0].token_ids.tolist()
    fresh = [(PREFIX, await came_early), (longer, first), (PREFIX, again), (extended, await served.sample(extended))]
    return model, [(prompt, answer) for prompt, answers in fresh for answer in answers]


def check_versions(answer: Completion) -> list[int]:
    """The versions of an answer, oldest first; they never go back."""
    assert (np.diff(answer.versions) >= 0).all() and answer.finish_reason == "length"
    return sorted(set(answer.versions.tolist()))


def check_in_flight(mode: str, models: dict[int, Any], prompt: list[int], answer: Completion) -> None:
    """What each mode promises of answers that an update may have met."""
    versions = check_versions(answer)
    check_logprobs(models[versions[0]], prompt, answer, versions[0])
    if mode == "recompute_kv":
        for version in versions:
            check_logprobs(models[version], prompt, answer, version)
    elif mode == "drain":
        assert len(versions) == 1
    elif len(versions) == 2:
        check_kept_kv(*(models[version] for version in versions), prompt, answer)


def check_kept_kv(old: Any, new: Any, prompt: list[int], answer: Completion) -> None:
    """Of keep_kv: the new weights read the KV that the old ones made."""
    first_new = int((answer.versions == answer.versions[0]).sum())
    found = torch.from_numpy(answer.logprobs)[first_new:]
    kept = logprobs_over_kept_kv(old, new, prompt, answer, first_new)
    # a request that had shown no token yet starts anew, with the tokens that were on their way
    anew = logprobs_of(new, prompt, answer)[first_new:]
    off = min(float((found - expected).abs().max()) for expected in (kept, anew))
    assert off <= TOLERANCE, f"{len(found)} tokens over kept KV are off by up to {off:.2g}"


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv", "drain"])
async def test_logprobs_are_those_of_the_claimed_weights_over_20_updates(served: Served, mode: str) -> None:
    load = Load(served, random.Random(mode))
    models = {served.version: served.model}
    served.cached.clear()
    for _ in range(UPDATES):
        model, fresh = await update_under_load(served, load, mode)
        models[served.version] = model
        for prompt, answer in fresh:
            assert check_versions(answer) == [served.version]
            check_logprobs(model, prompt, answer)
    await load.stop()
    for prompt, answer in load.answers:
        check_in_flight(mode, models, prompt, answer)
    cut = {pair for _, answer in load.answers for pair in itertools.pairwise(check_versions(answer))}
    assert len(cut) >= (0 if mode == "drain" else UPDATES // 2), "updates hardly met running requests"
    assert sum(tokens >= len(PREFIX) - 1 for tokens in served.cached) >= UPDATES, "the prefix cache was hardly used"


# ---- requests on their way into SGLang --------------------------------------------------------------------


async def test_requests_that_sglang_still_prepares_end_when_they_are_called_off_and_go_on_after_an_update(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with pictures: no scheduler knows them yet, and SGLang asks the schedulers once."""
    manager, prepared = served.engine.sglang._manager, asyncio.Event()
    tokenize = manager._tokenize_one_request

    async def slowly(request: Any) -> Any:
        await prepared.wait()
        return await tokenize(request)

    monkeypatch.setattr(manager, "_tokenize_one_request", slowly)
    doomed, updated = (
        served.start_sample(PROMPT, max_new_tokens=MANY),
        served.start_sample(PROMPT[1:], max_new_tokens=MANY),
    )
    while len(manager.rid_to_state) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    before = served.version
    served.engine.abort(doomed.get_name())
    updating = served.loop.create_task(served.update(305, "keep_kv"))
    await asyncio.sleep(0.1)
    prepared.set()
    await updating
    (ended,), (answer,) = await doomed, await updated
    assert ended.finish_reason == "abort" and ended.token_ids.size < MANY
    assert answer.finish_reason == "length"
    assert answer.versions[-1] == before + 1, "the update did not wait for its end"
