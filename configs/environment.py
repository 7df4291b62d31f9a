"""Environments: functions that turn a prompt into an episode of several turns."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.base import Own, Secret, Section

BUILT_IN = ("agent", "tools")
EPISODES_PER_WORKER = 32
"""What one blocks, or its death ends, so many others wait for or begin again."""
AGENT_OPTIONS = ("command", "function", "models", "sampling")


class Environment(Section):
    """What happens between the turns of an episode. The code runs in processes of its own."""

    function: str | None = None
    """`async def rollout(row, client)` as `path/to/file.py:name` or `package.module:name`; or `tools` (a tool loop)
    or `agent` (a program that asks an OpenAI endpoint). Games, tasksets of verifiers and servers of OpenEnv:
    examples/environments/. Unset: an answer is one turn."""
    options: Secret[dict[str, Any]] = Field(default={})
    """For the function, as `client.options`, for example `{tools: [calculator]}`, `{taskset: {id: my-tasks}}` or
    `{command: [python, my_agent.py]}`."""
    workers: Own[int] = Field(default=1, ge=1, le=256)
    """Environment processes per rollout server; the episodes of one share an event loop."""
    max_episodes: Own[int] = Field(default=256, ge=1)
    """Episodes that one rollout server runs at once; further ones wait."""
    max_turns: int = Field(default=16, ge=1)
    """Turns of an episode; the next one raises NoMoreTurns in the function."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """For what the function does between two turns, and for a turn to stand still without a token of it, or of those
    before it in the engine's queue; then the episode has failed."""
    on_error: Literal["leave_out", "score"] = "leave_out"
    """An episode that failed: `leave_out` trains its group without it; `score` gives its turns so far
    environment.error_score. One without a turn is left out."""
    error_score: float = Field(default=0.0, allow_inf_nan=False)
    """With environment.on_error `score`."""
    episode_timeout_s: float = Field(default=1800.0, gt=0)
    """For a whole episode, without its wait for environment.max_episodes; then it has failed."""

    @property
    def num_workers(self) -> int:
        """`workers`, or what this machine has cores for."""
        needed = -(-self.max_episodes // EPISODES_PER_WORKER)
        return self.workers or max(1, min(needed, len(os.sched_getaffinity(0)) // 2))

    @field_validator("function")
    @classmethod
    def _names_something(cls, value: str | None) -> str | None:
        if value is None or value in BUILT_IN or (":" in value and value.rpartition(":")[2].isidentifier()):
            return value
        raise ValueError(f"{value!r} is no environment; take path/to/file.py:name, or one of {', '.join(BUILT_IN)}")

    @model_validator(mode="after")
    def _agent_is_named(self) -> "Environment":
        if self.function == "agent" and (problem := problem_with_agent(self.options)) is not None:
            raise ValueError(problem)
        return self


def problem_with_agent(options: Mapping[str, Any]) -> str | None:
    """What is wrong with the options of `environment.function: agent`, or None."""
    if strange := sorted(set(options) - set(AGENT_OPTIONS)):
        return f"options.{strange[0]}: unknown; an agent has {', '.join(AGENT_OPTIONS)}"
    if ("command" in options) == ("function" in options):
        return (
            "options: function 'agent' needs one of command, such as [python, my_agent.py], and function, such as"
            " my_agent.py:main"
        )
    for name, example in (("command", "[python, my_agent.py]"), ("models", "[gpt-4o-mini]")):
        words = options.get(name, ["-"])
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            return f"options.{name}: {words!r}; take a list of words, such as {example}"
    if ":" not in str(options.get("function", ":")):
        return f"options.function: {options['function']!r}; take path/to/file.py:name or package.module:name"
    if (sampling := options.get("sampling", "refuse")) not in ("refuse", "ignore"):
        return f"options.sampling: {sampling!r}; take refuse or ignore"
    return None
