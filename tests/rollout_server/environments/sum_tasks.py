"""A taskset of verifiers, as one of its users writes it: sums in one turn."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["SumTasks"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    first: int = 0


class SumTasks(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        number = self.config.first
        while True:
            data = SumData(prompt=f"{number}+1", system_prompt="Add.", answer=str(number + 1))
            yield SumTask(data, self.config.task)
            number += 1
