"""Variants: functions that do one thing in several ways, chosen by a key, with options of their own.

A variant is a plain function. Its keyword-only parameters are its options, checked by their annotations, and `declare`
says of it what others go by. Built-in ones, those of a file and those of an installed package are alike.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from configs.errors import BadValue, did_you_mean
from configs.variants import Choice
from slipstream.runtime.loading import function_of

Facts = TypeVar("Facts")
FACTS = "variant_facts"


@dataclass(frozen=True, slots=True)
class Variant(Generic[Facts]):
    """A variant with the options that a configuration gives it."""

    choice: Choice
    call: Callable[..., Any]
    """The function, options bound."""
    facts: Facts
    """What it declares of itself."""
    options: Mapping[str, Any]
    """All of them, defaults included."""
    is_built_in: bool

    @property
    def name(self) -> str:
        return self.choice.name


@dataclass(frozen=True, slots=True)
class Kind(Generic[Facts]):
    """The variants that a key chooses from."""

    key: str
    built_in: Mapping[str, Callable[..., Any]]
    undeclared: Facts
    """Facts of a function that says nothing."""

    def build(self, choice: Choice) -> Variant[Facts]:
        """The variant with its options. Raises BadValue, which names the key."""
        function = (
            self.built_in.get(choice.name)
            or function_of(self.key, choice.name, BadValue, dict.fromkeys(self.built_in, ""))[1]
        )
        facts = getattr(function, FACTS, self.undeclared)
        given = self.checked(function, choice)
        return Variant(choice, partial(function, **given), facts, given, choice.name in self.built_in)

    def checked(self, function: Callable[..., Any], choice: Choice) -> dict[str, Any]:
        """The options of a function, those that are not given at their defaults. Raises BadValue."""
        model = options_of(function)
        try:
            return dict(model.model_validate(dict(choice.options)))
        except ValidationError as error:
            (problem, *_) = error.errors()
        name = ".".join(str(part) for part in problem["loc"])
        names = list(model.model_fields)
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(name, names) or (f"it has {', '.join(names)}" if names else "it has none")
            raise BadValue(f"{self.key}: {choice.name!r} has no option {name!r}; {hint}")
        given = f" (value {problem['input']!r})" if problem["type"] != "missing" else ""
        raise BadValue(f"{self.key}: option {name!r} of {choice.name!r}: {problem['msg']}{given}")


def declare(facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a variant is, above its function."""

    def declared(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, FACTS, facts)
        return function

    return declared


def options_of(function: Callable[..., Any]) -> type[BaseModel]:
    """A model of its keyword-only parameters; one whose annotation names what its file has not imported takes all."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:
        signature = inspect.signature(function)
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            is_open = parameter.annotation is parameter.empty or isinstance(parameter.annotation, str)
            kind = Any if is_open else parameter.annotation
            fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
