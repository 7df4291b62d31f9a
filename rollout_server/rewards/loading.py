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
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rollout_server.rewards import RewardError, Sample

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


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded function. `call` takes one sample, with convention `trl` a list of them."""

    convention: Convention
    is_async: bool
    call: Callable[[Any], Any]


def load_function(spec: str) -> RewardFunction:
    """Load `exact`, `numeric`, `package.module:function` or `path/to/file.py:function`.

    Raises RewardError: not found, not importable, or of a signature that is none of the three.
    """
    location, _, name = BUILT_IN.get(spec, spec).rpartition(":")
    if not location or not name:
        hint = _closest(spec, BUILT_IN) or "take 'exact', 'numeric', 'module:function' or 'f.py:function'"
        raise RewardError(f"reward.function: {spec!r} names no function; {hint}")
    module = _module(spec, location)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = _closest(name, own) or f"it has {', '.join(sorted(own)[:8]) or 'no functions'}"
        raise RewardError(f"reward.function: {spec!r}: {location} has no function {name!r}; {hint}")
    return adapt(function, spec)


def adapt(function: Callable[..., Any], name: str) -> RewardFunction:
    """Tell by the parameters which convention a function follows. Raises RewardError: none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward.function: {name!r} shows no signature ({error}); wrap it in a function") from error
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in open_ended]
    positional = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    convention: Convention
    call: Callable[[Any], Any]
    if "completions" in parameters:
        convention, call = "trl", partial(_call_trl, function, parameters)
        refused = [key for key in required if key == "completion_ids"]
    elif "solution_str" in parameters:
        convention, call = "verl", partial(_call_verl, function, parameters)
        refused = [key for key in required if key not in VERL_NAMES]
    elif positional and required == positional[:1]:
        convention, call, refused = "sample", function, []
    else:
        raise RewardError(f"reward.function: {name!r} has the parameters ({', '.join(parameters)}); {SIGNATURES}")
    if refused:
        raise RewardError(f"reward.function: {name!r} asks for {refused[0]!r}, which no function gets; {SIGNATURES}")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return RewardFunction(convention, is_async, call)


def _call_verl(function: Callable[..., Any], parameters: Parameters, sample: Sample) -> Any:
    given = {
        "data_source": sample["data_source"],
        "solution_str": sample["completion"],
        "ground_truth": sample["ground_truth"],
        "extra_info": sample["extra_info"] | _model_score(sample),
    }
    return function(**_accepted(parameters, given))


def _call_trl(function: Callable[..., Any], parameters: Parameters, samples: Sequence[Sample]) -> Any:
    # Columns of the row win: a dataset may well call one of its own columns `ground_truth`.
    rows = [
        {key: sample[key] for key in ("ground_truth", "data_source", "extra_info")}
        | _model_score(sample)
        | sample["columns"]
        for sample in samples
    ]
    given: dict[str, Any] = {key: [row.get(key) for row in rows] for key in dict.fromkeys(itertools.chain(*rows))}
    given["prompts"] = [sample["prompt"] for sample in samples]
    # TRL gives the answer in the form of the prompt.
    given["completions"] = [
        s["completion"] if isinstance(s["prompt"], str) else [{"role": "assistant", "content": s["completion"]}]
        for s in samples
    ]
    return function(**_accepted(parameters, given))


def _model_score(sample: Sample) -> dict[str, float]:
    return {"model_score": sample["model_score"]} if "model_score" in sample else {}


def _accepted(parameters: Parameters, given: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that the function takes as keywords."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _closest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _module(spec: str, location: str) -> ModuleType:
    """The module of that name, or at that path if it ends in `.py`."""
    path = Path(location).expanduser() if location.endswith(".py") else None
    if path is not None and not path.is_file():
        raise RewardError(f"reward.function: {spec!r}: no file {location!r} (looked from {os.getcwd()})")
    try:
        if path is None:
            return importlib.import_module(location)
        sys.path.insert(0, str(path.resolve().parent))
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
        raise RewardError(f"reward.function: {spec!r}: importing {location} fails: {describe(error)}{hint}") from error


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
