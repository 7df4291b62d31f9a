"""Bodies of requests without a server: whatever they hold is understood or refused, and answers have their parts."""

import json
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from configs import Config
from examples.calculator import save_tokenizer
from rollout_server.tasks.agents.answers import ResponseStream, Stream, apart, message_of, whole
from rollout_server.tasks.agents.program import AgentFailed, play, reward_of
from rollout_server.tasks.agents.requests import ApiError, Form, Rules, SamplingRequest, read
from rollout_server.tasks.environments import Turn
from rollout_server.tasks.environments import tool_calls as parsing
from rollout_server.tasks.environments.conversation import Conversation
from rollout_server.tasks.task import Task

NAMES = (
    "model",
    "messages",
    "prompt",
    "input",
    "tools",
    "n",
    "stream",
    "logprobs",
    "max_tokens",
    "stop",
    "tool_choice",
    "x",
)
TEXTS = ("", "auto", "policy", "user", "x")
"""Some, since a strategy for any text takes a second to build."""
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.sampled_from(TEXTS),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from((*NAMES, "role")), inner),
    max_leaves=6,
)
RULES = Rules(temperature=0.8)
TOOL = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "1+2"}


@given(
    some.dictionaries(some.sampled_from(NAMES), VALUES),
    some.sampled_from(("chat", "text", "responses")),
    some.booleans(),
)
def test_any_body_is_understood_or_refused(body: dict[str, Any], form: Any, is_valid: bool) -> None:
    if is_valid:
        body = {**body, "model": "policy", "messages": [USER], "prompt": "1+2", "input": [USER]}
    try:
        asked = read(json.dumps(body).encode(), RULES, form, {})
    except ApiError as refused:
        assert refused.status in (400, 404) and refused.body()["error"]["message"]
    else:
        assert asked.context and 1 <= asked.n <= 64 and (asked.max_new_tokens is None or asked.max_new_tokens >= 1)


def asked_with(form: Form = "chat", **changes: Any) -> SamplingRequest:
    body = {"model": "policy", "messages": [USER], "input": "1+2", **changes}
    return read(json.dumps(body).encode(), RULES, form, {})


def test_what_is_the_run_s_own_is_taken_and_may_be_ignored() -> None:
    assert asked_with(temperature=0.8, top_p=1.0, logit_bias={}, seed=3, stop=[]).max_new_tokens is None
    assert asked_with(max_tokens=9, max_completion_tokens=5).max_new_tokens == 5
    assert asked_with(tools=[TOOL], tool_choice="none").tools is None and asked_with(tools=[TOOL]).tools == [TOOL]
    body = json.dumps({"model": "policy", "messages": [USER], "temperature": 0, "beam_width": 4}).encode()
    with pytest.raises(ApiError, match=r"temperature: 0 is not the run's own rollout.temperature 0\.8"):
        read(body, RULES, "chat", {})
    lenient = Rules(temperature=0.8, ignores=True)
    assert read(body, lenient, "chat", {}).context == [USER]
    with pytest.raises(ApiError, match="stop"):
        read(body.replace(b'"beam_width": 4', b'"stop": ""'), lenient, "chat", {})


def turn_of(text: str, finish_reason: str = "stop") -> Turn:
    message, ids = parsing.message_of(text, 0), list(range(len(text)))
    return Turn(
        number=0, text=text, message=message, token_ids=ids, context_ids=bytes(8), finish_reason=finish_reason, room=9,
        logprobs=[-0.5] * len(ids), versions=[0] * len(ids),
    )  # fmt: skip


def test_a_stream_adds_up_to_the_whole() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for text, tools in ((call, [TOOL]), (f"so: {call}", [TOOL]), ("x" * 99, [TOOL]), (call, None)):
        asked = asked_with(tools=tools, stream=True, stream_options={"include_usage": True}, logprobs=True)
        turn, pieces = turn_of(text), [list(text)]
        (choice,) = whole("a", asked, [turn], pieces)["choices"]
        stream = Stream("a", asked)
        grown = [event for size in range(0, len(text), 3) for event in stream.grown(text[:size])]
        assert len(grown) > 1 or text == call != choice["message"]["content"], "text comes before it is whole"
        sent = [*grown, *stream.ended([turn], pieces)]
        events = [event.removeprefix(b"data: ").strip() for event in sent]
        assert events.pop() == b"[DONE]"
        *chunks, last = map(json.loads, events)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(text)
        deltas = [chunk["choices"][0] for chunk in chunks]
        content = "".join(one["delta"].get("content", "") for one in deltas)
        calls = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
        assert (content.strip() or None) == choice["message"]["content"]
        wanted = [one["function"]["arguments"] for one in choice["message"].get("tool_calls", ())]
        assert ["".join(call["function"]["arguments"] for call in calls)] == (wanted or [""])
        assert deltas[-1]["finish_reason"] == choice["finish_reason"] == ("tool_calls" if wanted else "stop")
        assert [one["logprobs"] for one in deltas if one["logprobs"]] == [choice["logprobs"]]
    cut = message_of(turn_of(call[:-12], "length"), asked_with(tools=[TOOL]))
    assert cut == {"role": "assistant", "content": call[:-12]}, "a call that was cut is no call"
    broken = f"{call}<tool_call>add 1</tool_call>"
    assert message_of(turn_of(broken), asked_with(tools=[TOOL])) == {"role": "assistant", "content": broken}


CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("so, 3", ["message"]),
        ("<think>\nwell, \n</think>\n\n3", ["reasoning", "message"]),
        (f"<think>well</think>so: {CALLED}", ["reasoning", "message", "function_call"]),
        (f"<think>well</think>{CALLED}{CALLED}", ["reasoning", "function_call", "function_call"]),
        ("<think>well", ["reasoning", "message"]),
        ("well</think>3", ["message", "reasoning"]),  # nothing says in time that it is reasoning
    ],
)
def test_a_stream_of_a_response_counts_the_items_of_the_whole(text: str, types: list[str]) -> None:
    """`output_index` is the place in the final `output`, whose items come one after the other."""
    asked = asked_with("responses", tools=[{"type": "function", **TOOL["function"]}], stream=True)
    stream, turn = ResponseStream("r", asked), turn_of(text)
    sent = [event for size in range(len(text)) for event in stream.grown(text[:size])]
    sent += stream.ended([turn], [[]])
    events = [json.loads(event.partition(b"data: ")[2]) for event in sent]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun, done, grown = list[str](), list[Any](), defaultdict[str, str](str)
    for event in events:
        assert TypeAdapter(ResponseStreamEvent).validate_python(event).type == event["type"]  # as the openai package
        kind, at = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert at == len(begun) and (len(done) == at or types[-1] == "reasoning"), "one after the other"
            begun.append(event["item"]["id"])
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == begun[at]
            done.append((at, event["item"]))
        elif at is not None:
            assert event["item_id"] == begun[at]
            grown[event["item_id"]] += event.get("delta", "")
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == types and output == [
        item for _, item in sorted(done, key=itemgetter(0))
    ]
    if types[0] == "reasoning":
        assert grown[begun[0]] == output[0]["summary"][0]["text"]


def test_reasoning_stands_apart_and_may_be_left_out(tmp_path: Path) -> None:
    assert apart("<think>\nwell</think>\n\n3") == ("well", "3") and apart("well</think>3") == ("well", "3")
    assert apart("<think>we") == ("we", "") and apart("3") == ("", "3")
    said = message_of(turn_of("<think>well</think>3"), asked_with())
    assert said == {"role": "assistant", "content": "3", "reasoning_content": "well"}
    (response,) = [whole("r", asked_with("responses"), [turn_of("<think>well</think>3")], [[]])]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    save_tokenizer(tmp_path)
    conversation = Conversation(Task(Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "n"}})))
    ids = [*conversation.encode([USER]), 9, 9]
    text = "<think>well</think>3"
    conversation.answered([USER], None, ids, text, {"role": "assistant", "content": text})
    back = {"role": "assistant", "content": "3"}
    assert conversation.encode([USER, back, USER])[: len(ids)] == ids, "the ids of before, reasoning included"


def test_items_of_a_response_are_messages() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    items = [USER, {"type": "reasoning", "summary": []}, {"type": "message", **USER, "role": "assistant"}, call]
    items.append({"type": "function_call_output", "call_id": "c", "output": "3"})
    body = {"model": "policy", "instructions": "Add.", "input": items, "previous_response_id": "r"}
    before = {"r": [{"role": "system", "content": "old"}, {"role": "user", "content": "before"}]}
    messages = read(json.dumps(body).encode(), RULES, "responses", before).context
    assert [one["role"] for one in messages] == ["system", "user", "user", "assistant", "tool"]  # type: ignore[index]
    assert messages[0]["content"] == "Add." and messages[3]["tool_calls"][0]["id"] == "c"  # type: ignore[index, call-overload]


def test_a_required_call_begins_the_answer() -> None:
    assert asked_with(tools=[TOOL], tool_choice="required").begins == "<tool_call>\n"
    named = asked_with(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.begins == '<tool_call>\n{"name": "add", "arguments":'
    assert parsing.message_of(named.begins + ' {"a": 1}}', 0)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert asked_with(stop="x").stop == ("x",) and asked_with(stop=["x", "y"]).stop == ("x", "y")
    with pytest.raises(ApiError, match="tool_choice"):
        asked_with(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}})


def test_an_answer_may_come_back_as_text_or_as_calls(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}<eos>{% endfor %}"
    )
    model = {"path": str(tmp_path), "chat_template": template}
    task = Task(Config.model_validate({"model": model, "data": {"train": "none.jsonl"}}))
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
    message, conversation = parsing.message_of(text, 0), Conversation(task)
    first = conversation.encode([USER])
    ids = [*first, 9, 9, 9]
    conversation.answered([USER], None, ids, text, message)
    function = {"name": "calculator", "arguments": '{"expression":"1+2"}'}  # pydantic-ai dumps what it has loaded
    respaced = {**message, "tool_calls": [{**message["tool_calls"][0], "function": function}]}
    for back in (message, {**message, "content": None}, respaced, {"role": "assistant", "content": text}):
        assert conversation.encode([USER, back, USER])[: len(ids)] == ids
    assert task.render([message], None) == '{"expression": "1+2"}<eos>', "a template gets values, not text of JSON"


def test_the_last_line_says_the_reward() -> None:
    assert reward_of('{"reward": 0.5, "moves": 7}') == {"score": 0.5, "moves": 7}
    assert reward_of('{"score": 1}') == {"score": 1}
    assert reward_of("42") is reward_of("the answer is 42") is reward_of("") is None, "an answer is no reward"
    with pytest.raises(AgentFailed, match="without `reward`"):
        reward_of('{"rewrd": 1.0}')


@pytest.mark.parametrize("row", [{"images": [b"PNG"]}, {"columns": {"images": b"PNG"}}])
async def test_a_row_that_is_no_json_is_named_by_its_column(row: dict[str, Any]) -> None:
    name = "columns.images" if "columns" in row else "images"
    with pytest.raises(AgentFailed, match=rf"the row's '{name}' cannot be given to a program as JSON: .* bytes"):
        await play(["python", "-c", "pass"], {"prompt": "1", **row}, {})
