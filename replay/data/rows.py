"""Rows of a dataset, normalised: what they hold, how a place in a file is named, which values can be sent."""

import datetime
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import SlipstreamError, kind_of

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


class RowLocation(NamedTuple):
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


def plain(value: Any, column: str, place: RowLocation, depth: int = 0) -> Any:
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


def _scalar(value: Any, column: str, place: RowLocation) -> Any:
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


def _key(key: Any, column: str, place: RowLocation) -> str:
    if not isinstance(key, str):
        raise place.error(column, key, f"{kind_of(key)} is the key of a mapping; keys must be text")
    return _checked_text(key, column, place)


def _checked_text(value: str, column: str, place: RowLocation) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise place.error(column, value, "holds an unpaired surrogate, which is not valid text") from error
    return value
