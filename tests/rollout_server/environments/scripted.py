"""A client in place of the engine's, for environments that are ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.tasks.environments import NoMoreTurns, Turn
from rollout_server.tasks.environments.tool_calls import message_of
from rollout_server.tasks.workers.frames import pack


class Scripted:
    """A client whose policy says what it was told to say."""

    turn_timeout_s, finish_reason = 60.0, "stop"

    def __init__(self, answers: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        self.answers, self.options, self.temperature = list(answers), options or {}, 1.0
        self.prompt_seed, self.seed = 5, 6
        self.contexts: list[Any] = []

    async def generate(self, context: Any, **_: Any) -> Turn:
        number = len(self.contexts)
        if number == len(self.answers):
            raise NoMoreTurns("that was all")
        self.contexts.append(context)
        pack(context)
        text = self.answers[number]
        ids: dict[str, Any] = {"token_ids": [1], "context_ids": bytes(4), "logprobs": [-1.0], "versions": [0]}
        how: dict[str, Any] = {"finish_reason": self.finish_reason, "room": 9}
        return Turn(number=number, text=text, message=message_of(text, number), **ids, **how)
