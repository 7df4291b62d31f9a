"""Answers of the torch engine that go on from a prefix: versions and logprobs, distribution, ends, refusals."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines import EngineError, Partial, Sampling
from rollout_server.engines.prefixes import settled
from tests.rollout_server.torch_oracle import check_versions, hf_tensors, load_model, make_model, save_folder
from tests.rollout_server.torch_served import LONG, PROMPT, STEP, Gates, sample, serving, stopped_midway, update

LIMIT = LONG.max_new_tokens


def prefix(tokens: list[int], version: int = 0, **rest: Any) -> Partial:
    return Partial(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        versions=np.full(len(tokens), version, np.int32),
        **rest,
    )


async def died_midway(folder: Path, gate_at: Gates, n: int = 3) -> list[Partial]:
    """What an engine at version 0 had shown of its answers when it ended."""
    async with stopped_midway(folder, gate_at, "keep_kv", n=n) as (engine, answers, pausing):
        await pausing
        shown = engine.progress("a")
        await engine.close()
        assert [answer.finish_reason for answer in await answers] == ["abort"] * n
        assert engine.progress("a") == []
    return shown


async def test_a_prefix_is_kept_over_later_updates_and_over_a_second_death(
    folder: Path, old: Any, new: Any, gate_at: Gates
) -> None:
    third = make_model(seed=2)
    shown = await died_midway(folder, gate_at)
    async with serving(folder) as engine:
        await update(engine, new, 1)
        gate = gate_at(5)
        answers = await gate.posted(engine.generate(PROMPT, LONG, 3, request_id="b", prefixes=shown))
        await gate.reached()
        pausing = await gate.posted(engine.pause("recompute_kv"))
        gate.release()
        await pausing
        assert engine.running_tokens() == {"b": 3 * (STEP + 1 + 6)}
        since = engine.progress("b", [STEP + 1, STEP + 2, 0])
        assert [part.versions.tolist() for part in since] == [[1] * 6, [1] * 5, [0] * (STEP + 1) + [1] * 6]
        shown_later = engine.progress("b")
        await engine.load(hf_tensors(third).items(), 2)
        await engine.resume()
        for part, answer in zip(shown, await answers, strict=True):
            assert answer.token_ids[: STEP + 1].tolist() == part.token_ids.tolist()
            assert answer.versions.tolist() == [0] * (STEP + 1) + [1] * 6 + [2] * (LIMIT - STEP - 7)
            check_versions({0: old, 1: new, 2: third}, PROMPT, answer)
    async with serving(folder) as engine:
        await update(engine, third, 2)
        for answer in await engine.generate(PROMPT, LONG, 3, request_id="c", prefixes=shown_later):
            assert sorted(set(answer.versions.tolist())) == [0, 1, 2]
            check_versions({0: old, 1: new, 2: third}, PROMPT, answer)


async def test_with_the_same_weights_and_seed_an_answer_goes_on_as_if_nothing_had_happened(folder: Path) -> None:
    async with serving(folder, seed=4) as engine:
        whole = await engine.generate(PROMPT, LONG, 6, request_id="a")
        cut = [Partial.of(answer) for answer in whole]
        parts = [
            Partial(token_ids=p.token_ids[:i], logprobs=p.logprobs[:i], versions=p.versions[:i])
            for i, p in zip([0, 3, 11, 12, 29, 39], cut, strict=True)
        ]
        again = await engine.generate(PROMPT, LONG, 6, request_id="b", prefixes=parts)
        other = await engine.generate(PROMPT, Sampling(max_new_tokens=LIMIT, seed=9), 6, request_id="d", prefixes=parts)
    for answer, expected in zip(again, whole, strict=True):
        assert answer.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(answer.logprobs - expected.logprobs).max() <= 1e-5
    assert other[1].token_ids.tolist() != whole[1].token_ids.tolist()


@pytest.mark.parametrize("began", [[], [4, 6, 1]], ids=["at the start", "after a prefix"])
async def test_tokens_are_drawn_from_the_models_distribution(began: list[int], tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, vocab_size=8))
    draws, prompt, position = 4000, [1, 2, 3], len(began)
    sampling = Sampling(max_new_tokens=position + 1, temperature=1.5)
    async with serving(tmp_path, max_running=512) as engine:
        answers = await engine.generate(prompt, sampling, draws, request_id="a", prefixes=[prefix(began)] * draws)
    counts = Counter(int(answer.token_ids[position]) for answer in answers)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + began])).logits[0, -1]
    expected = torch.softmax(logits / 1.5, -1).double() * draws
    chi_square = sum((counts[token] - float(e)) ** 2 / float(e) for token, e in enumerate(expected))
    # 7 degrees of freedom: 29.9 is passed by chance once in 10,000 seeds, and this seed is fixed.
    assert chi_square < 29.9


async def test_answers_that_have_ended_come_back_as_they_are_and_cost_nothing(folder: Path) -> None:
    ended = [prefix([5, 6], 3, finish_reason="length"), prefix([7, 2], 4), prefix([9] * 8, 5)]
    async with serving(folder) as engine:
        sampling = Sampling(max_new_tokens=8, stop_token_ids=(2,))
        answers = await engine.generate(PROMPT, sampling, 3, request_id="a", prefixes=ended)
        assert (await engine.health()).generated_tokens == 0 and engine.running_tokens() == {}
        mixed = await engine.generate(PROMPT, sampling, 3, request_id="a", prefixes=[*ended[:2], prefix([])])
        assert (await engine.health()).generated_tokens == mixed[2].token_ids.size > 0
        await sample(engine, PROMPT, "next", max_new_tokens=2)
    assert [answer.finish_reason for answer in answers] == ["length", "stop", "length"]
    for part, answer in [*zip(ended, answers, strict=True), *zip(ended[:2], mixed, strict=False)]:
        assert answer.token_ids.tolist() == part.token_ids.tolist()
        assert answer.logprobs.tolist() == part.logprobs.tolist()
        assert answer.versions.tolist() == part.versions.tolist()


async def test_an_answer_that_waits_is_shown_and_aborted_with_its_prefix(folder: Path, gate_at: Gates) -> None:
    gate = gate_at(2)
    async with serving(folder, max_running=1) as engine:
        await gate.posted(sample(engine, [1], "first"))
        await gate.reached()
        sampling = Sampling(max_new_tokens=6)
        given = [prefix([3, 4]), prefix([5], finish_reason="stop")]
        waiting = await gate.posted(engine.generate(PROMPT, sampling, 2, request_id="w", prefixes=given))
        pausing = await gate.posted(engine.pause("keep_kv"))
        gate.release()
        await pausing
        shown = engine.progress("w", [1, 0])
        assert [(p.token_ids.tolist(), p.finish_reason) for p in shown] == [([4], None), ([5], "stop")]
        engine.abort("w")
        answers = await waiting
        assert [a.finish_reason for a in answers] == ["abort", "stop"]
        assert [a.token_ids.tolist() for a in answers] == [[3, 4], [5]]


SETTLED = Sampling(max_new_tokens=3, stop_token_ids=(2,))
REFUSED: dict[str, tuple[list[Partial], str]] = {
    "number": ([prefix([1])], "1 prefixes for 2 answers"),
    "arrays": ([prefix([]), Partial(token_ids=np.array([1], np.int32))], "prefix 1 has 1 tokens, 0 logprobs and 0"),
    "length": ([prefix([1] * 4), prefix([])], "prefix 0 has 4 tokens, and max_new_tokens is 3"),
    "vocabulary": ([prefix([40]), prefix([])], "prefix 0 has a token outside the vocabulary of 40"),
    "negative": ([prefix([-1]), prefix([])], "prefix 0 has a token outside the vocabulary of 40"),
    "after a stop token": ([prefix([1, 2, 3]), prefix([])], "prefix 0 goes on after the stop token 2"),
    "ended": ([prefix([1]), prefix([], finish_reason="stop")], r"prefix 1 has ended \(stop\) without a token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prefixes_that_cannot_be_are_refused(case: str) -> None:
    prefixes, said = REFUSED[case]
    with pytest.raises(EngineError, match=said):
        settled(prefixes, 2, SETTLED, 40)
