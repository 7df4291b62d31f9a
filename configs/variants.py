"""How a key names one of several ways to do a thing: `name`, or `{name: {option: value}}`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


@dataclass(frozen=True, slots=True)
class Choice:
    """A variant by name, with its options as they stand in the file: its own package opens them."""

    name: str
    """Of a built-in one, of an entry point of an installed package, or `path/to/file.py:function`."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, value: object) -> "Choice":
        """From a value of the tree. Raises ValueError."""
        match value:
            case Choice():
                return value
            case str() if value:
                return cls(value)
            case dict() if len(value) == 1:
                ((name, options),) = value.items()
                if isinstance(name, str) and name and isinstance(options, dict | None):
                    return cls(name, dict(options or {}))
        raise ValueError("takes a name, or one name with its options, such as {ppo_clip: {clip_high: 0.3}}")

    def dumped(self) -> Any:
        """As `of` reads it."""
        return {self.name: dict(self.options)} if self.options else self.name

    def __str__(self) -> str:
        return self.name


def _of_some(value: object) -> Choice | None:
    return None if value in (None, "none") else Choice.of(value)


SCHEMA = WithJsonSchema({"title": "a variant, or {variant: {option: value}}"})
Chosen = Annotated[Choice, PlainValidator(Choice.of), PlainSerializer(Choice.dumped), SCHEMA]
"""One of several variants."""
ChosenOrNone = Annotated[
    Choice | None,
    PlainValidator(_of_some),
    PlainSerializer(lambda choice: "none" if choice is None else choice.dumped()),
    SCHEMA,
]
"""One of several, or `none`."""
