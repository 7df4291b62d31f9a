"""Imports the module that a key of the configuration names."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from configs.errors import SlipstreamError

OURS = ("configs", "learner", "replay", "rollout_server", "scripts", "weight_bus")
"""A `learner.py` beside a file of the user hides none of them."""
PACKAGE_ROOT = str(Path(__file__).parents[3])
MAX_MESSAGE_CHARS = 1500
"""Of an exception's own text, so that its place still fits into an error."""


class LoadError(SlipstreamError, RuntimeError, code="SLIP-CODE-01"):
    """A module cannot be found or imported; the message names the key."""


def module_of(key: str, spec: str, location: str) -> ModuleType:
    """The module of that name, or at that path if it ends in `.py`, as `key` of the configuration says.

    Raises LoadError: not found, or not importable.
    """
    path = Path(location).expanduser() if location.endswith(".py") else None
    if path is not None and not path.is_file():
        raise LoadError(f"{key}: {spec!r}: no file {location!r} (looked from {os.getcwd()})")
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
        raise LoadError(f"{key}: {spec!r}: importing {location} fails: {describe(error)}{hint}") from error


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
