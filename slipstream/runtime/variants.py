"""Variants: functions that do one thing in several ways, chosen by a key, with options of their own.

A variant is a plain function. Its keyword-only parameters are its options, checked by their annotations, and `declare`
says of it what others go by. Built-in ones, those of a file and those of an installed package are alike.
"""

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from configs.errors import BadValue, ConfigError, SlipstreamError, did_you_mean
from configs.variants import Choice
from slipstream.runtime.loading import describe, function_of, is_asynchronous

Facts = TypeVar("Facts")
FACTS = "variant_facts"


class VariantFails(ConfigError, code="SLIP-LEARN-02"):
    """A loss, an advantage or a correction of your own raises, or returns something else."""


@dataclass(frozen=True, slots=True)
class Variant(Generic[Facts]):
    """A variant with the options that a configuration gives it."""

    key: str
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

    def guarded(self, problem: Callable[[Any, Any], str]) -> Callable[[Any], Any]:
        """`call`; of a user's, what it raises, and what `problem` says of its value and input, raises VariantFails."""

        def call(given: Any) -> Any:
            try:
                value = self.call(given)
                said = problem(value, given)
            except (Exception, SystemExit) as error:  # code of the user, whatever it raises
                if type(error).__module__ == "torch":  # memory that ran out, a device that failed
                    raise
                said = f"fails: {describe(error)}; correct it"
                raise VariantFails(f"{self.key}: {self.name!r} {said}") from error
            if said:
                raise VariantFails(f"{self.key}: {self.name!r} {said}")
            return value

        return self.call if self.is_built_in else call


@dataclass(frozen=True, slots=True)
class Kind(Generic[Facts]):
    """The variants that a key chooses from."""

    key: str
    argument: str
    """What a function of this kind takes, besides its options."""
    built_in: Mapping[str, Callable[..., Any]]
    undeclared: Facts
    """Facts of a function that says nothing."""

    def build(self, choice: Choice) -> Variant[Facts]:
        """The variant with its options. Raises BadValue, which names the key."""
        function = (
            self.built_in.get(choice.name)
            or function_of(self.key, choice.name, BadValue, dict.fromkeys(self.built_in, ""))[1]
        )
        given: dict[str, Any] = {}
        if not (why := "is a class" * isinstance(function, type) or "is asynchronous" * is_asynchronous(function)):
            given = checked(self.key, choice.name, function, choice.options)
            try:
                inspect.signature(function).bind(None, **given)
            except TypeError as error:
                why = f"cannot be called with one argument and its options ({error})"
        if why:
            form = f"`def {choice.name.rpartition(':')[2]}({self.argument}, *, option=default)`"
            raise BadValue(f"{self.key}: {choice.name!r} {why}; take {form}")
        facts = getattr(function, FACTS, self.undeclared)
        return Variant(self.key, choice, partial(function, **given), facts, given, choice.name in self.built_in)


def checked(
    key: str,
    spec: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    names: Container[str] | None = None,
    failed: type[SlipstreamError] = BadValue,
) -> dict[str, Any]:
    """Options of a function, those that are not given at their defaults; `names` as in options_of. Raises `failed`."""
    model = options_of(function, names)
    try:
        return dict(model.model_validate(dict(options)))
    except ValidationError as error:
        (problem, *_) = error.errors()
    name = ".".join(str(part) for part in problem["loc"])
    fields = list(model.model_fields)
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(name, fields) or (f"it has {', '.join(fields)}" if fields else "it has none")
        raise failed(f"{key}: {spec!r} has no option {name!r}; {hint}")
    given = f" (value {problem['input']!r})" if problem["type"] != "missing" else ""
    raise failed(f"{key}: option {name!r} of {spec!r}: {problem['msg']}{given}")


def declare(facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a variant is, above its function."""

    def declared(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, FACTS, facts)
        return function

    return declared


def options_of(function: Callable[..., Any], names: Container[str] | None = None) -> type[BaseModel]:
    """A model of its keyword-only parameters, or of those of these names.

    One whose annotation names what its file has not imported takes all.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:
        signature = inspect.signature(function)
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY if names is None else parameter.name in names:
            is_open = parameter.annotation is parameter.empty or isinstance(parameter.annotation, str)
            kind = Any if is_open else parameter.annotation
            fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model("Options", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
