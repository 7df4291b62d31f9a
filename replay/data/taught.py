"""Rows that hold their answers: demonstrations (SFT), and pairs of a better and a worse answer (DPO).

| trajectories | columns                           | in the loss                                    |
|--------------|-----------------------------------|------------------------------------------------|
| 1            | `messages`                        | messages of the roles in data.loss_roles       |
| 1            | `prompt`, `completion`            | the completion; of messages, those roles in it |
| 1            | `text`                            | all of it                                      |
| 2            | `prompt`, `chosen`, `rejected`    | chosen and rejected, as a completion           |
| 2            | `chosen`, `rejected`              | where the two messages differ                  |

A prompt and what follows it are both text, or both messages. `tools` may stand beside messages. A message has `role`
and `content`, and may have `tool_calls`, `tool_call_id`, `name` and `reasoning_content`, as OpenAI's have.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import kind_of
from replay.data.rows import DataError, Row, RowLocation, plain

ROLES = ("system", "user", "assistant", "tool")
KEYS = ("content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Of a message, beside its role."""
FORMS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (("messages",), ("prompt", "completion"), ("text",)),
    2: (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
"""By trajectories of a row, the columns that hold them, in the order in which they are tried."""
EXPECTED = {"messages": "a list of messages", "text": "text"}
"""Of columns; the others take both."""
PICTURES = ("images", "image", "image_urls", "videos", "video")
Message = dict[str, Any]
Said = str | list[Message]
"""Text, or messages of a conversation."""


class Taught(NamedTuple):
    """One trajectory of a row."""

    before: Said
    """What the answer follows; empty where there is nothing."""
    answer: Said
    tools: list[Any] | None


def form_of(raw: Mapping[str, Any], source: str, answers: int) -> tuple[str, ...]:
    """The columns that a file's first row has its answers in. Raises DataError."""
    for columns in FORMS[answers]:
        if all(column in raw for column in columns):
            return columns
    wanted = ", or ".join(" and ".join(f"`{column}`" for column in columns) for columns in FORMS[answers])
    raise DataError(
        f"{source}: row 1 has the columns {sorted(raw)}, and learner.objective learns from the answers in its rows;"
        f" give each row {wanted} (docs/howto/data.md)"
    )


def taught_row(raw: Mapping[str, Any], columns: tuple[str, ...], place: RowLocation) -> Row:
    """A raw row as a `Row`, whose columns hold what `taught_of` reads. Raises RowError: one is missing or unusable."""
    if filled := [column for column in PICTURES if _is_filled(raw.get(column))]:
        raise place.error(filled[0], raw[filled[0]], "pictures are trained with learner.objective=rl alone; remove it")
    said = {column: _said(raw.get(column), column, place) for column in columns}
    if len({type(value) for value in said.values()}) > 1:
        raise place.error(columns[-1], raw[columns[-1]], f"{' and '.join(columns)} are all text, or all messages")
    data_source = raw.get("data_source")
    name = data_source if isinstance(data_source, str) else place.label
    rest = {key: value for key, value in raw.items() if key not in (*columns, "data_source")}
    return {
        "prompt": said.pop("prompt", ""),
        "ground_truth": None,
        "data_source": name or place.source.rpartition("/")[2].partition(".")[0],
        "extra_info": {},
        "columns": {key: plain(value, key, place) for key, value in rest.items()} | said | _tools(raw, place),
    }


def taught_of(row: Row, answers: int) -> list[Taught]:
    """The trajectories of a row that has so many."""
    columns, prompt = row["columns"], row["prompt"]
    tools = columns.get("tools")
    if answers == 1 and prompt:
        return [Taught(prompt, columns["completion"], tools)]
    if answers == 1:
        return [Taught([], columns["messages"], tools) if "messages" in columns else Taught("", columns["text"], None)]
    chosen, rejected = columns["chosen"], columns["rejected"]
    if not prompt and isinstance(chosen, list):
        same = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    return [Taught(prompt, answer, tools) for answer in (chosen, rejected)]


def _said(value: Any, column: str, place: RowLocation) -> Said:
    if isinstance(value, str) and value and column != "messages":
        return str(plain(value, column, place))
    if not isinstance(value, (list, tuple, np.ndarray)) or not len(value) or column == "text":
        expected = EXPECTED.get(column, "text or a list of messages")
        raise place.error(column, value, f"expected {expected}, found {kind_of(value)}, or it is empty")
    return [_message(message, f"{column}[{number}]", place) for number, message in enumerate(value)]


def _message(message: Any, column: str, place: RowLocation) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise place.error(column, message, f"expected a message with a role of {', '.join(ROLES)}")
    # Parquet gives every message of a column the same keys, so null ones say nothing.
    given = _without_nulls({key: value for key, value in message.items() if key != "role"})
    if other := sorted(set(given) - set(KEYS)):
        raise place.error(f"{column}.{other[0]}", given[other[0]], f"a message has role, {', '.join(KEYS)}; remove it")
    content, calls = given.get("content"), given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise place.error(f"{column}.tool_calls", calls, f"expected a list of calls, found {kind_of(calls)}")
    if not isinstance(content, str if not calls else str | None):
        raise place.error(f"{column}.content", content, f"expected text, found {kind_of(content)}")
    found = {"role": message["role"], **{key: plain(given[key], f"{column}.{key}", place) for key in given}}
    if calls:
        found["tool_calls"] = [_call(call, f"{column}.tool_calls", place) for call in found["tool_calls"]]
    return found


def _call(call: Any, column: str, place: RowLocation) -> Any:
    """A call whose arguments are a mapping, as templates want it; OpenAI writes them as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise place.error(column, call, 'expected a call {"function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise place.error(f"{column}.arguments", arguments, f"not readable as JSON: {error}") from error
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _tools(raw: Mapping[str, Any], place: RowLocation) -> dict[str, Any]:
    """The column of tools as a list; some files have it as JSON text."""
    value = raw.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise place.error("tools", value, f"not readable as JSON: {error}") from error
    if value is None or isinstance(value, str):
        return {"tools": None} if "tools" in raw else {}
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise place.error("tools", value, f"expected a list of tools, found {kind_of(value)}")
    return {"tools": plain(_without_nulls(list(value)), "tools", place) or None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_filled(value: object) -> bool:
    return value is not None and not (isinstance(value, Sequence) and not len(value))
