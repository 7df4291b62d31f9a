r"""Which columns of a dataset hold what: a table, of which the first row of a file picks one line.

| convention | prompt                     | ground truth                | extra_info   |
|------------|----------------------------|-----------------------------|--------------|
| verl       | `prompt`                   | `reward_model.ground_truth` | `extra_info` |
| slime      | `prompt`                   | `label`                     | `metadata`   |
| own        | `prompt`                   | `answer`                    | `extra_info` |
| trl        | `prompt`                   | `solution`, if there is one | `extra_info` |
| gsm8k      | `question`, a user message | after `####` in `answer`    | `extra_info` |
| question   | `question`, a user message | `answer`                    | `extra_info` |
| problem    | `problem`, a user message  | `answer`                    | `extra_info` |
| math       | `problem`, a user message  | last box of `solution`      | `extra_info` |
| mbpp       | `text`, a user message     | `test_list`                 | `extra_info` |

A `question` is what somebody says, so it becomes one message of the user; a `prompt` of plain text is taken
as it is, without a chat template. Every other column is kept in `columns`, where TRL reward functions and
those of your own find it; the column of the ground truth is kept there too, except verl's.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from configs.errors import kind_of
from replay.data.rows import EMPTY, DataError, Row, RowError, RowLocation, plain

ROLES = ("system", "user", "assistant", "tool")
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
Raw = Mapping[str, Any]


class Convention(NamedTuple):
    """Columns of a kind of dataset. The functions raise ValueError, which says what they expect."""

    name: str
    prompt: str
    truth: str | None
    """None in TRL's prompt-only form: the reward function looks at the answer alone."""
    extra: str = "extra_info"
    is_said: bool = False
    """Whether the text of the prompt is one message of the user."""
    answer: Callable[[Raw], Any] | None = None
    """The ground truth; None takes the column as it is."""
    ask: Callable[[Raw], str] | None = None
    """The text of the prompt; None takes the column as it is."""
    is_nested: bool = False
    """Whether the column of the ground truth is left out of `columns`."""


def _of_verl(raw: Raw) -> Any:
    if not isinstance(raw["reward_model"], Mapping) or "ground_truth" not in raw["reward_model"]:
        raise ValueError('expected a mapping {"ground_truth": ...}')
    return raw["reward_model"]["ground_truth"]


def _after_hashes(raw: Raw) -> str:
    """GSM8K writes thousands as 1,000; verl's preparation drops the comma as well."""
    answer = raw["answer"]
    _, mark, found = answer.rpartition("####") if isinstance(answer, str) else ("", "", "")
    if not mark or not found.strip():
        raise ValueError("expected a solution that ends in `#### <answer>`, like row 1's")
    return str(found).strip().replace(",", "")


def _last_boxed(raw: Raw) -> str:
    r"""What the last \boxed{...} of `solution` holds, braces within included, or the word after `\boxed `."""
    solution = raw["solution"]
    boxes = list(BOX.finditer(solution)) if isinstance(solution, str) else []
    rest = solution[boxes[-1].end() :] if boxes else ""
    found = re.split(r"[\s$]", rest, maxsplit=1)[0]
    if rest.startswith("{"):
        depths = itertools.accumulate((sign == "{") - (sign == "}") for sign in rest)
        found = rest[1 : next((position for position, depth in enumerate(depths) if depth == 0), 0)].strip()
    if not found:
        raise ValueError("expected a solution with its answer in \\boxed{...}")
    return found


def _asserts(raw: Raw) -> list[str]:
    tests = raw.get("test_list")
    listed = list(tests) if isinstance(tests, (list, tuple, np.ndarray)) else []
    if not listed or not all(isinstance(test, str) for test in listed):
        raise ValueError("expected a list of asserts, as MBPP has it")
    return listed


def _with_first_test(raw: Raw) -> str:
    """The first assert tells the name of the function."""
    return f"{raw['text'].strip()}\nYour code has to pass this test:\n{_asserts(raw)[0]}"


def _tests(raw: Raw) -> str:
    """What the reward `code` runs: a JSON list of imports and asserts."""
    setup = raw.get("test_imports", raw.get("test_setup_code"))
    lines = setup.splitlines() if isinstance(setup, str) else list(setup if setup is not None else [])
    return json.dumps([*(line for line in lines if line.strip()), *_asserts(raw)])


GSM8K = Convention("gsm8k", "question", "answer", is_said=True, answer=_after_hashes)
CONVENTIONS = (
    Convention("verl", "prompt", "reward_model", answer=_of_verl, is_nested=True),
    Convention("slime", "prompt", "label", extra="metadata"),
    Convention("own", "prompt", "answer"),
    Convention("trl", "prompt", "solution"),
    Convention("trl", "prompt", None),
    GSM8K,
    Convention("question", "question", "answer", is_said=True),
    Convention("problem", "problem", "answer", is_said=True),
    Convention("math", "problem", "solution", is_said=True, answer=_last_boxed),
    Convention("mbpp", "text", "test_list", is_said=True, answer=_tests, ask=_with_first_test),
)
"""In the order in which they are tried."""


def detect(raw: Raw, source: str) -> Convention:
    """The convention of a file's first row. Raises DataError: neither prompt nor question."""
    for convention in CONVENTIONS:
        is_here = convention.prompt in raw and convention.truth in (None, *raw)
        if is_here and (convention is not GSM8K or "####" in str(raw["answer"])):
            return convention
    raise DataError(
        f"{source}: row 1 has the columns {sorted(raw)}, but no prompt; give each row `prompt` and `answer` (or the"
        " columns of verl, slime, TRL, GSM8K, MATH or MBPP: docs/howto/data.md)"
    )


def normalize(raw: Raw, convention: Convention, place: RowLocation) -> Row:
    """A raw row as a `Row`. Raises RowError: a column is missing or unusable."""
    extra, data_source = raw.get(convention.extra), raw.get("data_source")
    if extra is not None and not isinstance(extra, Mapping):
        raise place.error(convention.extra, extra, f"expected a mapping, found {kind_of(extra)}")
    if data_source is not None and not isinstance(data_source, str):
        raise place.error("data_source", data_source, f"expected text, found {kind_of(data_source)}")
    used = {convention.prompt, convention.extra, "data_source", convention.truth if convention.is_nested else None}
    return {
        "prompt": _prompt(raw, convention, place),
        "ground_truth": _ground_truth(raw, convention, place),
        "data_source": data_source or place.label or place.source.rpartition("/")[2].partition(".")[0],
        "extra_info": plain(dict(extra or {}), convention.extra, place),
        "columns": {key: plain(value, key, place) for key, value in raw.items() if key not in used},
    }


def _prompt(raw: Raw, convention: Convention, place: RowLocation) -> str | list[dict[str, str]]:
    column, value = convention.prompt, raw.get(convention.prompt)
    if value is None:
        raise RowError(
            f"{place.source}: row {place.row}: column {column!r} is missing or null (columns {sorted(raw)}); every row"
            " needs a prompt: add it or remove the row"
        )
    if isinstance(value, str):
        asked = value if convention.ask is None else _told(convention.ask, raw, convention.truth, place)
        text = _text(asked, column, place)
        return [{"role": "user", "content": text}] if convention.is_said else text
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise place.error(column, value, f"expected text or a list of messages, found {kind_of(value)}")
    if not len(value):
        raise place.error(column, value, EMPTY)
    return [_message(message, f"{column}[{number}]", place) for number, message in enumerate(value)]


def _message(message: Any, column: str, place: RowLocation) -> dict[str, str]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise place.error(column, message, 'expected a message {"role": ..., "content": ...}')
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise place.error(f"{column}.role", role, f"unknown role; take one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise place.error(f"{column}.content", content, f"expected text, found {kind_of(content)}")
    # Parquet gives every message of a column the same keys, so null ones say nothing.
    other = sorted(key for key, value in message.items() if key not in ("role", "content") and value is not None)
    if other:
        raise place.error(f"{column}.{other[0]}", message[other[0]], "a message has role and content only; remove it")
    return {"role": role, "content": _text(content, f"{column}.content", place)}


def _text(value: str, column: str, place: RowLocation) -> str:
    if not value.strip():
        raise place.error(column, value, EMPTY)
    return str(plain(value, column, place))


def _ground_truth(raw: Raw, convention: Convention, place: RowLocation) -> Any:
    column = convention.truth
    if column is None:
        return None
    if column not in raw:
        raise RowError(
            f"{place.source}: row {place.row}: column {column!r} is missing (columns {sorted(raw)}); the file follows"
            f" the {convention.name} convention, so every row needs it: add it or remove the row"
        )
    value = raw[column] if convention.answer is None else _told(convention.answer, raw, column, place)
    return plain(value, column, place)


def _told(ask: Callable[[Raw], Any], raw: Raw, column: str | None, place: RowLocation) -> Any:
    try:
        return ask(raw)
    except ValueError as error:
        raise place.error(str(column), raw.get(str(column)), str(error)) from error
