"""Environments of verifiers 0.4 (MIT; extra `verifiers`), as prime-rl trains them.

`environment.function: examples/environments/verifiers_tasks.py:rollout`

options  taskset: {id: its package, and its own settings}
         env: further settings of verifiers' EnvConfig, such as {agent: {harness: {id: "null"}, max_turns: 4}}
         seat: the role that is trained, where an environment has several (default: the only one)
         sampling: refuse (default) or ignore sampling parameters of a harness that are not the run's
         allow_unisolated: let a harness run what the policy writes on this machine, in a plain process (default no)

A row has its task in the column `task`, as data.train `verifiers:ID` has it. The reward is what the
taskset's own functions give: the sum of a trace's weighted rewards, the mean of several traces of the seat. Harnesses
ask verifiers' endpoint, and that asks ours (agents/endpoint.py): tokens and logprobs are recorded beside the engine.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.data.rows import RowError
from rollout_server.tasks.agents.program import variables
from rollout_server.tasks.agents.requests import MODEL, Rules
from rollout_server.tasks.environments import EnvironmentFailed, Trajectory
from rollout_server.tasks.environments.client import Client
from rollout_server.tasks.environments.protocol import shown

if TYPE_CHECKING:
    from rollout_server.tasks.agents.endpoint import Access, OpenAIEndpoint

KEY = "environment.function.*"
OPTIONS = {"taskset", "env", "seat", "sampling", "allow_unisolated"}
SAMPLING = ("refuse", "ignore")
CHAT = "slipstream_chat"
RELAY_KEY = "SLIPSTREAM_RELAY_API_KEY"
"""verifiers keeps variables with API_KEY in their name from the programs that it starts."""
LOCAL = {"type": "subprocess"}
UNRUNNABLE = (ImportError, AttributeError, TypeError, ValueError, OSError)
"""What a taskset that cannot be used raises where it is found and constructed; pydantic's errors are ValueErrors."""


@dataclass(slots=True)
class _Played:
    env: Any
    seat: str
    ignores: bool
    endpoint: "OpenAIEndpoint | None" = None


_played: list[_Played] = []
_open = AsyncExitStack()
_starting = asyncio.Lock()


class TaskFailed(RuntimeError):
    """verifiers could not play or score an episode."""


def prepare(options: Mapping[str, Any]) -> None:
    """Find the environment. Raises EnvironmentFailed: not installed, not found, or not what can be trained here."""
    if strange := sorted(set(options) - OPTIONS):
        raise EnvironmentFailed(f"{KEY}.{strange[0]}: unknown; verifiers' have {sorted(OPTIONS)}")
    taskset = options.get("taskset")
    if not isinstance(taskset, Mapping) or not taskset.get("id"):
        raise EnvironmentFailed(f"{KEY}.taskset: {shown(taskset)}; name an installed one, {{id: my-tasks}}")
    if options.get("sampling", SAMPLING[0]) not in SAMPLING:
        raise EnvironmentFailed(f"{KEY}.sampling: {options['sampling']!r}; take one of {SAMPLING}")
    try:
        import aiohttp  # noqa: F401
        import verifiers.v1 as vf
    except ImportError as error:
        raise EnvironmentFailed(
            f"verifiers_tasks.py needs a package ({error}): pip install 'slipstream-rl[verifiers]'"
        ) from error
    import verifiers_chat  # beside this file

    sys.modules[CHAT] = verifiers_chat  # verifiers finds a harness by the name of a module
    try:
        env = vf.load_environment(vf.resolve_env_config(_settings(vf, options)))
    except UNRUNNABLE as error:
        why = " ".join(str(error).split())  # pydantic's have several lines
        raise EnvironmentFailed(f"{KEY}.taskset: {taskset['id']!r} cannot be played: {why}") from error
    seats = list(env.config.agent_harnesses())
    seat = options.get("seat", seats[0] if len(seats) == 1 else None)
    if seat not in seats:
        raise EnvironmentFailed(
            f"{KEY}.seat: {seat!r}; the environment has {', '.join(seats)}, of which one is trained"
        )
    if options.get("allow_unisolated") is not True:
        _check_isolation(vf, env.config)
    _played[:] = [_Played(env, str(seat), options.get("sampling") == "ignore")]


def _settings(vf: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what each seat leaves open: this machine, and a chat where the taskset has no harness."""
    taskset = dict(options["taskset"])
    settings = {**dict(options.get("env") or {}), "taskset": taskset}
    config = vf.resolve_env_config(settings)
    for seat in config.agent_harnesses():
        author, given = type(config).model_fields[seat].default, dict(settings.get(seat) or {})
        if "runtime" not in author.model_fields_set:
            given.setdefault("runtime", LOCAL)
        if author.harness is None and vf.default_harness_id(taskset["id"]) != taskset["id"]:
            given.setdefault("harness", {"id": CHAT})
        settings[seat] = given
    return settings


def _check_isolation(vf: Any, config: Any) -> None:
    """Raises EnvironmentFailed: the policy would run programs on this machine."""
    for seat, harness in config.agent_harnesses().items():
        if vf.load_harness(harness).EXECUTES_CODE and getattr(config, seat).runtime.type == "subprocess":
            raise EnvironmentFailed(
                f"{KEY}.env.{seat}: the harness {harness.id!r} lets the policy run programs on this machine; give it a"
                f" runtime that isolates them ({seat}: {{runtime: {{type: docker}}}}), or accept it with"
                f" {KEY}.allow_unisolated: true"
            )


async def _endpoint(temperature: float) -> "OpenAIEndpoint":
    """The endpoint of this process, started for its first episode together with verifiers' servers."""
    from rollout_server.tasks.agents.endpoint import OpenAIEndpoint

    (played,) = _played
    async with _starting:
        if played.endpoint is None:
            endpoint = OpenAIEndpoint(Rules(temperature=temperature, ignores=played.ignores))
            await endpoint.start()
            direct = variables(endpoint.url, "", MODEL)
            os.environ |= {name: direct[name] for name in ("NO_PROXY", "no_proxy")} | {RELAY_KEY: endpoint.relay_key}
            await _open.enter_async_context(played.env.serving())
            played.endpoint = endpoint
    return played.endpoint


async def rollout(row: dict[str, Any], client: Client) -> Trajectory:
    """One episode of verifiers. Raises TaskFailed, and EpisodeOver where no turn was possible any more."""
    import verifiers.v1 as vf

    endpoint = await _endpoint(client.temperature)
    (played,) = _played
    config = vf.EvalClientConfig(base_url=endpoint.url, api_key_var=RELAY_KEY)
    accesses: dict[str, Access] = {}

    def minted(trace: Any) -> None:
        accesses[trace.id] = endpoint.open(client, trace.id)

    try:
        episode = await played.env.run_episode(
            task_of(played.env, row), vf.ModelContext(model=MODEL, client=config), on_trace=minted
        )
    finally:
        for access in accesses.values():
            endpoint.close(access)
    if not episode.ok:
        if (over := next((access.over for access in accesses.values() if access.over is not None), None)) is not None:
            raise over
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise TaskFailed(
            "; ".join(f"{error.type}: {error.message}" for error in errors[-2:]) or "the episode is not ok"
        )
    return judged(played.seat, episode.traces, {name: access.turns for name, access in accesses.items()})


def task_of(env: Any, row: Mapping[str, Any]) -> Any:
    """The task of a row, constructed as verifiers' own server does. Raises RowError: the row has none."""
    from verifiers.v1.task import TaskData
    from verifiers.v1.utils.generic import concrete_type

    if not isinstance(data := row["columns"].get("task"), Mapping):
        raise RowError(
            f"the row has no column `task` with a task of verifiers but {shown(data)}; set data.train to verifiers:ID"
        )
    kind = type(env.taskset).task_type()
    return kind((concrete_type(kind, TaskData) or TaskData).model_validate(data), env.config.taskset.task)


def judged(seat: str, traces: list[Any], turns: Mapping[str, list[int]]) -> Trajectory:
    """Reward and metrics of the trained seat's traces, and the turns of all others. Raises TaskFailed: it has none."""
    named = {trace.agent.name or seat for trace in traces}
    own = [trace for trace in traces if (trace.agent.name or seat) == seat and trace.agent.trainable]
    if not own:
        raise TaskFailed(f"the seat {seat!r} has played no trace that may be trained; {', '.join(sorted(named))} have")
    kept = {trace.id for trace in own}
    metrics: dict[str, float] = {}
    for trace in own:
        found = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        found |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + float(value) / len(own)
    left_out = sorted(number for name, numbers in turns.items() if name not in kept for number in numbers)
    reward = sum(float(trace.reward) for trace in own) / len(own)
    return Trajectory(reward=reward, metrics=metrics, leave_out=left_out)
