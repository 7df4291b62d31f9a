"""The agents' endpoint over a real SGLang: what is trained is what the engine recorded, while versions change."""

import asyncio
import itertools
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_server.sglang_served import Served, check_logprobs, random_model

pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
pytest.importorskip("openai", reason="the client package is not installed")

from examples.calculator import CALL, IDS, save_tokenizer
from rollout_server.engines.base import Completion, Sampling
from rollout_server.episodes import EpisodeGenerator
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.task import Task
from tests.rollout_server.agents.test_endpoint import HERE, Judge, answers_of, lease

pytestmark = pytest.mark.slow
EPISODES = 4


class Recorded:
    """SGLang with a record of its own: what it was given, and what it returned."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.record: dict[str, tuple[list[int], Completion]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, ids: list[int], sampling: Sampling, n: int, **rest: Any) -> list[Completion]:
        answers: list[Completion] = await self._engine.generate(ids, sampling, n, **rest)
        self.record[rest["request_id"]] = (list(ids), answers[0])
        return answers


def tokenizer_in(folder: Path, model: Path) -> str:
    """The calculator's tokenizer beside the served model's config; no text of a random model is a tool call."""
    save_tokenizer(folder)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    next(one for one in tokenizer["added_tokens"] if one["id"] == IDS[CALL])["content"] = "<call>"
    tokenizer["model"]["vocab"]["<call>"] = tokenizer["model"]["vocab"].pop(CALL)
    file.write_text(json.dumps(tokenizer))
    return str(folder)


async def update_for_ever(served: Served, models: dict[int, Any]) -> None:
    """New weights as fast as they are loaded and proven; each by its version."""
    for seed in itertools.cycle((1, 2)):
        await asyncio.sleep(0.01)
        models[served.version + 1] = random_model(seed)
        await served.update(seed, "keep_kv")


async def test_what_is_trained_is_what_sglang_recorded(served: Served, tmp_path: Path) -> None:
    """Every turn's ids, logprobs, versions and mask, with requests in flight while versions change."""
    (tmp_path / "model").mkdir()
    (tmp_path / "said").mkdir()
    options = f"environment.options={{function: '{HERE / 'talker.py'}:main'}}"
    environment = ("environment.function=agent", options, "environment.turn_timeout_s=50", "environment.max_turns=24")
    sizes = (f"rollout.group_size={EPISODES}", "data.max_prompt_tokens=96", "rollout.max_new_tokens=96")
    folder = tokenizer_in(tmp_path / "model", served.folder)
    config = served.config(*environment, *sizes, f"model.path={folder}")
    engine, models = Recorded(served.engine), {served.version: served.model}
    async with environments_of(config.environment, frozenset(), temperature=1.0) as environments:
        assert environments is not None
        rest: dict[str, Any] = {"environments": environments}
        generator = EpisodeGenerator(config, engine, Task(config), Judge(), **rest)  # type: ignore[arg-type]
        updating = asyncio.create_task(update_for_ever(served, models))
        try:
            group = await generator.group(lease(tmp_path / "said"), "0/1/1")
        finally:
            updating.cancel()
            with suppress(asyncio.CancelledError):
                await updating
    recorded = [
        (ids, answer.token_ids.tolist(), answer.logprobs.tolist(), answer.versions.tolist())
        for ids, answer in engine.record.values()
    ]
    assert len(recorded) == EPISODES * 5 and sorted(answers_of(group)) == sorted(recorded)
    several = sum(len(set(versions)) > 1 for *_, versions in recorded)
    tokens = Counter(version for *_, versions in recorded for version in versions)
    print(f"{len(recorded)} answers, {tokens.total()} tokens of {len(tokens)} versions; {several} answers of several")
    assert several >= 3, "versions changed in the middle of answers"
    assert group.samples.tolist() == [3] * EPISODES and group.rewards.tolist() == [5.0] * EPISODES
    for ids, answer in engine.record.values():
        if len(set(answer.versions)) == 1 and int(answer.versions[0]) in models:
            check_logprobs(models[int(answer.versions[0])], ids, answer)
    heard = [json.loads(path.read_text()) for path in (tmp_path / "said").iterdir()]
    assert sorted(one["logprobs"] for said in heard for one in said["seen"]) == sorted(row[2] for row in recorded)
