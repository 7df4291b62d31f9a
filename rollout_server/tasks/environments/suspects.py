"""Which prompt a dead environment process is charged to, and which prompts run alone because of it."""

import asyncio
from collections import Counter
from collections.abc import Collection

SHARED_DEATHS = 2
"""A prompt that so many processes have died with, each shared with other prompts, runs alone from then on."""


def prompt_of(name: str) -> str:
    """The prompt of an episode's name: 0/17 of 0/17/1/3 (pass, index, attempt, number)."""
    return name.rsplit("/", 2)[0]


class Suspects:
    """Counts deaths of processes by the prompts that were in them, and lets one suspect in at a time.

    A process that dies with several prompts in it does not say which of them ended it. One is charged with the death,
    the one that was charged least so far, so that the environment's errors are counted and no neighbour of the culprit
    uses its attempts up. The culprit itself soon dies alone, where every death is its own.
    """

    def __init__(self) -> None:
        self._shared: Counter[str] = Counter()
        self._charged: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        """Episodes of the prompt that runs alone now."""
        self._left = asyncio.Event()

    def charge(self, prompts: Collection[str]) -> str:
        """Note the death of a process with these prompts in it; the one that it is charged to."""
        if len(prompts) > 1:
            self._shared.update(prompts)
        chosen = min(prompts, key=lambda prompt: self._charged[prompt])
        self._charged[chosen] += 1
        return chosen

    def has(self, prompt: str) -> bool:
        """Whether a prompt has to run alone."""
        return self._shared[prompt] >= SHARED_DEATHS

    async def enter(self, prompt: str) -> None:
        """Wait until no other suspect runs."""
        while self._inside.keys() - {prompt}:
            await self._left.wait()
        self._inside[prompt] += 1

    def leave(self, prompt: str) -> None:
        """An episode of a suspect has ended."""
        self._inside[prompt] -= 1
        if not self._inside[prompt]:
            del self._inside[prompt]
            self._left.set()
            self._left = asyncio.Event()
