"""Episodes about pictures: a row's pictures in its first context, over turns; what later turns may not show."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from examples.pictures import IDS, save_model, save_pictures
from replay import messages as m
from replay.data import load_rows
from replay.state.leases import Slot
from replay.state.validation import Bounds, problem_with
from rollout_server.engines.base import Completion, Engine, Sampling
from rollout_server.tasks.environments.conversation import Conversation
from rollout_server.tasks.environments.session import EpisodeLimits, Session
from rollout_server.tasks.pictures import Prompt
from rollout_server.tasks.task import Task, TaskError
from tests.rollout_server.environments.test_episodes import playing
from tests.rollout_server.small_generator import config_of, evaluation_lease, lease_of
from tests.rollout_server.test_picture_prompts import IMAGE, reference

GROUP = 3
SHOWN, TEXT = {"type": "image"}, {"type": "text", "text": "which colour ?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision model, and a row about a picture."""
    path = tmp_path_factory.mktemp("pictures")
    (row,) = save_pictures(path, 1, seed=1)
    (path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    save_model(path / "model", 0)
    return path


def lease(folder: Path) -> m.Lease:
    (row,) = load_rows(folder / "rows.jsonl")
    return lease_of(row)


async def test_a_picture_is_seen_in_every_turn(folder: Path) -> None:
    """Behaviour logprobs of two turns and of a context without the picture are those of transformers' forward."""
    row = lease(folder).prompt
    wanted = evaluation_lease(8, prompts=[row] * 2)
    async with playing(folder / "model", "about_a_picture", 64, max_episodes=2) as generator:
        group = await generator.group(lease(folder), "0/1/1")
        seen = generator.task.look(row)
        await generator.engine.pin(0)
        texts = (await generator.evaluation(wanted)).texts
    assert seen is not None and len(texts) == 4 and len(set(texts)) == 1, "greedy, in two parts of one prompt"
    slot = Slot((0, 1), lease(folder).prompt, 0, attempt=1)
    assert problem_with(group, slot, generator.config, Bounds(0, None)) is None
    assert len(group.pictures) == 1 and group.samples.tolist() == [2] * GROUP
    prompts = np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])
    ends = np.cumsum(group.lengths)
    for number, (prompt, start, end) in enumerate(zip(prompts, [0, *ends[:-1]], ends, strict=True)):
        is_shown = bool((prompt == IMAGE).any())
        assert is_shown == (number % 2 == 0)
        ids, mask = group.token_ids[start:end], group.loss_mask[start:end].astype(bool)
        assert mask[0] and mask[-1] and mask.all() != is_shown, "its second turn follows what the environment has added"
        answer = Completion(
            token_ids=ids, logprobs=group.logprobs[start:end], versions=group.versions[start:end], finish_reason="stop"
        )
        wanted = reference(folder / "model", Prompt(prompt.tolist(), seen.pictures if is_shown else None), answer)
        assert torch.allclose(torch.from_numpy(answer.logprobs)[mask], wanted[mask], atol=1e-5)


async def test_pictures_of_later_turns_fail_their_episode(folder: Path) -> None:
    async with playing(folder / "model", "shows_another", 64) as generator:
        group = await generator.group(lease(folder), "0/1/1")
    assert "1 pictures after an answer: a context shows its row's pictures before" in group.error_detail


@pytest.mark.parametrize(
    ("content", "has_picture", "said"),
    [
        ([SHOWN, TEXT], False, "the messages have 1 pictures, and the row has none"),
        ([SHOWN, SHOWN, TEXT], True, "has 2 tokens of pictures .* for 1 pictures"),
        ([{"type": "image", "image": "x.png"}], True, "take text, or {'type': 'image'} for the next picture of the"),
    ],
)
def test_a_context_shows_pictures_of_its_row(folder: Path, content: Any, has_picture: bool, said: str) -> None:
    task = Task(config_of(folder / "model", GROUP, 8))
    seen = task.look(lease(folder).prompt) if has_picture else None
    with pytest.raises(TaskError, match=said):
        Conversation(task, seen and seen.expand).encode([{"role": "user", "content": content}])


async def test_a_context_shows_all_pictures_or_none(folder: Path) -> None:
    task = Task(config_of(folder / "model", GROUP, 8))
    limits = EpisodeLimits(max_new_tokens=8, max_context=64, max_turns=3)
    with ThreadPoolExecutor(1) as texts:
        seen, engine = task.look(lease(folder).prompt), cast(Engine, None)  # nothing is sampled
        session = Session("a", engine, task, texts, sampling=Sampling(max_new_tokens=8), limits=limits, seen=seen)
        with pytest.raises(TaskError, match="a context shows all pictures of its row, in their order, or none"):
            await session.turn([IDS["<user>"], IMAGE, IDS["which"]])
