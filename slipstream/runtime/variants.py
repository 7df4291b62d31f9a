"""Variants: functions that do one thing in several ways, chosen by a key, with options of their own.

A variant is a plain function. Its keyword-only parameters are its options, checked by their annotations, and `declare`
says of it what others go by. Built-in ones, those of a file and those of an installed package are alike.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from configs.errors import BadValue, did_you_mean
from configs.variants import Choice

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
        function = self.built_in.get(choice.name) or self._from_outside(choice.name)
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

    def _from_outside(self, name: str) -> Callable[..., Any]:
        if ".py:" in name:
            return from_file(self.key, name)
        group = f"slipstream.{self.key}"
        for point in entry_points(group=group, name=name):
            function: Callable[..., Any] = point.load()
            return function
        others = sorted({*self.built_in, *(point.name for point in entry_points(group=group))})
        hint = did_you_mean(name, others) or f"take one of {', '.join(others)}"
        raise BadValue(f"{self.key}: {name!r} is none; {hint}, or path/to/file.py:function")


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


def from_file(key: str, place: str) -> Callable[..., Any]:
    """The function in `path/to/file.py:name`, a file of the user's own machine. Raises BadValue."""
    path, _, name = place.rpartition(":")
    if not Path(path).expanduser().is_file():
        raise BadValue(f"{key}: no file {path!r} (looked from {os.getcwd()}); correct the path")
    spec = importlib.util.spec_from_file_location(f"slipstream_{name}", Path(path).expanduser())
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of a user raises
        raise BadValue(f"{key}: {path} cannot be loaded: {type(error).__name__}: {error}; correct it") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        hint = did_you_mean(name, names) or f"it has {', '.join(names[:8]) or 'none'}"
        raise BadValue(f"{key}: {path} has no function {name!r}; {hint}")
    return function  # type: ignore[no-any-return]
