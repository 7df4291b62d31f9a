"""Finds the function or class that a key of the configuration names. Worker processes import this: no pydantic."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from configs.errors import SlipstreamError, did_you_mean
from slipstream.runtime.packages import NAMES, ROOT

MAX_MESSAGE_CHARS = 1500
"""Of an exception's own text, so that its place still fits into an error."""


def function_of(
    key: str, spec: str, failed: type[SlipstreamError], built_in: Mapping[str, str] = MappingProxyType({})
) -> tuple[ModuleType, Callable[..., Any]]:
    """The function that `key` of the configuration names as `spec`, and the module that has it.

    A name is of `built_in`, which has its place, or of an entry point `slipstream.<key>` of an installed package.
    Raises `failed`: no such name, no such module, or no such function in it.
    """
    target = built_in.get(spec, spec)
    if ":" not in target:
        points = {one.name: one.value for one in entry_points(group=f"slipstream.{key}")}
        if spec not in points:
            names = [*built_in, *points]
            hint = did_you_mean(spec, names) or f"there is {', '.join(names) or 'none'}"
            forms = "'module:function' or 'path/to/file.py:function'"
            raise failed(f"{key}: {spec!r} names no function; {hint}; or take {forms}")
        target = points[spec]
    location, _, name = target.rpartition(":")
    if not location or not name:
        raise failed(f"{key}: {spec!r} names no function; take 'module:function' or 'path/to/file.py:function'")
    module = _module(f"{key}: {spec!r}", location, failed)
    function = getattr(module, name, None)
    if callable(function):
        return module, function
    own = [
        one
        for one, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not one.startswith("_")
    ]
    hint = did_you_mean(name, own) or f"it has {', '.join(sorted(own)[:8]) or 'no functions'}"
    raise failed(f"{key}: {spec!r}: {location} has no function {name!r}; {hint}")


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called as one, is `async`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _module(said: str, location: str, failed: type[SlipstreamError]) -> ModuleType:
    """The module of that name, or at that path where it ends in `.py`. Raises `failed`: not there, or it raises."""
    path = Path(location).expanduser() if location.endswith(".py") else None
    if path is not None and not path.is_file():
        raise failed(f"{said}: no file {location!r} (looked from {os.getcwd()}); correct the path")
    try:
        if path is None:
            return importlib.import_module(location)
        folder = path.resolve().parent
        hides = any((folder / f"{name}{ending}").exists() for name in NAMES for ending in ("", ".py"))
        if str(folder) not in sys.path:  # a `learner.py` beside a file of the user hides none of ours
            sys.path[:0] = [str(ROOT), str(folder)] if hides else [str(folder)]
        description = importlib.util.spec_from_file_location(f"file_of_the_user_{path.stem}", path)
        assert description is not None and description.loader is not None
        module = importlib.util.module_from_spec(description)
        sys.modules[description.name] = module
        description.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and location.startswith(error.name):
            hint = f" (not installed, and not below {os.getcwd()}); install it, or give path/to/file.py:function"
        raise failed(f"{said}: importing {location} fails: {describe(error)}{hint}") from error


def describe(error: BaseException) -> str:
    """Type, message and place of an exception. Its message is code of the user too."""
    try:
        text = str(error)[:MAX_MESSAGE_CHARS]
    except BaseException:  # noqa: BLE001 - code of the user: whatever it raises, the type and place are known
        text = "(its message cannot be read)"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}: {text}{place}"
