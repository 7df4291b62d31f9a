"""What a group gets from its teacher: asked while rewards are computed, tried again, checked, laid out by token."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from configs.teachers import Teacher
from replay.channel import load_keys
from replay.messages import Teachers as Listed
from replay.scores import SLACK, TEACHER_ERROR
from rollout_server.engines.base import Engine, Scored
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.teachers import NotScored, TeacherError
from rollout_server.teachers.endpoint import PROBE, PromptLogprobs
from rollout_server.teachers.links import Links
from rollout_server.teachers.messages import Score
from rollout_server.teachers.prompts import teacher_of, with_context
from slipstream.runtime.lifeline import BoundedLog

log = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
PAUSE_S = 0.5
"""Between two tries; doubles, to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 8.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample of a trajectory: tokens of its prompt, those after it, and which of these are trained."""

    prompt: Int32
    tokens: Int32
    loss_mask: NDArray[np.uint8]

    @classmethod
    def sampled(cls, prompt: Int32, tokens: Int32) -> "Answer":
        """Of which every token is trained."""
        return cls(prompt, tokens, np.ones(tokens.size, np.uint8))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is scored of a group: whole sequences, and the number of the first token of each that is."""

    sequences: list[Int32]
    firsts: list[int]

    @property
    def tokens(self) -> int:
        """That are scored."""
        return sum(map(len, self.sequences)) - sum(self.firsts)


class Teachers:
    """Asks the teacher of a prompt what it gives to the answers of its group."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        name: str,
        fingerprint: Mapping[str, str],
        ids_of: Callable[[str], Sequence[int]] = lambda _: (),
    ) -> None:
        """`fingerprint` is the run's; `ids_of` a text are those of its tokenizer, which endpoints must have as well.

        Raises RewardError: a variable of a key is not set.
        """
        assert config.scoring is not None
        self._config, self._engine = config, engine
        self._tokenizer, self._vocab_size = fingerprint["tokenizer"], int(fingerprint["vocab_size"])
        self._scoring, network = config.scoring, config.network
        self.links = Links(name, load_keys(network.keys), network.max_message_bytes)
        self._endpoints = {name: PromptLogprobs(name, one) for name, one in self._scoring.teachers.items() if one.url}
        self._probe = ids_of(PROBE) if self._endpoints else ()
        self._bounded = BoundedLog(log)
        self.waiting: dict[str, int] = {}
        """Groups that wait for scores, by the name of their teacher."""
        self.seconds = 0.0
        """For which the last group has waited after its answers were there."""

    def listed(self, message: Listed, run_id: str) -> None:
        """Where replay says that teachers are."""
        self.links.listed(message.entries, run_id)

    def gauges(self) -> dict[str, float]:
        """Groups that wait, and for how long the last one did."""
        return {"teachers/waiting": float(sum(self.waiting.values())), "teachers/seconds": self.seconds}

    def close(self) -> None:
        """Hang up."""
        self.links.close()

    async def group(
        self,
        row: Mapping[str, Any],
        answers: Sequence[Answer],
        counts: Sequence[int],
        encode: Callable[[dict[str, Any]], Awaitable[Int32]],
    ) -> dict[str, Any]:
        """Fields of a Group: scores of its samples, of which each trajectory has so many.

        `encode` gives the tokens of a row's prompt.

        Raises:
            LeaseFailed: this row has no such prompt, or the teacher does not answer (on_error `leave_out`).
            TeacherError: no teacher takes the row, or the teacher does not answer (`wait`).
        """
        if not answers:
            return {"teachers": [""] * len(counts)}
        name = teacher_of(self._scoring, row)
        teacher, began = self._scoring.teachers[name], time.monotonic()
        asked = await self._asked(name, teacher, row, answers, encode)
        self.waiting[name] = self.waiting.get(name, 0) + 1
        try:
            scored = await self._answered(name, teacher, asked)
        finally:
            self.waiting[name] -= 1
            self.seconds = time.monotonic() - began
        k, in_loss = self._scoring.k, np.concatenate([answer.loss_mask for answer in answers]) != 0
        by_token = np.repeat(in_loss, k)
        return {
            "teachers": [f"{name}@{scored.version}" if count else "" for count in counts],
            "teacher_logprobs": np.where(in_loss, scored.logprobs, np.float32(0)),
            "teacher_ids": np.where(by_token, scored.ids, np.int32(0)),
            "teacher_top": np.where(by_token, scored.top, np.float32(0)),
        }

    async def _asked(
        self,
        name: str,
        teacher: Teacher,
        row: Mapping[str, Any],
        answers: Sequence[Answer],
        encode: Callable[[dict[str, Any]], Awaitable[Int32]],
    ) -> Asked:
        """The sequences as the teacher sees them: with its context in the place of the row's own prompt."""
        prompts = [answer.prompt for answer in answers]
        seen = with_context(name, teacher, row)
        if teacher.context is not None:
            own, given = await encode(dict(row)), await encode(seen)
            if not all(np.array_equal(prompt, own) for prompt in prompts):
                raise TeacherError(
                    f"teachers.{name}.context: the prompts of an episode are not that of the row alone, so there is no"
                    " place for it; leave it out, or have environment.function begin with the row's prompt"
                )
            prompts = [given] * len(prompts)
        pairs = list(zip(prompts, answers, strict=True))
        sequences = [np.concatenate((prompt, answer.tokens)) for prompt, answer in pairs]
        return Asked(sequences, [int(prompt.size) for prompt in prompts])

    async def _answered(self, name: str, teacher: Teacher, asked: Asked) -> Scored:
        """Try until there are scores that can be used, or it took too long."""
        began, tries, why, pause = time.monotonic(), 0, "", PAUSE_S
        limit = teacher.wait_s if teacher.on_error == "wait" else math.inf
        while (left := began + limit - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, teacher.timeout_s)):
                    return self._usable(await self._once(name, teacher, asked), asked)
            except TimeoutError:
                if why and left < teacher.timeout_s:
                    break  # cut off at the end; the try before says more
                absent = teacher.has_process and self.links.missing(name)
                what = "no process of it is there" if absent else "it gave no answer"
                why = f"{what} for {min(left, teacher.timeout_s):g} s (teachers.{name}.timeout_s) [silent]"
            except NotScored as problem:
                why = str(problem)
            tries += 1
            self._bounded.warning(name, "teacher %r does not score, try %d: %s", name, tries, why)
            if teacher.on_error == "leave_out" and tries > teacher.retries:
                raise LeaseFailed(TEACHER_ERROR, f"teacher {name!r}, {tries} tries: {why}")
            await asyncio.sleep(min(pause, max(0.0, began + limit - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        waited = f"waited {limit:g} s for scores of teacher {name!r} (teachers.{name}.wait_s)"
        raise TeacherError(f"{waited}, {tries} tries; the last: {why}")

    async def _once(self, name: str, teacher: Teacher, asked: Asked) -> Scored:
        temperature, top = self._config.rollout.temperature, self._scoring.k
        if teacher.kind == "policy":
            return await self._engine.score(asked.sequences, asked.firsts, temperature=temperature, top=top)
        if name in self._endpoints:
            return await self._endpoints[name].scored(asked.sequences, asked.firsts, top=top, probe=self._probe)
        message = Score(
            number=0,
            teacher=name,
            tokenizer=self._tokenizer,
            temperature=temperature,
            top=top,
            lengths=np.array([ids.size for ids in asked.sequences], np.int32),
            firsts=np.array(asked.firsts, np.int32),
            token_ids=np.concatenate(asked.sequences),
        )
        return await self.links.ask(message)

    def _usable(self, scored: Scored, asked: Asked) -> Scored:
        """The same. Raises NotScored: it is not of these tokens, or holds what no logprob is."""
        k, total = self._scoring.k, asked.tokens
        sizes, wanted = (scored.logprobs.size, scored.ids.size, scored.top.size), (total, total * k, total * k)
        if sizes != wanted:
            raise NotScored(
                f"it gave {sizes} logprobs, ids and likeliest ones for {total} tokens, not {wanted} [corrupt]"
            )
        for values in (scored.logprobs, scored.top):
            wrong = np.flatnonzero(~(np.isfinite(values) & (values <= SLACK)))
            if wrong.size:
                raise NotScored(
                    f"it gave the logprob {values[wrong[0]]} (number {wrong[0]} of {values.size}) [corrupt]"
                )
        if k and not 0 <= int(scored.ids.min()) <= int(scored.ids.max()) < self._vocab_size:
            said = f"it gave ids {scored.ids.min()} to {scored.ids.max()}"
            raise NotScored(f"{said}, of a vocabulary of {self._vocab_size} [corrupt]")
        return scored
