"""Values that programs have computed, outside of the sandbox: decoded, and compared as an assert would compare them."""

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from fractions import Fraction
from numbers import Number
from typing import Any, Literal

MAX_NUMBER_CHARS = 3_500
"""Of a number's text, as in code_inside, which goes into the sandbox and is imported by nothing."""
RELATIVE = 1e-9
"""Floats of a program and of a dataset that differ by less are equal."""
MAX_COLLISIONS = 64
"""Entries of a set or a dict that have one hash; more would take quadratic time."""
BUILD: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(_short(text), 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*parts),
    "Fraction": lambda text: _fraction(text),
    "Decimal": lambda text: _decimal(text),
    "list": lambda parts: list(map(_built, parts)),
    "tuple": lambda parts: tuple(map(_built, parts)),
    "set": lambda parts: set(_keys(parts)),
    "frozenset": lambda parts: frozenset(_keys(parts)),
    "deque": lambda parts: deque(map(_built, parts)),
    "keys": lambda parts: dict.fromkeys(_keys(parts)).keys(),
    "values": lambda parts: dict(enumerate(map(_built, parts))).values(),
    "dict": lambda pairs: _mapping(pairs),
    "Counter": lambda pairs: Counter(_mapping(pairs)),
    "items": lambda pairs: _mapping(pairs).items(),
}
"""By the name in code_inside.encoded: builds a value in linear time, and runs nothing of the program's."""
NAMES = (
    "from collections import Counter, deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    "nan, inf = float('nan'), float('inf')\n"
    "def dict_keys(one): return dict.fromkeys(one).keys()\n"
    "def dict_values(one): return dict(enumerate(one)).values()\n"
    "def dict_items(one): return dict(one).items()\n"
)
"""What the `repr` of a decoded value needs to be an expression."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression has come to."""

    kind: Literal["value", "raised", "not_encoded", "word"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class Same:
    """Wanted in place of a constant that `is` compares: 1 is not True."""

    constant: Any


def decoded(line: str) -> Value:
    """From a line that the sandbox wrote; anything else counts as raised."""
    try:
        kind, value = json.loads(line)
        if kind in ("value", "word", "not_encoded"):
            return Value(kind, _built(value) if kind == "value" else value)
    except (ValueError, TypeError, LookupError, ArithmeticError, DecimalException, RecursionError, MemoryError):
        pass
    return Value("raised")


def _built(value: Any) -> Any:
    return BUILD[value[0]](value[1]) if isinstance(value, list) else value


def _mapping(pairs: Any) -> dict[Any, Any]:
    keys, values = zip(*pairs, strict=True) if pairs else ((), ())
    return dict(zip(_keys(keys), map(_built, values), strict=True))


def _keys(parts: Any) -> list[Any]:
    """Entries of a set or a dict. Raises ValueError: too many of them have one hash."""
    keys = list(map(_built, parts))
    if max(Counter(map(hash, keys)).values(), default=0) > MAX_COLLISIONS:
        raise ValueError(f"more than {MAX_COLLISIONS} entries have one hash")
    return keys


def _short(text: Any) -> str:
    """Text of a number. Raises ValueError: longer than any that is encoded."""
    if not isinstance(text, str) or len(text) > MAX_NUMBER_CHARS:
        raise ValueError("no text of a number, or too long")
    return text


def _fraction(text: Any) -> Fraction:
    """From two ints: text with an exponent (1e999999999) would be computed for hours."""
    numerator, _, denominator = _short(text).partition("/")
    return Fraction(int(numerator), int(denominator or 1))


def _decimal(text: Any) -> Decimal:
    """Raises ValueError: a signalling NaN, which cannot be compared."""
    number = Decimal(_short(text))
    if number.is_snan():
        raise ValueError("a signalling NaN equals nothing")
    return number


def same(value: Any, wanted: Any) -> bool:
    """Equal as Python has it, but for rounding of floats."""
    if isinstance(wanted, Same):
        has_one = wanted.constant is None or isinstance(wanted.constant, bool)
        return value is wanted.constant if has_one else same(value, wanted.constant)
    if isinstance(value, Number) and isinstance(wanted, Number):
        return bool(value == wanted) or _near(value, wanted)
    if isinstance(value, list | tuple):
        alike = isinstance(wanted, list) if isinstance(value, list) else isinstance(wanted, tuple)
        return alike and len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same(one, wanted[key]) for key, one in value.items())
    return bool(value == wanted)


def _near(value: Any, wanted: Any) -> bool:
    try:
        return float in (type(value), type(wanted)) and math.isclose(value, wanted, rel_tol=RELATIVE)
    except (OverflowError, TypeError):
        return False
