"""Agents over the real endpoint, the real client package and the torch engine: what is recorded, refused and killed."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from configs import Config
from examples.calculator import CALL, IDS, save_tokenizer
from replay import messages as m
from rollout_server.engines.base import Completion, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.episodes import EpisodeGenerator
from rollout_server.tasks.environments import EnvironmentFailed
from tests.rollout_server.small_generator import episodes_of, evaluation_lease, lease_of
from tests.rollout_server.torch_oracle import hf_tensors, make_model
from tests.support.waiting import eventually

pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
pytest.importorskip("openai", reason="the client package is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CAP, TURNS = 80, 24
HELD = "9*9"
"""What is asked with this prompt is not answered."""


class Recording(TorchEngine):
    """An engine that keeps a record of its own: what it was given, and what it returned."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.record: dict[str, tuple[list[int], Completion | None]] = {}
        self.order: list[str] = []
        self.held: list[int] = []

    async def generate(self, ids: list[int], sampling: Sampling, n: int, **rest: Any) -> list[Completion]:  # type: ignore[override]
        name = rest["request_id"]
        self.order.append(name)
        self.record[name] = (list(ids), None)
        if ids == self.held:
            try:
                await asyncio.sleep(600)
            finally:
                self.order.append(f"left {name}")
        answers = await super().generate(ids, sampling, n, **rest)
        self.record[name] = (list(ids), answers[0])
        return answers


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that knows messages. Its text never is a tool call: chance would make one now and then."""
    folder = tmp_path_factory.mktemp("talking")
    make_model(vocab_size=len(IDS), max_position_embeddings=256).save_pretrained(folder)
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    next(one for one in tokenizer["added_tokens"] if one["id"] == IDS[CALL])["content"] = "<call>"
    tokenizer["model"]["vocab"]["<call>"] = tokenizer["model"]["vocab"].pop(CALL)
    file.write_text(json.dumps(tokenizer))
    return folder


@asynccontextmanager
async def playing(folder: Path, *, size: int = 2, **options: Any) -> AsyncIterator[EpisodeGenerator]:
    timeouts = {name: options.pop(name) for name in ("turn_timeout_s",) if name in options}
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 80},
            "rollout": {"group_size": size, "max_new_tokens": CAP},
            "algorithm": {"advantage": "gae" if size == 1 else "grpo"},
            "environment": {"function": {"agent": options}, "max_turns": TURNS, **timeouts},
        }
    )
    async with episodes_of(config, Recording) as generator:
        task, engine = generator.task, generator.engine
        engine.held = task.encode_text(task.render([{"role": "user", "content": HELD}], None))  # type: ignore[attr-defined]
        yield generator


def lease(folder: Path, mode: str = "", index: int = 1) -> m.Lease:
    row = {
        "prompt": [{"role": "user", "content": "48+27"}],
        "ground_truth": "75",
        "data_source": "",
        "extra_info": {"folder": str(folder), "mode": mode},
        "columns": {},
    }
    return lease_of(row, index)


def answers_of(group: m.Group) -> Iterator[tuple[list[Any], ...]]:
    """(context, token ids, logprobs, versions) of everything in the loss, from what goes to replay."""
    ends, prompts = np.cumsum(group.lengths), np.cumsum(group.prompt_lengths)
    for number, end in enumerate(ends):
        first = int(end - group.lengths[number])
        prompt = group.prompt_ids
        if prompts.size:
            prompt = prompt[prompts[number] - group.prompt_lengths[number] : prompts[number]]
        mask = np.concatenate(([0], group.loss_mask[first:end], [0])).astype(int)
        starts, stops = (np.flatnonzero(np.diff(mask) == sign) + first for sign in (1, -1))
        for start, stop in zip(starts, stops, strict=True):
            context = [*prompt.tolist(), *group.token_ids[first:start].tolist()]
            yield (
                context,
                *(getattr(group, name)[start:stop].tolist() for name in ("token_ids", "logprobs", "versions")),
            )


async def update_for_ever(engine: TorchEngine) -> None:
    """New weights as fast as they are loaded."""
    models, version = (
        [hf_tensors(make_model(seed=seed, vocab_size=len(IDS), max_position_embeddings=256)) for seed in (1, 2)],
        0,
    )
    while True:
        await asyncio.sleep(0.01)
        version += 1
        await engine.pause("keep_kv")
        await engine.load(models[version % 2].items(), version)
        await engine.resume()


async def test_what_is_trained_is_what_the_engine_recorded(talking: Path, tmp_path: Path) -> None:
    """Every turn's ids, logprobs, versions and mask, with requests in flight while versions change."""
    async with playing(talking, size=4, function=f"{HERE / 'talker.py'}:main") as generator:
        updating = asyncio.create_task(update_for_ever(generator.engine))  # type: ignore[arg-type]
        try:
            group = await generator.group(lease(tmp_path), "0/1/1")
        finally:
            updating.cancel()
            with suppress(asyncio.CancelledError):
                await updating
        engine: Any = generator.engine
    assert len(engine.record) == 4 * 5
    recorded = [
        (ids, answer.token_ids.tolist(), answer.logprobs.tolist(), answer.versions.tolist())
        for ids, answer in engine.record.values()
    ]
    assert sorted(answers_of(group)) == sorted(recorded)
    several = sum(len(set(versions)) > 1 for *_, versions in recorded)
    assert several >= 3, "versions changed in the middle of answers"
    assert group.samples.tolist() == [3] * 4, "a conversation, its other choice, and what was asked aside"
    assert group.rewards.tolist() == [5.0] * 4 and group.reward_metrics["asked"] == 5.0
    heard = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert sorted(one["logprobs"] for said in heard for one in said["seen"]) == sorted(row[2] for row in recorded)
    assert len({said["key"] for said in heard}) == 4 and all(said["models"] == ["policy"] for said in heard)
    texts = {generator.task.decode(ids) for _, ids, *_ in recorded}
    for said in heard:
        stream = said["seen"][1]
        assert stream["text"] in texts and said["seen"][4]["text"] in texts
        assert stream["usage"]["completion_tokens"] == len(stream["logprobs"])


async def test_clients_get_what_their_api_documents(talking: Path, tmp_path: Path) -> None:
    """And what is trained is what the engine recorded, up to the token that completes a stop string."""
    async with playing(talking, size=1, function=f"{HERE / 'clients.py'}:main") as generator:
        group = await generator.group(lease(tmp_path), "0/1/1")
        engine: Any = generator.engine
        decode = generator.task.decode
    (said,) = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    for size in (1, 2):
        stop, text, reason = said[f"stop {size}"]
        assert stop not in text and reason in ("stop", "length")
    cut = 0
    for context, ids, logprobs, versions in answers_of(group):
        kept, same = slice(0, len(ids)), [answer for asked, answer in engine.record.values() if asked == context]
        (answer, *_) = [answer for answer in same if answer.token_ids[kept].tolist() == ids]
        assert answer.logprobs[kept].tolist() == logprobs and answer.versions[kept].tolist() == versions
        if len(ids) < len(answer.token_ids):
            cut += 1
            stops = [said[f"stop {size}"][0] for size in (1, 2)]
            assert any(stop in decode(ids) and stop not in decode(ids[:-1]) for stop in stops)
    assert said["chunks"], "text comes while it is sampled"
    for name in ("required", "named"):
        choice = said[f"tool_choice {name}"]
        message = choice["message"]
        assert (choice["finish_reason"] == "tool_calls") == bool(message["tool_calls"])
        assert message["tool_calls"] or message["content"].startswith("<tool_call>")
    response = said["response"]
    assert response["object"] == "response" and response["status"] in ("completed", "incomplete")
    assert response["usage"]["output_tokens"] > 0 and said["further"] is not None
    kinds, text, final = said["streamed"]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert text == final
    assert len(engine.record) == 1 + 2 + 1 + 2 + 3 + 1, "what is asked again is one turn"
    assert said["no such response"] == [404, "previous_response_id"]
    assert said["no such tool"] == [400, "tool_choice"] and said["no item"] == [400, "input"]


async def test_what_is_refused_says_why_and_records_nothing(talking: Path, tmp_path: Path) -> None:
    options = {"function": f"{HERE / 'refused.py'}:main", "models": ["gpt-4o-mini"]}
    async with playing(talking, **options) as generator:
        first = await generator.group(lease(tmp_path, "first"), "0/1/1")
        await generator.group(lease(tmp_path, "second"), "0/1/2")
        engine: Any = generator.engine
    assert first.rewards.tolist() == [0.0, 0.0] and first.reward_metrics["episode/NoMoreTurns"] == 1.0
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(told) == 4 and sum("ended 1" in said for said in told) == 2
    for said in told:
        assert said.pop("plain") == said.pop("named model") == said.pop("same temperature") == "answered"
        assert said.pop("left") == "left"
        assert said.pop("turns")[:2] == ["BadRequestError", "max_turns_exceeded"]
        for name in [name for name in said if name.startswith(("key", "ended"))]:
            assert said.pop(name)[:2] == ["AuthenticationError", "invalid_api_key"], name
        assert said.pop("model")[:2] == ["NotFoundError", "model_not_found"]
        assert said.pop("flood")[:2] == [413, "request_too_large"] and said.pop("url")[:2] == [404, "unknown_url"]
        for name in ("garbage", "deep", "list", "surrogate"):
            assert said.pop(name)[0] == 400
        assert "rollout.temperature 1" in said["temperature"][3]
        for name in ("unknown", "number"):
            assert said.pop(name)[0] == "BadRequestError"
        assert {name: answer[2] for name, answer in said.items()} == {name: name for name in said}
        assert len(said) == 10 and {answer[0] for answer in said.values()} == {"BadRequestError"}
    left = [at for at, name in enumerate(engine.order) if name.startswith("left ")]
    assert len(left) == 4
    for at in left:
        episode = engine.order[at].removeprefix("left ").rpartition("/")[0]
        asked_after = [name for name in engine.order[at:] if name.rpartition("/")[0] == episode]
        assert len(asked_after) > 3, "the engine stops at once, not at the end of the episode"


async def test_programs_end_and_are_ended_with_all_that_they_started(
    talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = ["python", str(HERE / "program.py"), "48+27"]
    async with playing(talking, size=1, command=command, turn_timeout_s=6.0) as generator:
        modes = ("rewards", "judged", "leaves", "floods", "crashes", "misspells", "hangs")
        numbered = enumerate(modes, start=1)
        groups = await asyncio.gather(
            *(generator.group(lease(tmp_path, mode, number), f"0/{number}/1") for number, mode in numbered),
            return_exceptions=True,
        )
        made = dict(zip(modes, groups, strict=True))
        pids = [int(path.read_text()) for path in tmp_path.iterdir()]
        assert len(pids) == 2
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")
        wanted = evaluation_lease(CAP, prompts=[lease(tmp_path, "rewards").prompt])
        await generator.engine.pin(0)
        result = await generator.evaluation(wanted)
    assert result.rewards.tolist() == [0.5] * 2 and len(set(result.texts)) == 1, "greedy, by the pinned version"
    for mode in ("rewards", "leaves", "floods"):
        assert isinstance(made[mode], m.Group), made[mode]
        assert made[mode].rewards.tolist() == [0.5]
        assert made[mode].reward_metrics["tokens"] == made[mode].lengths.sum()
        assert made[mode].reward_metrics["paths"] == 0.0, "nothing of ours is on the agent's path"
    assert made["judged"].rewards.tolist() == made["judged"].lengths.tolist()
    for mode, text in {
        "crashes": "exit code 1; its last line on stderr: no such game",
        "misspells": "a JSON object without `reward`",
        "hangs": "environment.turn_timeout_s = 6",
    }.items():
        assert made[mode].errors == ["environment_error"] and text in made[mode].error_detail, made[mode]


async def test_the_page_s_agent_runs_as_it_stands(talking: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "agents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:1]
    assert re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE) == ["json", "sys", "openai"]
    (tmp_path / "my_agent.py").write_text(code)
    async with playing(talking, size=1, command=["python", str(tmp_path / "my_agent.py")]) as generator:
        row = lease(tmp_path)
        row.prompt["columns"] = {"answer": "75"}
        group = await generator.group(row, "0/1/1")
    assert set(group.rewards.tolist()) <= {0.0, 1.0} and int(group.loss_mask.sum()) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give one of command"),
        ({"command": "python my_agent.py"}, "take a list of words"),
        ({"command": ["python"], "port": 8000}, "agent.port: unknown"),
        ({"function": "main"}, "names no function"),
        ({"command": ["python"], "sampling": "perhaps"}, "take refuse or ignore"),
        ({"command": ["python", "missing.py"]}, "no file 'missing.py'"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"function": "json:loads"}, "is no `async def loads"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_at_the_start(options: dict[str, Any], said: str) -> None:
    from rollout_server.tasks.agents.episode import prepare

    with pytest.raises(EnvironmentFailed, match=re.escape(said)):
        prepare(options)


async def test_a_relay_names_the_session_of_each_request() -> None:
    from rollout_server.tasks.agents.endpoint import OpenAIEndpoint
    from rollout_server.tasks.agents.requests import Rules

    endpoint = OpenAIEndpoint(Rules(temperature=1.0))
    await endpoint.start()
    access = endpoint.open(None, "trace-1")  # type: ignore[arg-type]

    async with httpx.AsyncClient(base_url=endpoint.url, trust_env=False) as http:

        async def status(key: str, **headers: str) -> int:
            return (await http.get("/models", headers={"Authorization": f"Bearer {key}", **headers})).status_code

        named = {"X-Session-ID": "trace-1"}
        assert await status(endpoint.relay_key, **named) == await status(access.api_key) == 200
        assert await status(endpoint.relay_key) == await status("no-key", **named) == 401
        assert await status(endpoint.relay_key, **{"X-Session-ID": "trace-2"}) == 401
        endpoint.close(access)
        assert await status(endpoint.relay_key, **named) == 401
