"""Teachers are asked by rollout servers: real processes' parts over loopback, and every way in which none answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import Config
from examples.random_qwen3 import make
from tests.rollout_server.teacher_rig import ANSWERS, ask, asking, config_of, expected, standing, teaching


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Policy and teacher."""
    path = tmp_path_factory.mktemp("models")
    make("tiny", path / "policy", 0)
    make("tiny", path / "teacher", 1)
    yield path / "policy", path / "teacher"


def config(folders: tuple[Path, Path], k: int = 0, temperature: float = 0.7, **teacher: Any) -> Config:
    given = {"path": str(folders[1]), "timeout_s": 0.5, "wait_s": 1.5} | teacher
    return config_of(folders[0], k, temperature, big=given)


async def test_a_group_gets_what_its_teacher_gives_to_its_tokens_at_the_temperature(folders: tuple[Path, Path]) -> None:
    run = config(folders, 3)
    teachers, wanted = asking(run), await expected(run, folders[1], 3)
    async with standing() as stand, teaching(run, "big", stand):
        teachers.links.listed(await stand.listed(1), "run")
        found = await ask(teachers)
        masked = [replace(one, loss_mask=np.array([1, 0, 1][: one.tokens.size], np.uint8)) for one in ANSWERS]
        in_loss = await ask(teachers, answers=masked)
        teachers.close()
    assert found["teachers"] == ["big@0", "big@0"]
    assert np.array_equal(found["teacher_logprobs"], wanted.logprobs) and found["teacher_logprobs"].dtype == np.float32
    assert np.array_equal(found["teacher_ids"], wanted.ids) and np.array_equal(found["teacher_top"], wanted.top)
    assert in_loss["teacher_logprobs"].tolist() == (wanted.logprobs * [1, 0, 1, 1, 0]).tolist()
    assert in_loss["teacher_top"].reshape(-1, 3)[[1, 4]].tolist() == [[0] * 3] * 2
