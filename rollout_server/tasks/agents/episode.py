"""`environment.function: agent`: an episode is an agent that asks an OpenAI endpoint and knows nothing of ours.

options  command: a program, such as [python, my_agent.py]; a process for each episode. {prompt} stands for the prompt
         function: in place of it `path/to/file.py:name`, `async def name(row, base_url, api_key)`, in this process
         models: further names that agents may ask for; `policy` is always there
         sampling: refuse (default) or ignore parameters that are not the run's, such as another temperature

The reward is what the agent says at its end, else reward.function judges the last answer. An agent that fails because
no further turn was possible has reward 0.
"""

import asyncio
import inspect
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_server.tasks.agents.program import play, variables
from rollout_server.tasks.agents.requests import MODEL, Rules
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.client import Client
from slipstream.runtime.loading import function_of, is_asynchronous

if TYPE_CHECKING:
    from rollout_server.tasks.agents.endpoint import OpenAIEndpoint

KEY = "environment.function.agent"
OPTIONS = {"command", "function", "models", "sampling"}
Rollout = Callable[..., Coroutine[Any, Any, Any]]
PARAMETERS = ("base_url", "api_key")


@dataclass(slots=True)
class _Agent:
    command: list[str]
    function: Rollout | None
    models: tuple[str, ...]
    ignores: bool
    endpoint: "OpenAIEndpoint | None" = None


_agents: list[_Agent] = []
_starting = asyncio.Lock()


def prepare(options: Mapping[str, Any]) -> None:
    """Load the agent. Raises EnvironmentFailed: an option, the agent or the extra `agents` cannot be used."""
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise EnvironmentFailed(
            f"environment.function: 'agent' needs a package ({error}): pip install 'slipstream-rl[agents]'"
        ) from error
    if strange := sorted(set(options) - OPTIONS):
        raise EnvironmentFailed(f"{KEY}.{strange[0]}: unknown; an agent has {', '.join(sorted(OPTIONS))}")
    if ("command" in options) == ("function" in options):
        raise EnvironmentFailed(
            f"{KEY}: give one of command, such as [python, my_agent.py], and function, such as my_agent.py:main"
        )
    for name, example in (("command", "[python, my_agent.py]"), ("models", "[gpt-4o-mini]")):
        words = options.get(name, ["-"])
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise EnvironmentFailed(f"{KEY}.{name}: {words!r}; take a list of words, such as {example}")
    if options.get("sampling", "refuse") not in ("refuse", "ignore"):
        raise EnvironmentFailed(f"{KEY}.sampling: {options['sampling']!r}; take refuse or ignore")
    function = _function(options["function"]) if "function" in options else None
    command = _command(options["command"]) if function is None else []
    ignores = options.get("sampling") == "ignore"
    _agents[:] = [_Agent(command, function, (MODEL, *options.get("models", ())), ignores)]


def _command(command: list[str]) -> list[str]:
    program, *arguments = command
    if program not in ("python", "python3") and shutil.which(program) is None:
        raise EnvironmentFailed(f"{KEY}.command: no program {program!r}; correct its name, or give its whole path")
    script = arguments[0] if program.startswith("python") and arguments else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise EnvironmentFailed(f"{KEY}.command: no file {script!r} (looked from {Path.cwd()}); correct the path")
    return command


def _function(spec: str) -> Rollout:
    _, function = function_of(f"{KEY}.function", spec, EnvironmentFailed)
    location, _, name = spec.rpartition(":")
    if not is_asynchronous(function):
        raise EnvironmentFailed(
            f"{KEY}.function: {spec!r} is no `async def {name}(row, base_url, api_key)`; make it one, or run the file"
            f" as {KEY}.command [python, {location}]"
        )
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if missing := [name for name in PARAMETERS if not takes_any and name not in {one.name for one in parameters}]:
        raise EnvironmentFailed(f"{KEY}.function: {spec!r} does not take {missing[0]}; it is called with {PARAMETERS}")
    return function


async def _endpoint(agent: _Agent, temperature: float) -> "OpenAIEndpoint":
    """The endpoint of this process, started for its first episode."""
    from rollout_server.tasks.agents.endpoint import OpenAIEndpoint

    async with _starting:
        if agent.endpoint is None:
            endpoint = OpenAIEndpoint(Rules(temperature=temperature, models=agent.models, ignores=agent.ignores))
            await endpoint.start()
            agent.endpoint = endpoint
    return agent.endpoint


async def rollout(row: dict[str, Any], client: Client) -> Any:
    """One episode of an agent. What it returns is what a function of an environment may return."""
    (agent,) = _agents
    endpoint = await _endpoint(agent, client.temperature)
    access = endpoint.open(client)
    try:
        if agent.function is not None:
            return await agent.function(row, base_url=access.base_url, api_key=access.api_key)
        return await play(agent.command, row, variables(access.base_url, access.api_key, MODEL))
    except Exception as error:
        if access.over is not None:  # the agent could not go on, and its episode is over, as a function's would be
            raise access.over from error
        raise
    finally:
        endpoint.close(access)
