"""One row of a dataset, normalised: which columns hold what (by convention), checked and msgpack-able.

| convention | prompt                     | ground truth                | extra_info   |
|------------|----------------------------|-----------------------------|--------------|
| verl       | `prompt`                   | `reward_model.ground_truth` | `extra_info` |
| slime      | `prompt`                   | `label`                     | `metadata`   |
| gsm8k      | `question`, a user message | after `####` in `answer`    | `extra_info` |
| question   | `question`, a user message | `answer`                    | `extra_info` |
| own        | `prompt`                   | `answer`                    | `extra_info` |
| trl        | `prompt`                   | `solution`, if there is one | `extra_info` |
| problem    | `problem`, a user message  | `answer`                    | `extra_info` |
| math       | `problem`, a user message  | last box of `solution`      | `extra_info` |
| mbpp       | `text`, a user message     | `test_list`                 | `extra_info` |

A `question` is what somebody says, so it becomes one message of the user; a `prompt` of plain text is taken
as it is, without a chat template. Every other column is kept in `columns`, where TRL reward functions and
those of your own find it; the column of the ground truth is kept there too, except verl's.
"""

import datetime
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import SlipstreamError, kind_of
from replay.data import published

ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 16
EMPTY = "the prompt is empty; fill it or remove the row"


class DataError(SlipstreamError, ValueError, code="SLIP-DATA-01"):
    """A dataset cannot be used; the message names file, row, column and value, and says what to do."""


class RowError(DataError, code="SLIP-DATA-02"):
    """One row cannot be used; the others can."""


Row = dict[str, Any]
"""A normalised row; everything in it survives msgpack. Its keys are always these five:

prompt: text, or chat messages [{"role": ..., "content": ...}]; ground_truth: what the reward compares with, or None;
data_source: name of the dataset; extra_info: mapping for reward functions; columns: every other column. A row with
pictures has `images` as well (replay/data/pictures.py), and messages of parts.

Example: {"prompt": "312=", "ground_truth": "123", "data_source": "train", "extra_info": {}, "columns": {}}
"""


class Convention(NamedTuple):
    """Which columns of a kind of dataset hold what. Found per file by `detect`."""

    name: str
    prompt: str
    truth: str | None
    extra: str = "extra_info"


VERL = Convention("verl", "prompt", "reward_model")
SLIME = Convention("slime", "prompt", "label", "metadata")
GSM8K = Convention("gsm8k", "question", "answer")
QUESTION = Convention("question", "question", "answer")
OWN = Convention("own", "prompt", "answer")
PROBLEM = Convention("problem", "problem", "answer")
MATH = Convention("math", "problem", "solution")
MBPP = Convention("mbpp", "text", "test_list")
SAID = ("question", "problem", "text")
"""Columns whose text is one message of the user."""
TRL = Convention("trl", "prompt", "solution")
TRL_UNJUDGED = Convention("trl", "prompt", None)
"""TRL's prompt-only form: the reward function looks at the answer alone."""


class Place(NamedTuple):
    """Where a value stands, for errors."""

    source: str
    row: int
    label: str = ""
    """data_source of a row that names none; empty takes the name of the file."""

    def error(self, column: str, value: object, problem: str) -> RowError:
        """A RowError that names this place, the column and the value."""
        return RowError(f"{self.source}: row {self.row}, column {column!r}: {problem} (value {shorten(value)})")


def shorten(value: object, limit: int = 120) -> str:
    """`repr` of a value, cut to `limit` characters."""
    text = repr(value[: limit + 1]) if isinstance(value, (str, bytes)) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def detect(raw: Mapping[str, Any], source: str) -> Convention:
    """The convention of a file's first row. Raises DataError: neither prompt nor question."""
    if "prompt" in raw:
        for convention in (VERL, SLIME, OWN, TRL):
            if convention.truth in raw:
                return convention
        return TRL_UNJUDGED
    if "question" in raw and "answer" in raw:
        return GSM8K if isinstance(raw["answer"], str) and "####" in raw["answer"] else QUESTION
    for convention in (PROBLEM, MATH, MBPP):
        if convention.prompt in raw and convention.truth in raw:
            return convention
    raise DataError(
        f"{source}: row 1 has the columns {sorted(raw)}, but no prompt; give each row `prompt` and `answer` (or the"
        " columns of verl, slime, TRL, GSM8K, MATH or MBPP: docs/howto/data.md)"
    )


def normalize(raw: Mapping[str, Any], convention: Convention, place: Place) -> Row:
    """A raw row as a `Row`. Raises RowError: a column is missing or unusable."""
    extra, data_source = raw.get(convention.extra), raw.get("data_source")
    if extra is not None and not isinstance(extra, Mapping):
        raise place.error(convention.extra, extra, f"expected a mapping, found {kind_of(extra)}")
    if data_source is not None and not isinstance(data_source, str):
        raise place.error("data_source", data_source, f"expected text, found {kind_of(data_source)}")
    used = {convention.prompt, convention.extra, "data_source"} | ({"reward_model"} if convention is VERL else set())
    return {
        "prompt": _prompt(raw, convention, place),
        "ground_truth": _ground_truth(raw, convention, place),
        "data_source": data_source or place.label or place.source.rpartition("/")[2].partition(".")[0],
        "extra_info": plain(dict(extra or {}), convention.extra, place),
        "columns": {key: plain(value, key, place) for key, value in raw.items() if key not in used},
    }


def _prompt(raw: Mapping[str, Any], convention: Convention, place: Place) -> str | list[dict[str, str]]:
    column = convention.prompt
    if raw.get(column) is None:
        raise RowError(
            f"{place.source}: row {place.row}: column {column!r} is missing or null (columns {sorted(raw)}); every row"
            " needs a prompt: add it or remove the row"
        )
    value = raw[column]
    if isinstance(value, str):
        if convention is MBPP:
            if not published.asserts_of(raw):
                raise place.error("test_list", raw.get("test_list"), "expected a list of asserts, as MBPP has it")
            value = published.with_first_test(value, raw)
        text = _text(value, column, place)
        return [{"role": "user", "content": text}] if column in SAID else text
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise place.error(column, value, f"expected text or a list of messages, found {kind_of(value)}")
    if not len(value):
        raise place.error(column, value, EMPTY)
    return [_message(message, f"{column}[{number}]", place) for number, message in enumerate(value)]


def _message(message: Any, column: str, place: Place) -> dict[str, str]:
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


def _text(value: str, column: str, place: Place) -> str:
    if not value.strip():
        raise place.error(column, value, EMPTY)
    return str(plain(value, column, place))


def _ground_truth(raw: Mapping[str, Any], convention: Convention, place: Place) -> Any:
    column = convention.truth
    if column is None:
        return None
    if column not in raw:
        raise RowError(
            f"{place.source}: row {place.row}: column {column!r} is missing (columns {sorted(raw)}); the file follows"
            f" the {convention.name} convention, so every row needs it: add it or remove the row"
        )
    value = raw[column]
    if convention is VERL:
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise place.error(column, value, 'expected a mapping {"ground_truth": ...}')
        return plain(value["ground_truth"], "reward_model.ground_truth", place)
    if convention is GSM8K:
        if not isinstance(value, str) or not value.rpartition("####")[2].strip() or "####" not in value:
            raise place.error(column, value, "expected a solution that ends in `#### <answer>`, like row 1's")
        # GSM8K writes thousands as 1,000; verl's preparation drops the comma as well.
        return plain(value.rpartition("####")[2].strip().replace(",", ""), column, place)
    if convention is MATH:
        boxed = published.last_boxed(value) if isinstance(value, str) else None
        if boxed is None:
            raise place.error(column, value, "expected a solution with its answer in \\boxed{...}")
        return plain(boxed, column, place)
    if convention is MBPP:
        return plain(published.tests_of(raw), column, place)
    return plain(value, column, place)


def plain(value: Any, column: str, place: Place, depth: int = 0) -> Any:
    """The value in types that msgpack carries: numpy becomes Python, dates become ISO text, decimals become text.

    Raises DataError: NaN, infinity, integers beyond 64 bits, keys that are no text, unpaired surrogates, other types.
    """
    if value is None or isinstance(value, (bool, bytes)):
        return value
    if isinstance(value, str):
        return _checked_text(value, column, place)
    if isinstance(value, (int, float, np.generic, decimal.Decimal, datetime.date, datetime.time)):
        return _scalar(value, column, place)
    if depth == MAX_DEPTH:
        raise place.error(column, value, f"nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        items = [(_key(key, column, place), item) for key, item in value.items()]
        return {key: plain(item, f"{column}.{key}", place, depth + 1) for key, item in items}
    if isinstance(value, Sequence):
        return [plain(item, f"{column}[{number}]", place, depth + 1) for number, item in enumerate(value)]
    raise place.error(column, value, f"{kind_of(value)} cannot be sent; store text, numbers, lists or mappings")


def _scalar(value: Any, column: str, place: Place) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise place.error(column, value, "not a finite number; store null or remove the row")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise place.error(column, value, "does not fit into 64 bits; store it as text")
    return value


def _key(key: Any, column: str, place: Place) -> str:
    if not isinstance(key, str):
        raise place.error(column, key, f"{kind_of(key)} is the key of a mapping; keys must be text")
    return _checked_text(key, column, place)


def _checked_text(value: str, column: str, place: Place) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise place.error(column, value, "holds an unpaired surrogate, which is not valid text") from error
    return value
