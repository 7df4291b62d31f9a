"""The environment processes of a rollout server, and which episode runs in which of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from configs.environment import Environment
from rollout_server.environments import EnvironmentFailed
from rollout_server.environments.process import FAILED, EnvironmentProcess, Outcome
from rollout_server.environments.session import Session
from rollout_server.generate import LeaseFailed


class Environments:
    """Runs episodes in environment.workers processes, at most environment.max_episodes at once."""

    def __init__(
        self, environment: Environment, hidden: frozenset[str] = frozenset(), *, temperature: float = 1.0
    ) -> None:
        self._processes = [
            EnvironmentProcess(environment, f"environment process {number}", hidden, temperature=temperature)
            for number in range(environment.workers)
        ]
        self._slots = asyncio.Semaphore(environment.max_episodes)

    async def start(self) -> None:
        """Start all processes. Raises EnvironmentFailed: the function cannot be loaded; none is left."""
        results = await asyncio.gather(*(process.ensure() for process in self._processes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """One episode, in the process with the fewest. Raises LeaseFailed, EngineError, TaskError: it has failed."""
        async with self._slots:
            if session.aborted:
                raise LeaseFailed("aborted", "the episode was called off")
            process = min(self._processes, key=lambda one: one.load)
            try:
                await process.ensure()
            except EnvironmentFailed as error:
                raise LeaseFailed(FAILED, str(error)) from error
            return await process.run(row, session)

    async def close(self) -> None:
        """Kill the processes; episodes that still run fail."""
        await asyncio.gather(*(process.stop() for process in self._processes))


@asynccontextmanager
async def environments_of(
    environment: Environment, hidden: frozenset[str], *, temperature: float = 1.0
) -> AsyncIterator[Environments | None]:
    """The environments of a run until the end of the block; None without environment.function.

    Functions see none of the `hidden` variables, which hold keys of services, and rollout.temperature.

    Raises EnvironmentFailed: the function cannot be loaded.
    """
    if environment.function is None:
        yield None
        return
    environments = Environments(environment, hidden, temperature=temperature)
    await environments.start()
    try:
        yield environments
    finally:
        await environments.close()
