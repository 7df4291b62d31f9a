"""A teacher behind an endpoint: vLLM's and SGLang's words for logprobs of prompts, and what cannot be used."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.teachers import Teacher
from rollout_server.engines.base import Scored
from rollout_server.tasks.rewards import RewardError
from rollout_server.teachers import NotScored
from rollout_server.teachers.endpoint import PROBE, PromptLogprobs
from rollout_server.teachers.scores import Answer, Teachers
from tests.rollout_server.openai_stand_in import Reply, serving
from tests.rollout_server.teacher_rig import ROW, config_of, no_encoding

IDS = [4, 9, 7]
"""Of PROBE."""
SEQUENCES, FIRSTS = [np.array([5, 9, 7, 3], np.int32), np.array([5, 9, 8], np.int32)], [2, 2]
Serves = Callable[[str, dict[str, Any]], Reply]


def logprob(token: int) -> float:
    return -1 - token / 10


def vllm(ids: list[int] = IDS) -> Serves:
    """As `/completions` answers: beside each token of the prompt the likeliest ones, whose ranks begin at 1."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/v1/completions" and body["max_tokens"] == 1 and body["temperature"] == 1.0
        prompt, k = ids if body["prompt"] == PROBE else body["prompt"], body["prompt_logprobs"]
        told: list[Any] = [None]
        for token in prompt[1:]:
            likeliest = {str(n): {"logprob": -0.5 - n, "rank": n + 1} for n in range(k)}
            told.append({str(token): {"logprob": logprob(token), "rank": 50}} | likeliest)
        return 200, {"choices": [{"prompt_logprobs": told}]}

    return answer


def sglang(ids: list[int] = IDS) -> Serves:
    """As `/generate` answers: from logprob_start_len on, nothing of the first; `/completions` says nothing."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/completions":
            return 200, {"choices": [{"text": "x"}]}
        assert path == "/generate" and body["return_logprob"]
        prompt = ids if "text" in body else body["input_ids"][body["logprob_start_len"] :]
        assert "text" not in body or body["text"] == PROBE
        meta: dict[str, Any] = {"input_token_logprobs": [[None, prompt[0], None]]}
        meta["input_token_logprobs"] += [[logprob(token), token, None] for token in prompt[1:]]
        if k := body.get("top_logprobs_num", 0):
            meta["input_top_logprobs"] = [None] + [[[-0.5 - n, n, None] for n in range(k)] for _ in prompt[1:]]
        return 200, {"text": "", "meta_info": meta}

    return answer


async def asked(serves: Serves, top: int, **teacher: Any) -> Scored:
    with serving(serves) as served:
        client = PromptLogprobs("far", Teacher(url=served.url, model="m", **teacher))
        first = await client.scored(SEQUENCES, FIRSTS, top=top, probe=IDS)
        await client.scored(SEQUENCES, FIRSTS, top=top, probe=IDS)
    assert sum(PROBE in (body.get("prompt"), body.get("text")) for _, body, _ in served.requests) <= 2
    return first


@pytest.mark.parametrize("serves", [vllm, sglang])
@pytest.mark.parametrize("top", [0, 3])
async def test_both_kinds_of_servers_give_the_logprobs_of_the_tokens_asked_for(serves: Any, top: int) -> None:
    scored = await asked(serves(), top)
    assert scored.logprobs.tolist() == pytest.approx([logprob(7), logprob(3), logprob(8)])
    assert scored.ids.tolist() == [0, 1, 2][:top] * 3
    assert scored.top.tolist() == pytest.approx([-0.5, -1.5, -2.5][:top] * 3)


async def test_a_request_that_fails_in_passing_is_asked_again_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen = list[str]()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        seen.append(str(body))
        return (503, {}) if seen.count(str(body)) == 1 else vllm()(path, body)

    assert (await asked(answer, 0)).logprobs.size == 3
    assert len(seen) == 2 * 3 + 2 and not [one for one in caplog.records if one.name == "httpx"], "no line for each"


def changed(serves: Serves, change: Callable[[dict[str, Any]], object]) -> Serves:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        status, reply = serves(path, body)
        if PROBE not in (body.get("prompt"), body.get("text")):
            change(reply)
        return status, reply

    return answer


BAD: list[tuple[Serves, str]] = [
    (vllm([4, 9, 8]), r"its tokenizer has the ids \[9, 8\].* that has \[4, 9, 7\]"),
    (sglang([1, 4, 9, 8]), r"its tokenizer has the ids \[1, 4, 9, 8\]"),
    (changed(vllm(), lambda reply: reply["choices"][0]["prompt_logprobs"].pop()), "no logprobs of these tokens"),
    (changed(vllm(), lambda reply: reply["choices"][0]["prompt_logprobs"][-1].clear()), r"these tokens \(KeyError"),
    (changed(sglang(), lambda reply: reply.get("meta_info", {}).clear()), "KeyError"),
    (
        changed(sglang(), lambda reply: reply["meta_info"]["input_token_logprobs"].__setitem__(1, [-1, 1, None])),
        "it is of other tokens",
    ),
    (lambda path, body: (503, {"error": "busy"}), "answered 503.*SLIP-TEACHER-02"),
    (lambda path, body: (200, {"choices": []}), "no logprobs of these tokens"),
]


@pytest.mark.parametrize(("serves", "says"), BAD)
async def test_what_does_not_fit_the_tokens_is_refused(serves: Serves, says: str) -> None:
    with pytest.raises(NotScored, match=says):
        await asked(serves, 0)


def test_a_key_that_is_not_set_is_named() -> None:
    with pytest.raises(RewardError, match=r"teachers\.far: no environment variable NO_SUCH_KEY"):
        PromptLogprobs("far", Teacher(url="http://h/v1", model="m", key_variable="NO_SUCH_KEY"))


async def test_a_group_is_scored_by_the_endpoint_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "secret")
    with serving(sglang()) as served:
        far = {"url": served.url, "model": "m", "key_variable": "FAR_KEY"}
        run = config_of(tmp_path, 2, temperature=1.0, far=far)
        fingerprint = {"tokenizer": "t", "vocab_size": "40"}
        teachers = Teachers(run, None, "rollout-0", fingerprint, lambda text: IDS)  # type: ignore[arg-type]
        answers = [Answer(ids[:2], ids[2:], np.ones(ids.size - 2, np.uint8)) for ids in SEQUENCES]
        found = await teachers.group(ROW, answers, [1, 1], no_encoding)
        teachers.close()
    assert found["teachers"] == ["far@0"] * 2 and found["teacher_ids"].tolist() == [0, 1] * 3
    assert found["teacher_logprobs"].tolist() == pytest.approx([logprob(7), logprob(3), logprob(8)])
    assert {key for _, _, key in served.requests} == {"Bearer secret"}
