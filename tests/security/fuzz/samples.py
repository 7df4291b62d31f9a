"""Valid messages of every kind, with the values of a small run: what mutations start from."""

import random
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from replay import messages as m
from replay.channel.frames import DTYPES, Message, Registry

GROUP_SIZE = 2
PROMPTS = 40
LEASED = 10
"""About as many prompts are leased at a time."""
MAX_VERSION = 3
SMALL = {"index": LEASED, "version": MAX_VERSION, "min_version": MAX_VERSION, "step": MAX_VERSION + 1, "rank": 2}
"""Exclusive limits of numbers by the name of their field; others are below 3."""
WORDS = ["", "stop", "length", "engine_error", "rollout-1", "tcp://127.0.0.1:1", "fuzz"]

Make = Callable[[], Any]


class Samples:
    """Makes messages. `given` fixes fields by name, where a target must know them (sessions, for example)."""

    def __init__(self, kinds: Registry, rng: random.Random, given: Callable[[], Mapping[str, Any]]) -> None:
        self._kinds = [kinds[name] for name in sorted(kinds)]
        self._weights = [1 + len(kind.ARRAYS) for kind in self._kinds]
        self._rng = rng
        self._given = given
        self._whole: dict[str, Callable[[], Message]] = {"Group": self._group, "Begin": self._begin}

    def any(self) -> Message:
        """One message of any kind; those with most to check come most often."""
        return self.of(self._rng.choices(self._kinds, self._weights)[0])

    def of(self, kind: type[Message]) -> Message:
        """One message of a kind."""
        if kind.__name__ in self._whole:
            return self._whole[kind.__name__]()
        given, hints = self._given(), typing.get_type_hints(kind)
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
        simple: dict[Any, Make] = {
            int: lambda: rng.randrange(SMALL.get(name, 3)),
            float: lambda: rng.random(),
            str: lambda: rng.choice(WORDS),
            bool: lambda: rng.random() < 0.5,
            Any: lambda: rng.choice([None, 1, "a", [1, 2], {"role": "user", "content": "x"}]),
            type(None): lambda: None,
        }
        return simple[hint]()

    def _group(self) -> Message:
        """One that replay accepts if it is leased: token ids, logprobs and versions are what they may be."""
        rng = self._rng
        lengths = [rng.randrange(1, 9) for _ in range(GROUP_SIZE)]
        total = sum(lengths)
        return m.Group(
            pass_=0,
            index=rng.randrange(LEASED),
            attempt=1,
            finish_reasons=["stop"] * GROUP_SIZE,
            texts=["x"] * GROUP_SIZE,
            reward_metrics={"reward/seconds": 0.1},
            generate_s=0.1,
            data_source="t",
            prompt_ids=np.array([1, 2, 3], dtype=np.int32),
            lengths=np.array(lengths, dtype=np.int32),
            token_ids=np.full(total, 5, dtype=np.int32),
            loss_mask=np.ones(total, dtype=np.uint8),
            logprobs=np.full(total, -1.0, dtype=np.float32),
            versions=np.zeros(total, dtype=np.int32),
            rewards=np.array([1.0, 0.0], dtype=np.float32),
        )

    def _begin(self) -> Message:
        """A manifest of three tensors that adds up."""
        from weight_bus.manifest import plan  # torch: only for those who attack the weight bus
        from weight_bus.messages import Begin, describe_manifest

        tensors = [("embed", "float32", (8, 4)), ("layer.weight", "bfloat16", (4, 4)), ("norm", "float32", (4,))]
        manifest = plan(tensors, 1024).with_digests(
            {name: i * 0x9E3779B97F4A7C15 % 2**64 for i, (name, *_) in enumerate(tensors)}
        )
        names, dtypes, shapes, in_order = describe_manifest(manifest)
        values = {
            "session": "",
            "epoch": self._rng.randrange(3),
            "version": self._rng.randrange(MAX_VERSION),
            "incarnation": 1,
            "evaluate": False,
            "rank": 1,
            "size": 2,
            "endpoint": "127.0.0.1:1",
            "bucket_bytes": 1024,
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "digests": in_order,
            "digest": manifest.digest,
        }
        return Begin(**values | {name: value for name, value in self._given().items() if name in values})
