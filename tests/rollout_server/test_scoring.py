"""Engines score what is there: against transformers, at the temperature, of one version."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines import EngineError
from rollout_server.engines.base import Scored
from tests.rollout_server.torch_oracle import VARIANTS, hf_tensors, load_model, save_folder
from tests.rollout_server.torch_served import sample, serving

SEQUENCES = [
    np.array(ids, np.int32) for ids in ([3, 9, 17, 5], [5, 1, 2, 2, 11, 8, 39, 1, 4, 4, 30], [7, 7], [6, 1, 3])
]
FIRSTS = [2, 1, 1, 3]


def expected(model: Any, temperature: float, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In float64, of each sequence by itself."""
    model, found = model.double(), []
    for ids, first in zip(SEQUENCES, FIRSTS, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0, first - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        likeliest, chosen = logprobs.topk(top)
        found.append((logprobs.gather(1, torch.from_numpy(ids[first:, None].astype(np.int64))), chosen, likeliest))
    logprobs, chosen, likeliest = (torch.cat(part).flatten().numpy() for part in zip(*found, strict=True))
    return logprobs, chosen, likeliest


def is_close(scored: Scored, model: Any, temperature: float, top: int) -> bool:
    logprobs, chosen, likeliest = expected(model, temperature, top)
    assert scored.ids.tolist() == chosen.tolist() and scored.top.size == likeliest.size
    far = [np.abs(a - b).max(initial=0) for a, b in ((scored.logprobs, logprobs), (scored.top, likeliest))]
    return max(map(float, far)) <= 1e-5


@pytest.mark.parametrize("variant", ["qwen3-tied", "llama-tied-all-biases", "qwen2-untied"])
@pytest.mark.parametrize(("temperature", "top"), [(1.0, 0), (0.6, 5)])
async def test_scores_are_those_of_hf_in_float64(variant: str, temperature: float, top: int, tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, **VARIANTS[variant]))
    async with serving(tmp_path) as engine:
        scored = await engine.score(SEQUENCES, FIRSTS, temperature=temperature, top=top)
    assert scored.version == 0 and is_close(scored, model, temperature, top)


async def test_what_was_sampled_has_the_logprobs_it_was_sampled_with(folder: Path) -> None:
    async with serving(folder) as engine:
        answers = await sample(engine, [3, 9, 17], "a", n=3, temperature=0.7)
        whole = [np.array([3, 9, 17, *answer.token_ids], np.int32) for answer in answers]
        scored = await engine.score(whole, [3] * 3, temperature=0.7, top=1)
    assert np.abs(scored.logprobs - np.concatenate([answer.logprobs for answer in answers])).max() <= 1e-5


async def test_a_score_waits_for_an_update_and_is_of_what_was_loaded(folder: Path, new: Any) -> None:
    async with serving(folder) as engine:
        await engine.pause("keep_kv")
        scoring = asyncio.create_task(engine.score(SEQUENCES, FIRSTS, temperature=1.0, top=2))
        await engine.load(hf_tensors(new).items(), 1)
        assert not scoring.done()
        await engine.resume()
        scored = await scoring
        assert scored.version == 1 and is_close(scored, new, 1.0, 2)
    new.float()


@pytest.mark.parametrize(
    ("ids", "first", "says"), [([3, 4], 0, "first token"), ([3] * 99, 1, "99"), ([3, 40], 1, "40")]
)
async def test_what_cannot_be_scored_is_refused(folder: Path, ids: list[int], first: int, says: str) -> None:
    async with serving(folder) as engine:
        with pytest.raises(EngineError, match=says):
            await engine.score([np.array(ids, np.int32)], [first], temperature=1.0, top=0)
