"""A taskset of verifiers in the quick start's characters: six digits and `=`, and a reward that differs a lot."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["DigitTasks"]


class DigitTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def spread(self, trace: Any) -> float:
        return sum(map(ord, trace.last_reply)) % 97 / 97


class DigitTasks(vf.Taskset[DigitTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[DigitTask]:
        number = 0
        while True:
            number = (number + 123_457) % 10**6
            yield DigitTask(vf.TaskData(prompt=f"{number:06}="), self.config.task)
