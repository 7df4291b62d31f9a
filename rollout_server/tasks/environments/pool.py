"""The environment processes of a rollout server, and which episode runs in which of them."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from configs.environment import Environment
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.process import FAILED, EnvironmentProcess, EpisodeResult
from rollout_server.tasks.environments.session import Session
from rollout_server.tasks.failed import LeaseFailed

SHARED_DEATHS = 2
"""A prompt that so many processes have died with, each shared with other prompts, runs alone from then on."""


def prompt_of(name: str) -> str:
    """The prompt of an episode's name: 0/17 of 0/17/1/3 (pass, index, attempt, number)."""
    return name.rsplit("/", 2)[0]


class Places:
    """Places for so many episodes at once; those of evaluations are served before all others, each in their order."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many episodes wait."""
        return sum(not mine.done() for *_, mine in self._waiting)

    @asynccontextmanager
    async def one(self, session: Session) -> AsyncIterator[None]:
        """A place; the wait for it ends where the episode is called off. Raises LeaseFailed: it was."""
        mine = asyncio.get_running_loop().create_future()
        session.on_abort = mine.cancel
        # an evaluation may keep the next version waiting (SGLang), training episodes do not
        heapq.heappush(self._waiting, (session.pinned is None, next(self._numbers), mine))
        self._serve()
        try:
            if not session.aborted:
                await asyncio.wait([mine])
            if session.aborted:
                raise LeaseFailed("aborted", "the episode was called off")
            yield
        finally:
            self.free += mine.done() and not mine.cancelled()
            mine.cancel()
            self._serve()

    def _serve(self) -> None:
        while self._waiting and (self.free or self._waiting[0][-1].done()):
            *_, mine = heapq.heappop(self._waiting)
            if not mine.done():
                self.free -= 1
                mine.set_result(None)


class Suspects:
    """Counts deaths of processes by the prompts that were in them.

    A process that dies with several prompts in it does not say which of them ended it. One is charged with the death,
    the one that was charged least so far, so that the environment's errors are counted and no neighbour of the culprit
    uses its attempts up. The culprit itself soon dies alone, where every death is its own.
    """

    def __init__(self) -> None:
        self._shared: Counter[str] = Counter()
        self._charged: Counter[str] = Counter()

    def charge(self, episodes: Iterable[str]) -> str:
        """Note the death of a process with episodes of these names in it; the prompt that it is charged to."""
        prompts = list(dict.fromkeys(map(prompt_of, episodes)))
        if len(prompts) > 1:
            self._shared.update(prompts)
        chosen = min(prompts, key=lambda prompt: self._charged[prompt])
        self._charged[chosen] += 1
        return chosen

    def has(self, prompt: str) -> bool:
        """Whether a prompt has to run alone."""
        return self._shared[prompt] >= SHARED_DEATHS


class EnvironmentPool:
    """Runs episodes in environment.workers processes, at most environment.max_episodes at once.

    One more process starts once prompts have to run alone (Suspects).
    """

    def __init__(
        self, environment: Environment, hidden: frozenset[str] = frozenset(), *, temperature: float = 1.0
    ) -> None:
        self._suspects = Suspects()
        *self._processes, self._apart = [
            EnvironmentProcess(
                environment, f"environment process {number}", hidden, self._suspects.charge, temperature=temperature
            )
            for number in range(environment.num_workers() + 1)
        ]
        self._slots, self._alone = Places(environment.max_episodes), Places(1)

    async def start(self) -> None:
        """Start all processes. Raises EnvironmentFailed: the function cannot be loaded."""
        results = await asyncio.gather(*(process.ensure() for process in self._processes), return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            raise failures[0]

    async def run(self, row: dict[str, Any], session: Session) -> EpisodeResult:
        """One episode, in the process with the fewest. Raises LeaseFailed, EngineError, TaskError: it has failed."""
        prompt = prompt_of(session.name)
        async with AsyncExitStack() as places:
            if is_suspect := self._suspects.has(prompt):
                await places.enter_async_context(self._alone.one(session))
            await places.enter_async_context(self._slots.one(session))
            session.has_begun = True
            process = self._apart if is_suspect else min(self._processes, key=lambda one: one.load)
            try:
                await process.ensure()
            except EnvironmentFailed as error:
                raise LeaseFailed(FAILED, str(error)) from error
            if session.aborted:
                raise LeaseFailed("aborted", "the episode was called off")
            try:
                return await process.run(row, session)
            finally:
                session.has_ended = True

    async def close(self) -> None:
        """Kill the processes; episodes that still run fail."""
        await asyncio.gather(*(process.stop() for process in (*self._processes, self._apart)))


@asynccontextmanager
async def environments_of(
    environment: Environment, hidden: frozenset[str], *, temperature: float = 1.0
) -> AsyncIterator[EnvironmentPool | None]:
    """The environments of a run until the end of the block; None without environment.function.

    Functions see none of the `hidden` variables, which hold keys of services, and rollout.temperature.

    Raises EnvironmentFailed: the function cannot be loaded.
    """
    if environment.function is None:
        yield None
        return
    environments = EnvironmentPool(environment, hidden, temperature=temperature)
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()
