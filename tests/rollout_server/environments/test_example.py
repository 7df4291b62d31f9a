"""The two-turn example: its demonstrations are, id for id, what the tool loop makes of a conversation."""

import json
from pathlib import Path

import numpy as np

from configs import Config
from examples import calculator as example
from examples import products
from replay.data.dataset import Rows
from replay.data.encoding import RowEncoder
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


def test_a_demonstration_of_a_product_is_learned_as_the_tool_loop_will_see_it(tmp_path: Path) -> None:
    example.save_tokenizer(tmp_path)
    three, file = np.array([48, 27, 6]), tmp_path / "sft.jsonl"
    file.write_text(json.dumps(products.demonstration(three, None)))
    config = Config.model_validate(
        {"model": {"path": str(tmp_path)}, "data": {"train": str(file)}, "learner": {"objective": "sft"}}
    )
    ((one,),) = (RowEncoder(config, 1).encode(row) for row in Rows(file, answers=1))
    ids, symbols = example.IDS, example.encode
    call, asked = [ids[example.CALL], *symbols("48*27*6"), ids[example.END], example.EOS], symbols("48*27*6")
    told = [ids["<tool>"], *symbols(calculator("48*27*6")), ids["<assistant>"]]
    assert one.prompt_ids.tolist() == [ids["<user>"], *asked, ids["<assistant>"]]
    assert one.token_ids.tolist() == [*call, *told, *symbols("7776"), example.EOS]
    assert one.loss_mask.tolist() == [1] * len(call) + [0] * len(told) + [1] * 5
    assert Task(config).encode(products.row(three)) == one.prompt_ids.tolist()


def test_no_product_is_in_two_files() -> None:
    total = products.HELD_OUT + products.PROMPTS + products.DEMONSTRATIONS
    assert len({tuple(three) for three in products.factors(3).tolist()}) == total
