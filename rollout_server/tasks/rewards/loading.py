"""Finds a function that `reward.function` names and tells by its signature how to call it.

| convention | signature                                                                            |
|------------|--------------------------------------------------------------------------------------|
| sample     | `async def reward(sample) -> float or dict` (or without async)                        |
| verl       | `compute_score(data_source, solution_str, ground_truth, extra_info=None)`            |
| trl        | `(prompts, completions, **columns) -> list of float or None`, one call for all        |
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rollout_server.tasks.rewards import RewardError, Sample
from rollout_server.tasks.rewards.built_in import FUNCTIONS
from slipstream.runtime.loading import function_of, is_asynchronous

Convention = Literal["sample", "verl", "trl"]
Parameters = Mapping[str, inspect.Parameter]

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a reward function of verl."""
SIGNATURES = (
    "take `async def reward(sample)`, `compute_score(data_source, solution_str, ground_truth, extra_info=None)` or"
    " `f(prompts, completions, **columns)`"
)
"""What a reward function of another form is answered."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded function. `call` takes one sample, with convention `trl` a list of them."""

    convention: Convention
    is_async: bool
    call: Callable[[Any], Any]


def load_function(spec: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Load a built-in function by its name, `package.module:function` or `path/to/file.py:function`.

    A built-in class is built with the options. A built-in with a function `prepare` has it called with them, to load or
    check what the reward needs.
    Raises RewardError: not found, not importable, of a signature that is none of the three, or not usable here.
    """
    module, function = function_of("reward.function", spec, RewardError, FUNCTIONS)
    if spec in FUNCTIONS and isinstance(function, type):
        return adapt(function(**options or {}), spec)
    if spec in FUNCTIONS and (prepare := getattr(module, "prepare", None)) is not None:
        prepare(**_accepted(inspect.signature(prepare).parameters, dict(options or {})))
    return adapt(function, spec, options)


def adapt(function: Callable[..., Any], name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Tell by the parameters which convention a function follows; options are given to each call as keywords.

    Raises RewardError: none, or an option that the function does not take.
    """
    options = dict(options or {})
    if isinstance(function, type):
        raise RewardError(f"reward.function: {name!r} is a class; {SIGNATURES}")
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward.function: {name!r} shows no signature ({error}); wrap it in a function") from error
    is_open = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if strange := next((key for key in options if key not in takes and not is_open), None):
        raise RewardError(f"reward.function: {name!r} takes no option {strange!r}; it has ({', '.join(takes)})")
    if options:
        from slipstream.runtime.variants import checked  # here, because it imports pydantic

        own = {key: value for key, value in options.items() if key in takes}
        options |= checked("reward.function", name, function, own, own, RewardError)
    parameters = {key: one for key, one in takes.items() if key not in options}
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in open_ended]
    positional = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    convention: Convention
    arguments: Callable[[Any], dict[str, Any]]
    if "completions" in parameters:
        convention, arguments = "trl", _of_trl
        refused = [key for key in required if key == "completion_ids"]
    elif "solution_str" in parameters:
        convention, arguments = "verl", _of_verl
        refused = [key for key in required if key not in VERL_NAMES]
    elif positional and required == positional[:1]:
        return RewardFunction("sample", is_asynchronous(function), partial(function, **options))
    else:
        raise RewardError(f"reward.function: {name!r} has the parameters ({', '.join(parameters)}); {SIGNATURES}")
    if refused:
        raise RewardError(f"reward.function: {name!r} asks for {refused[0]!r}, which no function gets; {SIGNATURES}")

    def call(given: Any) -> Any:
        return function(**(_accepted(parameters, arguments(given)) | options))  # of a column of that name options count

    return RewardFunction(convention, is_asynchronous(function), call)


def _of_verl(sample: Sample) -> dict[str, Any]:
    return {
        "data_source": sample["data_source"],
        "solution_str": sample["completion"],
        "ground_truth": sample["ground_truth"],
        "extra_info": sample["extra_info"],
    }


def _of_trl(samples: Sequence[Sample]) -> dict[str, Any]:
    # Columns of the row win: a dataset may well call one of its own columns `ground_truth`.
    rows = [
        {key: sample[key] for key in ("ground_truth", "data_source", "extra_info")} | sample["columns"]
        for sample in samples
    ]
    given: dict[str, Any] = {key: [row.get(key) for row in rows] for key in dict.fromkeys(itertools.chain(*rows))}
    given["prompts"] = [sample["prompt"] for sample in samples]
    # TRL gives the answer in the form of the prompt.
    given["completions"] = [
        s["completion"] if isinstance(s["prompt"], str) else [{"role": "assistant", "content": s["completion"]}]
        for s in samples
    ]
    return given


def _accepted(parameters: Parameters, given: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that the function takes as keywords."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}
