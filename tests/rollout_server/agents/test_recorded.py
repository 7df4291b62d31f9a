"""What is trained is each engine's record, with a stop string within a token and a history that the client edited."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from configs import Config
from examples.calculator import ROLES, TEMPLATE
from examples.sort6 import SPECIAL, save_tokenizer
from rollout_server.engines.base import Completion
from rollout_server.episodes import EpisodeGenerator
from rollout_server.tasks.environments.conversation import Conversation
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.task import Task
from tests.rollout_server.agents.test_endpoint import answers_of, lease
from tests.rollout_server.small_generator import LengthJudge

pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
pytest.importorskip("openai", reason="the client package is not installed")

AGENT = f"{Path(__file__).with_name('editor.py')}:main"
VOCABULARY = 40
WORDS = tuple(f"{first};{last}" for first in range(3) for last in range(8))[: VOCABULARY - len(SPECIAL + ROLES) - 11]
"""More than half of the tokens have the stop string inside; none begins or ends with it."""


async def check(engine: Any, folder: Path) -> None:
    """Play two episodes of the agent on an engine, and compare with what it was given and returned."""
    save_tokenizer(folder, (*SPECIAL, *ROLES, *"0123456789+", *WORDS), (*ROLES, *WORDS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
        "rollout": {"group_size": 2, "max_new_tokens": 64},
        "environment": {"function": {"agent": {"function": AGENT}}, "max_turns": 8},
    }
    config, generate = Config.model_validate(values), engine.generate
    task, said = Task(config), folder / "said"
    task.stop_token_ids = ()  # answers end at a stop string or their length
    said.mkdir()
    record: list[tuple[list[int], Completion]] = []

    async def recorded(ids: list[int], *args: Any, **rest: Any) -> list[Completion]:
        answers: list[Completion] = await generate(ids, *args, **rest)
        record.extend((list(ids), answer) for answer in answers)
        return answers

    async with environments_of(config.environment, frozenset()) as environments:
        assert environments is not None
        with mock.patch.object(engine, "generate", recorded):
            generator = EpisodeGenerator(config, engine, task, LengthJudge(), environments=environments)  # type: ignore[arg-type]
            group = await generator.group(lease(said), "0/1/1")
    assert group.rewards.tolist() == [1.0, 1.0] and len(record) == 2 * 6

    trained: list[tuple[list[int], list[int]]] = []
    longest_first = sorted(answers_of(group), key=lambda answer: -len(answer[1]))  # a cut answer may begin a longer one
    for context, ids, logprobs, versions in longest_first:
        kept = slice(0, len(ids))
        same = [answer for given, answer in record if given == context and answer.token_ids[kept].tolist() == ids]
        answer = next(one for one in same if one.logprobs[kept].tolist() == logprobs)
        assert answer.versions[kept].tolist() == versions
        record = [one for one in record if one[1] is not answer]
        trained.append((context, ids))
    assert not record, "every answer of the engine is trained once"

    for path in said.iterdir():
        told = json.loads(path.read_text())
        texts, fresh = told["texts"], {name: Conversation(task).encode(asked) for name, asked in told["asked"].items()}
        for name in ("stopped", "streamed"):
            texts_of = [task.decode(ids) for context, ids in trained if context == fresh[name]]
            assert ";" not in texts[name] and any(one.startswith(f"{texts[name]};") for one in texts_of), name
        for name in ("edited", "behind the stop"):  # nothing is known of these texts: they are encoded
            assert any(context == fresh[name] for context, _ in trained), name
        before = [[*context, *ids] for context, ids in trained if task.decode(ids) == texts["whole"]]
        assert any(context[: len(ids)] == ids for context, _ in trained for ids in before), "sampled ids, not encoded"
    stopped = [ids for _, ids in trained if ";" in task.decode(ids[-1:]) and ";" not in task.decode(ids[:-1])]
    assert len(stopped) >= 4 and all(task.decode(ids[-1:]) in WORDS for ids in stopped), "the token with the string"
    print(json.dumps([[task.decode([token]) for token in ids] for ids in stopped]))


async def test_torch_s_record_is_trained(folder: Path, tmp_path: Path) -> None:
    from rollout_server.engines.torch.engine import TorchEngine

    engine = TorchEngine(str(folder), max_context=96, max_running=16, seed=1)
    try:
        await check(engine, tmp_path)
    finally:
        await engine.close()


@pytest.mark.timeout(400)
async def test_sglang_s_record_is_trained(served: Any, tmp_path: Path) -> None:
    await check(served.engine, tmp_path)
