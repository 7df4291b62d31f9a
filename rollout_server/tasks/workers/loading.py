"""Finds the function that a key of the configuration names."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.errors import SlipstreamError, did_you_mean

OURS = ("configs", "learner", "replay", "rollout_server", "scripts", "weight_bus")
"""A `learner.py` beside a file of the user hides none of them."""
PACKAGE_ROOT = str(Path(__file__).parents[3])
MAX_MESSAGE_CHARS = 1500
"""Of an exception's own text, so that its place still fits into an error."""


def function_of(
    key: str, spec: str, failed: type[SlipstreamError], target: str = ""
) -> tuple[ModuleType, Callable[..., Any]]:
    """The function that `key` of the configuration names as `spec`, and the module that has it.

    `target` is its place where `spec` is a short name. Raises `failed`: no such module, or no such function in it.
    """
    location, _, name = (target or spec).rpartition(":")
    if not location or not name:
        raise failed(f"{key}: {spec!r} names no function; take 'module:function' or 'path/to/file.py:function'")
    module = _module(f"{key}: {spec!r}", location, failed)
    function = getattr(module, name, None)
    if callable(function):
        return module, function
    own = [one for one, value in vars(module).items() if inspect.isroutine(value) and not one.startswith("_")]
    hint = did_you_mean(name, own) or f"it has {', '.join(sorted(own)[:8]) or 'no functions'}"
    raise failed(f"{key}: {spec!r}: {location} has no function {name!r}; {hint}")


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called as one, is `async`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _module(said: str, location: str, failed: type[SlipstreamError]) -> ModuleType:
    """The module of that name, or at that path where it ends in `.py`. Raises `failed`: not there, or it raises."""
    path = Path(location).expanduser() if location.endswith(".py") else None
    if path is not None and not path.is_file():
        raise failed(f"{said}: no file {location!r} (looked from {os.getcwd()})")
    try:
        if path is None:
            return importlib.import_module(location)
        folder = path.resolve().parent
        hides = any((folder / f"{name}{ending}").exists() for name in OURS for ending in ("", ".py"))
        sys.path[:0] = [PACKAGE_ROOT, str(folder)] if hides else [str(folder)]
        description = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
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
