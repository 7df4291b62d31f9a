"""Finds the function that `reward.function` names and tells by its signature how to call it.

| convention | signature                                                                            |
|------------|--------------------------------------------------------------------------------------|
| sample     | `async def reward(sample) -> float or dict` (or without async)                        |
| verl       | `compute_score(data_source, solution_str, ground_truth, extra_info=None)`            |
| trl        | `(prompts, completions, **columns) -> list of float or None`, one call for all        |
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rollout_server.rewards.base import RewardError, Sample

BUILT_IN = {"exact": "rollout_server.rewards.exact:reward", "numeric": "rollout_server.rewards.numeric:reward"}
Convention = Literal["sample", "verl", "trl"]
Parameters = Mapping[str, inspect.Parameter]
MAX_MESSAGE_CHARS = 1500
"""Of an exception's own text, so that its place still fits into an error."""
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURES = (
    "take `async def reward(sample)`, `compute_score(data_source, solution_str, ground_truth, extra_info=None)` or"
    " `f(prompts, completions, **columns)`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A loaded function. `call` takes one sample, with convention `trl` a list of them."""

    name: str
    convention: Convention
    is_async: bool
    call: Callable[[Any], Any]


def load_function(spec: str) -> RewardFunction:
    """Load `exact`, `numeric`, `package.module:function` or `path/to/file.py:function`.

    Raises:
        RewardError: not found, not importable, or of a signature that is none of the three.
    """
    location, colon, name = BUILT_IN.get(spec, spec).rpartition(":")
    if not colon or not location or not name:
        close = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = (
            f"did you mean {close[0]!r}?" if close else "take 'exact', 'numeric', 'module:function' or 'f.py:function'"
        )
        raise RewardError(f"reward.function: {spec!r} names no function; {hint}")
    module = _load_file(spec, location) if location.endswith(".py") else _load_module(spec, location)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(own)[:8]) or 'no functions'}"
        raise RewardError(f"reward.function: {spec!r}: {location} has no function {name!r}; {hint}")
    return adapt(function, spec)


def adapt(function: Callable[..., Any], name: str) -> RewardFunction:
    """Tell by the parameters which convention a function follows.

    Raises:
        RewardError: none of the three.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward.function: {name!r} shows no signature ({error}); wrap it in a function") from error
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if "completions" in parameters:
        return RewardFunction(name=name, convention="trl", is_async=is_async, call=_trl(function, parameters, name))
    if "solution_str" in parameters:
        return RewardFunction(name=name, convention="verl", is_async=is_async, call=_verl(function, parameters, name))
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and required == positional[:1]:
        return RewardFunction(name=name, convention="sample", is_async=is_async, call=function)
    raise RewardError(f"reward.function: {name!r} has the parameters ({', '.join(parameters)}); {SIGNATURES}")


def _verl(function: Callable[..., Any], parameters: Parameters, name: str) -> Callable[[Sample], Any]:
    accepted = _accepted(parameters, VERL_NAMES)
    _refuse_unknown(parameters, VERL_NAMES, name)

    def call(sample: Sample) -> Any:
        given = {
            "data_source": sample["data_source"],
            "solution_str": sample["completion"],
            "ground_truth": sample["ground_truth"],
            "extra_info": sample["extra_info"],
        }
        return function(**{key: given[key] for key in accepted})

    return call


def _trl(function: Callable[..., Any], parameters: Parameters, name: str) -> Callable[[Sequence[Sample]], Any]:
    if "completion_ids" in parameters and parameters["completion_ids"].default is inspect.Parameter.empty:
        raise RewardError(f"reward.function: {name!r} asks for completion_ids, which rewards do not get; {SIGNATURES}")

    def call(samples: Sequence[Sample]) -> Any:
        # Columns of the row win: a dataset may well call one of its own columns `ground_truth`.
        rows = [
            {key: sample[key] for key in ("ground_truth", "data_source", "extra_info")} | sample["columns"]
            for sample in samples
        ]
        given: dict[str, list[Any]] = {
            key: [row.get(key) for row in rows] for key in {k: None for r in rows for k in r}
        }
        given["prompts"] = [sample["prompt"] for sample in samples]
        given["completions"] = [_completion(sample) for sample in samples]
        return function(**{key: given[key] for key in _accepted(parameters, given)})

    return call


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    """TRL gives the answer in the form of the prompt."""
    text = sample["completion"]
    return text if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": text}]


def _accepted(parameters: Parameters, names: Iterable[str]) -> list[str]:
    """Those names that the function takes as keywords."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def _refuse_unknown(parameters: Parameters, names: Sequence[str], name: str) -> None:
    for key, p in parameters.items():
        if key not in names and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise RewardError(
                f"reward.function: {name!r} asks for {key!r}, which compute_score does not get; {SIGNATURES}"
            )


def _load_file(spec: str, location: str) -> ModuleType:
    path = Path(location).expanduser()
    if not path.is_file():
        raise RewardError(f"reward.function: {spec!r}: no file {location!r} (looked from {os.getcwd()})")
    sys.path.insert(0, str(path.resolve().parent))
    description = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[description.name] = module
    try:
        description.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward.function: {spec!r}: importing {location} fails: {describe(error)}") from error
    return module


def _load_module(spec: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and location.startswith(error.name):
            hint = f" (not installed, and not below {os.getcwd()}); install it, or give path/to/file.py:function"
        raise RewardError(f"reward.function: {spec!r}: importing {location} fails: {describe(error)}{hint}") from error


def describe(error: BaseException) -> str:
    """Type, message and place of an exception, in one line. Never raises: the message is code of the user too."""
    try:
        text = str(error)[:MAX_MESSAGE_CHARS]
    except BaseException:  # noqa: BLE001 - code of the user: whatever it raises, the type and place are known
        text = "(its message cannot be read)"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}: {text}{place}"
