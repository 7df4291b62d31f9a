"""An environment of verifiers with two seats over any taskset: `env: {id: two_tries}`."""

from typing import Any

import verifiers.v1 as vf

__all__ = ["TriesEnv"]


class TriesConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class TriesEnv(vf.Env[TriesConfig]):
    """A solver answers twice; a critic says something between the two, and is not trained."""

    async def setup(self, agents: Any) -> None:
        agents.critic.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.solver.interaction(task) as solver:
            await solver.turn()
            await agents.critic.run(task)
            await solver.turn("Try again.")
