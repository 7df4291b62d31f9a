"""Environments: functions that turn a prompt into an episode of several turns."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from configs.base import Own, Secret, Section
from configs.variants import ChosenOrNone

EPISODES_PER_WORKER = 32
"""What one blocks, or its death ends, so many others wait for or begin again."""


class Environment(Section):
    """What happens between the turns of an episode. The code runs in processes of its own."""

    function: Secret[ChosenOrNone] = None
    """`async def rollout(row, client)` as `path/to/file.py:name`, `package.module:name` or an entry point; or `tools`
    (a tool loop) or `agent` (a program that asks an OpenAI endpoint), with options, its keyword-only parameters:
    `{tools: {tools: [calculator]}}`, `{agent: {command: [python, my_agent.py]}}`. Games, tasksets of verifiers and
    servers of OpenEnv: examples/environments/. `none`: an answer is one turn."""
    workers: Own[int] = Field(default=0, ge=0, le=256)
    """Environment processes per rollout server; the episodes of one share an event loop. 0 is one for 32 of
    max_episodes, up to half of the machine's cores, shared by its servers."""
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

    def num_workers(self, servers: int = 1) -> int:
        """`workers`, or what this machine has cores for, with so many rollout servers on it."""
        needed = -(-self.max_episodes // EPISODES_PER_WORKER)
        return self.workers or max(1, min(needed, len(os.sched_getaffinity(0)) // (2 * servers)))

    @property
    def name(self) -> str:
        """Of the function; empty without one."""
        return "" if self.function is None else self.function.name

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the function."""
        return {} if self.function is None else self.function.options
