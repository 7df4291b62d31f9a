"""An episode's end towards the engine: encodes contexts, samples turns within limits, records every token.

It serves whatever speaks for an agent: the environment's process (environments/process.py), in which a function of the
user runs, or an OpenAI-compatible endpoint (rollout_server/tasks/agents).
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from replay.data import stream_seed
from rollout_server.engines.base import Completion, Engine, Pictures, Sampling
from rollout_server.tasks.environments import ContextFull, NoMoreTurns, Turn
from rollout_server.tasks.environments.conversation import Context, Conversation, Tools
from rollout_server.tasks.environments.recorder import EpisodeRecorder, Int32
from rollout_server.tasks.environments.tool_calls import message_of
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.tasks.pictures import Seen
from rollout_server.tasks.stopping import first_stop, until_stopped, whole_tokens
from rollout_server.tasks.task import Task, TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What an episode may use; tokens and numbers."""

    max_new_tokens: int
    """Of a sample behind its prompt, tokens of the environment included."""
    max_context: int
    """Prompt and all that follows."""
    max_turns: int


class Session:
    """The turns of one episode."""

    def __init__(
        self, name: str, engine: Engine, task: Task, texts: Executor, *, sampling: Sampling, limits: EpisodeLimits,
        pinned: int | None = None, prompt_seed: int = 0, seen: Seen | None = None,
    ) -> None:  # fmt: skip
        """`sampling.seed` is the episode's: each turn has a stream of its own. `texts` encodes and decodes, one thread.

        `seen` are pictures of the row, which contexts may begin with.

        The engine knows the turns as `name`/0, `name`/1 and so on.
        """
        self.name, self.seed, self.prompt_seed, self.task = name, sampling.seed, prompt_seed, task
        self.recorder = EpisodeRecorder(limits.max_new_tokens)
        self.on_abort: Callable[[], object] = lambda: None
        """Called once when the episode is called off; whatever runs it sets this."""
        self.too_long: str | None = None
        """Why there was no room for an answer to a context, while there was none yet: a function may swallow that."""
        self.aborted = False
        self.has_begun = self.has_ended = False
        """Whether it has got its place, and given it back."""
        self._engine, self._texts = engine, texts
        self._sampling, self._limits, self.pinned = sampling, limits, pinned
        self._seen, self._conversation = seen, Conversation(task, None if seen is None else seen.expand)
        self._begun = 0
        self._answers: dict[int, Completion] = {}
        self._running: set[str] = set()

    async def turn(
        self,
        context: Context,
        *,
        tools: Tools = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        begins: str = "",
        told: Callable[[str], None] | None = None,
    ) -> Turn:
        """Sample an answer to a context of text, token ids or messages.

        `stop` are strings that end it, beside rollout.stop; `begins` is how it begins, which is context and not
        trained; `told` gets its text while it grows.

        Raises:
            ContextFull, NoMoreTurns: a limit is reached.
            LeaseFailed: the episode was called off.
            TaskError: the context cannot be encoded, or max_new_tokens is no number of tokens.
            EngineError: the engine refuses or has died.
        """
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise TaskError(f"max_new_tokens {max_new_tokens!r}: take 1 or more, or None for all that is left")
        number, self._begun = self._begun, self._begun + 1
        if number >= self._limits.max_turns:
            raise NoMoreTurns(f"the episode has had its {self._limits.max_turns} turns (environment.max_turns)")
        stops = (*self.task.stops, *stop)
        if not all(isinstance(one, str) and one for one in stops):
            raise TaskError(f"stop {stop!r}: take strings that are not empty")
        ids = await self.beside(self._encoded, context, tools, begins)
        room = self._room(ids)
        if room < 1:
            said = (
                f"turn {number} has a context of {ids.size} tokens, and no room for an answer:"
                f" {self._limits.max_new_tokens} tokens behind a prompt (rollout.max_new_tokens),"
                f" {self._limits.max_context} in all (with data.max_prompt_tokens)"
            )
            if self.last is None:
                self.too_long = said
            raise ContextFull(said)
        shown = None if self._seen is None else await self.beside(self._seen.shown_in, ids)
        answer = await self._sampled(ids, shown, number, min(room, max_new_tokens or room), stops, told)
        self.recorder.add(ids, answer, number)
        self._answers[number] = answer
        try:
            text, message = await self.beside(self._read, context, tools, ids, answer, number, stops, begins)
        except asyncio.CancelledError:
            self.forget(number)
            raise
        return Turn(
            number=number,
            text=text,
            message=message,
            token_ids=answer.token_ids.tolist(),
            context_ids=ids.tobytes(),
            finish_reason=answer.finish_reason,
            room=self._room(np.concatenate((ids, answer.token_ids))),
            logprobs=answer.logprobs.tolist(),
            versions=answer.versions.tolist(),
        )

    def progress(self) -> tuple[int, ...]:
        """Changes while tokens come: of its turns, or where these have none yet, of all requests of the engine."""
        counts = self._engine.running_tokens()
        own = tuple(counts.get(name, 0) for name in self._running)
        return own if any(own) else (sum(counts.values()), len(counts))

    def _encoded(self, context: Context, tools: Tools, begins: str) -> Int32:
        ids = self._conversation.encode(context, tools)
        return np.asarray([*ids, *self.task.encode_text(begins)] if begins else ids, np.int32)

    def _read(
        self, context: Context, tools: Tools, ids: Int32, answer: Completion, number: int, stops: Sequence[str],
        begins: str,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """Text and message of an answer, which the conversation goes on from: by its ids, where its text ends one."""
        said, decode = answer.token_ids.tolist(), self.task.decode
        stop = first_stop(decode, said, stops)
        text = decode(said) if stop is None else stop.text
        kept = len(said) if stop is None else whole_tokens(decode, said, text)
        message = message_of(begins + text, number)
        if kept is not None:
            known = np.concatenate((ids, answer.token_ids[:kept]))
            self._conversation.answered(context, tools, known, begins + text, message)
        return begins + text, message

    @property
    def last(self) -> Completion | None:
        """The newest answer."""
        return next(reversed(self._answers.values()), None)

    def waits(self, waiting: Container[str]) -> bool:
        """Whether it waits for its place, or all its turns are among the engine's `waiting` requests."""
        return not self.has_begun or (bool(self._running) and all(name in waiting for name in self._running))

    def forget(self, number: int) -> None:
        """Take back a turn whose answer nothing has received: it was called off when it had ended already."""
        self._answers.pop(number, None)
        self.recorder.forget(number)

    def _room(self, ids: Int32) -> int:
        return self.recorder.room(ids, max_context=self._limits.max_context)

    async def _sampled(
        self, ids: Int32, shown: Pictures | None, number: int, max_new_tokens: int, stops: Sequence[str],
        told: Callable[[str], None] | None,
    ) -> Completion:  # fmt: skip
        if self.aborted:
            raise LeaseFailed("aborted", "the episode was called off")
        sampling = replace(self._sampling, seed=stream_seed(self.seed, number, 0), max_new_tokens=max_new_tokens)
        name = f"{self.name}/{number}"
        self._running.add(name)
        try:
            given: dict[str, Any] = {} if shown is None else {"pictures": shown}
            answers = self._engine.generate(ids.tolist(), sampling, 1, request_id=name, pinned=self.pinned, **given)
            decode = self.task.decode
            (answer,) = await until_stopped(
                self._engine, answers, name, decode=decode, beside=self.beside, stops=stops, told=told
            )
        finally:
            self._running.discard(name)
        if answer.finish_reason == "abort":
            raise LeaseFailed("aborted", f"turn {number} was called off")
        return answer

    def abort(self) -> None:
        """Call the episode off, in the middle of a turn or between two."""
        if not self.aborted:
            self.aborted = True
            for name in self._running:
                self._engine.abort(name)
            self.on_abort()

    async def beside(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a long call in the thread of the tokenizer: the loop also serves the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, call, *arguments)
