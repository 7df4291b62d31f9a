"""Valid messages of every kind, with the values of a small run: what mutations start from."""

import base64
import dataclasses
import json
import random
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replay.channel.frames import DTYPES, Message, Registry, decode

GROUP_SIZE = 2
PROMPTS = 40
LEASED = 10
"""About as many prompts are leased at a time."""
MAX_VERSION = 3
SMALL = {"index": LEASED, "version": MAX_VERSION, "min_version": MAX_VERSION, "step": MAX_VERSION + 1, "rank": 2}
"""Exclusive limits of numbers by the name of their field; others are below 3."""
WORDS = ["", "stop", "length", "engine_error", "rollout-1", "tcp://127.0.0.1:1", "fuzz"]

FROZEN = json.loads((Path(__file__).parents[2] / "frozen" / "wire_frames.json").read_text())["frames"]
WHOLE = {"Group": "replay.Group", "Begin": "weight_bus.Begin"}


class Samples:
    """Makes messages. `given` fixes fields by name, where a target must know them (sessions, for example)."""

    def __init__(self, kinds: Registry, rng: random.Random, given: Callable[[], Mapping[str, Any]]) -> None:
        self._kinds = [kinds[name] for name in sorted(kinds)]
        self._weights = [1 + len(kind.ARRAYS) for kind in self._kinds]
        self._rng = rng
        self._given = given

    def any(self) -> Message:
        """One message of any kind; those with most to check come most often."""
        return self.of(self._rng.choices(self._kinds, self._weights)[0])

    def of(self, kind: type[Message]) -> Message:
        """One message of a kind."""
        given, hints = self._given(), typing.get_type_hints(kind)
        if kind.__name__ in WHOLE:  # these are refused unless all their fields fit together
            frames = [base64.b64decode(frame) for frame in FROZEN[WHOLE[kind.__name__]]]
            numbers = {name: self._rng.randrange(SMALL.get(name, 3)) for name in ("index", "epoch", "version")}
            changes = {name: value for name, value in (numbers | dict(given)).items() if name in hints}
            return dataclasses.replace(decode(frames, {kind.__name__: kind}).message, **changes)
        values = {}
        for name, hint in hints.items():
            if name == "ARRAYS":
                continue
            if name in given:
                values[name] = given[name]
            elif name in kind.ARRAYS:
                values[name] = self._array(kind.ARRAYS[name])
            else:
                values[name] = self._value(name, hint)
        return kind(**values)

    def _array(self, dtype: str) -> Any:
        return np.array([self._rng.randrange(3) for _ in range(self._rng.choice((0, 1, 2, 8)))], dtype=DTYPES[dtype])

    def _value(self, name: str, hint: Any) -> Any:
        rng, origin, arguments = self._rng, typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._value(name, rng.choice(arguments))
        if origin is typing.Literal:
            return rng.choice(arguments)
        if origin is list:
            return [self._value(name, arguments[0]) for _ in range(rng.choice((0, 1, GROUP_SIZE, 4)))]
        if origin is dict:
            return {rng.choice(WORDS): self._value(name, arguments[1]) for _ in range(rng.randrange(3))}
        simple: dict[Any, Callable[[], Any]] = {
            int: lambda: rng.randrange(SMALL.get(name, 3)),
            float: lambda: rng.random(),
            str: lambda: rng.choice(WORDS),
            bool: lambda: rng.random() < 0.5,
            Any: lambda: rng.choice([None, 1, "a", [1, 2], {"role": "user", "content": "x"}]),
            object: lambda: rng.choice([None, 1, b"\x89PNG", {"images": [b"\xff\xd8\xff"]}]),
            type(None): lambda: None,
        }
        return simple[hint]()
