"""Whether what came in a header fits the annotation of its field: one check for each kind of message, made once.

Annotations may be made of bool, int, float, str, None, Any, object, Literal, list, dict and unions. `Any` stands for
what JSON knows: no bytes, no map with other keys than text, at most MAX_DEPTH levels. `object` stands for that and
bytes, which rows of prompts may have (pictures).
"""

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Callable, Set
from functools import partial
from typing import Any

MAX_DEPTH = 32
MIN_INTEGER, MAX_INTEGER = -1, 2**62
"""Of a field that is one number: id, version, step, rank, count (-1: none). What is computed from it fits 64 bits."""
PLAIN = frozenset({type(None), bool, int, float, str})
OF_ROWS = PLAIN | {bytes}

Check = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    name: str
    hint: Any
    required: bool
    fits: Check


def fields_of(kind: type[Any], arrays: typing.Container[str]) -> tuple[Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        Field(
            f.name,
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
            _bounded(hints[f.name]),
        )
        for f in dataclasses.fields(kind)
        if f.name not in arrays
    )


def shown(value: Any) -> str:
    """A value for a message: short, however deep or long it is."""
    return _SHORT.repr(value)[:80]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


def _bounded(hint: Any) -> Check:
    """The check of a whole field: as `_check`, and a single number has bounds."""
    if hint is int:
        return lambda value: type(value) is int and MIN_INTEGER <= value <= MAX_INTEGER
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and math.isfinite(value))
    return _check(hint)


def _check(hint: Any) -> Check:
    """An int passes for a float, a bool never for an int."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return partial(_is_plain, PLAIN if hint is Any else OF_ROWS)
    if origin in (types.UnionType, typing.Union):
        options = [_bounded(option) for option in arguments]
        return lambda value: any(fits(value) for fits in options)
    if origin is typing.Literal:
        return lambda value: type(value) is str and value in arguments
    if origin in (list, dict):
        key, item = (_check_items(arguments[0]), _check_items(arguments[-1]))
        if origin is list:
            return lambda value: type(value) is list and item(value)
        return lambda value: type(value) is dict and key(value) and item(value.values())
    allowed = _types(hint)
    return lambda value: type(value) in allowed


def _check_items(hint: Any) -> Check:
    """The check of many values at once; for the simple types without a call for each."""
    if typing.get_origin(hint) is None and hint not in (Any, object):
        allowed = _types(hint)
        return lambda values: set(map(type, values)) <= allowed
    fits = _check(hint)
    return lambda values: all(map(fits, values))


def _types(hint: Any) -> set[type]:
    assert hint in (bool, int, float, str, None, types.NoneType), f"no check for {hint!r}"
    if hint is float:
        return {int, float}
    return {types.NoneType if hint is None else hint}


def _is_plain(scalars: Set[type], value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in scalars:
        return True
    if depth == MAX_DEPTH or kind not in (list, dict):
        return False
    if kind is dict:
        return set(map(type, value)) <= {str} and all(_is_plain(scalars, item, depth + 1) for item in value.values())
    return all(_is_plain(scalars, item, depth + 1) for item in value)
