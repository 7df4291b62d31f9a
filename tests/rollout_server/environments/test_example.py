"""The two-turn example: its demonstrations are, id for id, what the tool loop makes of a conversation."""

from pathlib import Path

import numpy as np

from configs import Config
from examples import calculator as example
from rollout_server.tasks.environments.conversation import Conversation
from rollout_server.tasks.environments.tool_calls import message_of
from rollout_server.tasks.environments.tools import calculator
from rollout_server.tasks.task import Task


def test_the_warm_up_shows_what_the_tool_loop_will_ask(tmp_path: Path) -> None:
    example.save_tokenizer(tmp_path)
    task = Task(Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "none.jsonl"}}))
    ids, labels = example.demonstration(48, 27, None)
    asked = example.row(np.array([48, 27]))["prompt"]
    conversation = Conversation(task)
    first = conversation.encode(asked)
    assert first == ids[: len(first)] and task.encode({"prompt": asked}) == first
    call = ids[len(first) : ids.index(example.EOS) + 1]
    text = task.decode(call)
    message = message_of(text, 0)
    (made,) = message["tool_calls"]
    assert (made["function"]["name"], made["function"]["arguments"]) == ("calculator", '{"expression": "48+27"}')
    conversation.answered(asked, None, first + call, text, message)
    told = [*asked, message, {"role": "tool", "tool_call_id": made["id"], "content": calculator("48+27")}]
    second = conversation.encode(told)
    assert second == ids[: len(second)]
    assert task.decode(ids[len(second) :]) == "75" == example.row(np.array([48, 27]))["answer"]
    spoken = [token for token, label in zip(ids, labels, strict=True) if label != example.IGNORED]
    assert spoken == call + ids[len(second) :]


def test_no_pair_of_the_evaluation_is_demonstrated() -> None:
    assert len({tuple(pair) for pair in example.pairs(3).tolist()}) == example.LIMIT**2
    guess, labels = example.demonstration(1, 2, 50)
    assert example.demonstration(1, 2, None)[0][:4] == guess[:4] and labels[-1] == example.EOS
