"""Finds the function that `environment.function` names."""

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.workers.loading import LoadError, module_of

BUILT_IN = {
    "agent": "rollout_server.tasks.agents.episode:rollout",
    "tools": "rollout_server.tasks.environments.tool_loop:rollout",
}
Rollout = Callable[..., Coroutine[Any, Any, Any]]


def load_rollout(spec: str, options: Mapping[str, Any]) -> Rollout:
    """Load an environment's function, and have its module check the options where it has `prepare(options)`.

    Raises EnvironmentFailed: not found, not importable, not `async def f(row, client)`, or not usable here.
    """
    location, _, name = BUILT_IN.get(spec, spec).rpartition(":")
    try:
        module = module_of("environment.function", spec, location)
    except LoadError as error:
        raise EnvironmentFailed(str(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.iscoroutinefunction(value)]
        raise EnvironmentFailed(
            f"environment.function: {spec!r}: {location} has no function {name!r}; it has {', '.join(own) or 'none'}"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    needed = [
        key
        for key, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if not is_async or len(needed) != 2:
        raise EnvironmentFailed(
            f"environment.function: {spec!r} has the parameters ({', '.join(needed)}) and is"
            f" {'' if is_async else 'not '}asynchronous; take `async def {name}(row, client)`"
        )
    if (prepare := getattr(module, "prepare", None)) is not None:
        prepare(options)
    found: Rollout = function
    return found
