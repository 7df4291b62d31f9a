"""Lease to group: encode the prompt, sample answers, score them. No sockets."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from replay import messages as m
from replay import routing
from replay.state.answers import ERRORS, PROMPT_ERRORS
from rollout_server.engines.base import Completion, Engine, Partial, Sampling, first_error
from rollout_server.progress import prefixes_of
from rollout_server.tasks.failed import LeaseFailed as LeaseFailed
from rollout_server.tasks.pictures import Prompt
from rollout_server.tasks.rewards import Rewards, Sample
from rollout_server.tasks.stopping import until_stopped
from rollout_server.tasks.task import PromptTooLong, Task, TaskError
from rollout_server.teachers.scores import Answer, Teachers
from slipstream.families.pictures import packed

T = TypeVar("T")
U = TypeVar("U")
EVALUATION_TRIES = 3
"""How often an answer of an evaluation is judged, or its episode is played, before it counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The score of one answer or episode, or why it failed."""

    score: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """One of replay's ERRORS or PROMPT_ERRORS, where it failed."""
    detail: str = ""
    left_out: bool = False

    @classmethod
    def failed(cls, config: Config, error: str, detail: str) -> "Verdict":
        """That of one that failed, as reward.on_error or environment.on_error has it."""
        section = config.reward if error == "reward_error" else config.environment
        if error in ERRORS and section.on_error == "score":
            return cls(score=section.error_score, error=error, detail=detail)
        return cls(error=error, detail=detail, left_out=True)


@dataclass(frozen=True, slots=True)
class Generator:
    """Turns leases into groups and evaluation leases into results."""

    config: Config
    engine: Engine
    task: Task
    rewards: Rewards
    teachers: Teachers | None = field(default=None, kw_only=True)
    """Set where answers are scored by teachers (`teachers`)."""
    _evaluation_prompts: dict[str, Prompt] = field(default_factory=dict)
    """Evaluation prompts of text, encoded, which come again with every evaluation."""
    _sampled: dict[str, list[Completion]] = field(default_factory=dict)
    """Answers of leases whose rewards are being computed: the engine has forgotten them by then."""
    _texts: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="texts"))
    """Encodes and decodes beside the event loop. One thread: a tokenizer must not be used by two at once."""

    def sampling(self, seed: int) -> Sampling:
        """How this run samples."""
        return Sampling(
            max_new_tokens=self.config.rollout.max_new_tokens,
            temperature=self.config.rollout.temperature,
            stop_token_ids=tuple(self.task.stop_token_ids),
            seed=seed,
        )

    async def group(self, lease: m.Lease, request_id: str) -> m.Group:
        """Sample and score the group of a lease. Raises LeaseFailed."""
        started = time.monotonic()
        prompt = await self._beside(self.encode, lease.prompt)
        try:
            completions = self._sampled[request_id] = await self.sample(prompt, lease, request_id)
            seconds = time.monotonic() - started
            given = np.array(prompt.token_ids, np.int32)
            asked = [[Answer.sampled(given, c.token_ids)] for c in completions]
            judging = self.score([lease.prompt] * len(completions), completions)
            (_, verdicts), taught = await both(judging, self.taught(lease.prompt, asked))
        finally:
            self._sampled.pop(request_id, None)
        answers, chosen = [c.token_ids for c in completions], [c.routing for c in completions]
        prompt_ids, token_ids = np.array(prompt.token_ids, dtype=np.int32), np.concatenate(answers)
        return m.Group(
            pass_=lease.pass_,
            index=lease.index,
            attempt=lease.attempt,
            finish_reasons=[c.finish_reason for c in completions],
            reward_metrics=means([verdict.metrics for verdict in verdicts if not verdict.left_out]),
            generate_s=seconds,
            data_source=str(lease.prompt.get("data_source", "")),
            prompt_ids=prompt_ids,
            lengths=np.array([c.token_ids.size for c in completions], dtype=np.int32),
            token_ids=token_ids,
            loss_mask=np.ones(token_ids.size, dtype=np.uint8),
            logprobs=np.concatenate([c.logprobs for c in completions]),
            versions=np.concatenate([c.versions for c in completions]),
            rewards=np.array([verdict.score for verdict in verdicts], dtype=np.float32),
            **taught,
            **errors_of(verdicts),
            **packed(prompt.sources),
            **routing.packed([prompt_ids], answers, chosen),
        )

    async def sample(self, prompt: Prompt, lease: m.Lease, request_id: str) -> list[Completion]:
        """The answers of a group, each from its prefix on where the lease brings one."""
        n = self.config.rollout.group_size
        prefixes = prefixes_of(lease, n)
        sampling = self.sampling(lease.seed)
        return await self._stopped(prompt, sampling, n, request_id, prefixes=prefixes)

    def _stopped(
        self, prompt: Prompt, sampling: Sampling, n: int, name: str, **given: Any
    ) -> Coroutine[Any, Any, list[Completion]]:
        """Sample answers, each up to the first of rollout.stop."""
        answers = self.engine.generate(prompt.token_ids, sampling, n, request_id=name, **given, **shown(prompt))
        decode, stops = self.task.decode, self.task.stops
        return until_stopped(self.engine, answers, name, decode=decode, beside=self._beside, stops=stops)

    def abort(self, request_id: str) -> None:
        """End a lease's request at the next decode step; unknown ones are ignored."""
        self.engine.abort(request_id)

    def running_tokens(self) -> Mapping[str, int]:
        """Tokens generated so far by the lease's request id."""
        return self.engine.running_tokens()

    def gauges(self) -> dict[str, float]:
        """What rewards have to do, and teachers."""
        return self.rewards.gauges() | ({} if self.teachers is None else self.teachers.gauges())

    async def taught(self, row: dict[str, Any], answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
        """Fields of a group that tell what its teacher gives to the samples of each trajectory; none without teachers.

        Raises as `Teachers.group`.
        """
        if self.teachers is None:
            return {}
        flat = [answer for of_trajectory in answers for answer in of_trajectory]
        return await self.teachers.group(row, flat, [len(each) for each in answers], self._prompt_of_teacher)

    async def _prompt_of_teacher(self, row: dict[str, Any]) -> NDArray[np.int32]:
        most = 2 * self.config.data.max_prompt_tokens
        return np.array((await self._beside(self.encode, row, most)).token_ids, np.int32)

    def queued(self) -> set[str]:
        """Leases, by request id, of which something waits for its turn here, and nothing runs."""
        return self.engine.waiting()

    def progress(self, request_id: str, since: Sequence[int]) -> Sequence[Partial]:
        """Tokens of each answer of a running lease from number since[i] on, prefix included."""
        if request_id not in self._sampled:
            return self.engine.progress(request_id, since) or [Partial() for _ in since]
        sampled = self._sampled[request_id]
        return [Partial.of(c).since(first) for c, first in zip(sampled, since, strict=True)]

    async def evaluation(self, lease: m.EvaluationLease) -> m.EvaluationResult:
        """Answer and score all prompts of an evaluation with exactly the pinned version.

        What cannot be asked or scored is named in the result. Raises LeaseFailed: aborted.
        """
        started, looks = time.monotonic(), asyncio.Semaphore(self.config.rollout.max_running)
        numbered = enumerate(lease.prompts, start=lease.first)
        found = await together(self._answers(lease, row, number, looks) for number, row in numbered)
        asked = [(row, answers) for row, answers in zip(lease.prompts, found, strict=True) if isinstance(answers, list)]
        completions = [completion for _, answers in asked for completion in answers]
        rows = [row for row, _ in asked for _ in range(lease.samples)]
        texts, verdicts = await self.score(rows, completions, tries=EVALUATION_TRIES)
        told = [(text, c.finish_reason, c.token_ids.size) for text, c in zip(texts, completions, strict=True)]
        scored = zip(told, verdicts, strict=True)
        whole = [
            (("", "error", 0), answers) if isinstance(answers, Verdict) else next(scored)
            for answers in found
            for _ in range(lease.samples)
        ]
        return result_of(lease, started, [each for each, _ in whole], [verdict for _, verdict in whole])

    def encode(self, row: dict[str, Any], most: int | None = None) -> Prompt:
        """A prompt as tokens. Raises LeaseFailed: too long, or cannot be rendered."""
        try:
            return self.task.prompt(row) if most is None else self.task.prompt(row, most)
        except TaskError as error:
            reason = "prompt_too_long" if isinstance(error, PromptTooLong) else "prompt_not_rendered"
            raise LeaseFailed(reason, str(error)) from error

    async def score(
        self, rows: list[dict[str, Any]], completions: list[Completion], *, tries: int = 1
    ) -> tuple[list[str], list[Verdict]]:
        """Decoded texts, and the score of each answer or why it has none. Raises LeaseFailed: aborted.

        An answer whose reward fails is judged again, `tries` times in all.
        """
        if any(c.finish_reason == "abort" for c in completions):
            raise LeaseFailed("aborted", "the request was cancelled")
        samples = await self._beside(self._samples, rows, completions)
        outcomes = await self.rewards.score(samples)
        for _ in range(tries - 1):
            if again := [number for number, outcome in enumerate(outcomes) if outcome.error is not None]:
                better = await self.rewards.score([samples[number] for number in again])
                outcomes = list((dict(enumerate(outcomes)) | dict(zip(again, better, strict=True))).values())
        verdicts = [
            Verdict(score=outcome.score, metrics={**outcome.metrics, "seconds": outcome.seconds})
            if outcome.error is None
            else Verdict.failed(self.config, "reward_error", f"answer {number}: {outcome.error}")
            for number, outcome in enumerate(outcomes)
        ]
        return [sample["completion"] for sample in samples], verdicts

    def _samples(self, rows: list[dict[str, Any]], completions: list[Completion]) -> list[Sample]:
        answers = zip(rows, completions, strict=True)
        return [self.task.sample(row, answer.token_ids.tolist(), answer.finish_reason) for row, answer in answers]

    async def _beside(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a long call in a thread: the loop also serves SGLang's frontend and updates."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, call, *arguments)

    async def _answers(
        self, lease: m.EvaluationLease, row: dict[str, Any], number: int, looks: asyncio.Semaphore
    ) -> list[Completion] | Verdict:
        """To one prompt; or why it cannot be asked."""
        name = f"evaluation-{lease.version}-{lease.set}-{'greedy' if lease.greedy else 'sampled'}-{number}"
        try:
            if row.get("images"):
                async with looks:  # pixels take far more memory than tokens: few at a time, and made anew every time
                    return await self._answered(lease, await self._beside(self.encode, row), number, name)
            key = repr((row["prompt"], row.get("columns", {}).get("tools")))
            if key not in self._evaluation_prompts:
                self._evaluation_prompts[key] = await self._beside(self.encode, row)
            return await self._answered(lease, self._evaluation_prompts[key], number, name)
        except LeaseFailed as failed:
            if failed.reason not in PROMPT_ERRORS:
                raise
            return Verdict.failed(self.config, failed.reason, failed.detail)

    async def _answered(self, lease: m.EvaluationLease, prompt: Prompt, number: int, name: str) -> list[Completion]:
        sampling = replace(
            self.sampling(lease.seed + number),
            greedy=lease.greedy,
            temperature=lease.temperature,
            max_new_tokens=lease.max_new_tokens,
        )
        return await self._stopped(prompt, sampling, lease.samples, name, pinned=lease.version)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, which run at once; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one) for one in coroutines]
    except ExceptionGroup as failed:
        raise first_error(failed) from failed
    return [task.result() for task in running]


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """As `together`, of two kinds."""
    kinds: list[Coroutine[Any, Any, Any]] = [one, other]
    first, second = await together(kinds)
    return first, second


def shown(prompt: Prompt) -> dict[str, Any]:
    """What an engine is given besides the tokens."""
    return {} if prompt.pictures is None else {"pictures": prompt.pictures}


def means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each number over the answers that told it; what is counted of episodes is 0 for the others."""
    names = sorted({name for one in metrics for name in one})
    told = {name: [one for one in metrics if name in one or name.startswith("episode/")] for name in names}
    return {name: float(np.mean([one.get(name, 0.0) for one in told[name]])) for name in names}


def errors_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The fields of a message that tell which answers failed; none where all were scored."""
    details = [verdict.detail for verdict in verdicts if verdict.error]
    if not details:
        return {}
    return {
        "errors": [verdict.error for verdict in verdicts],
        "left_out": np.array([verdict.left_out for verdict in verdicts], np.uint8),
        "error_detail": details[0],
    }


def result_of(
    lease: m.EvaluationLease, started: float, answers: Sequence[tuple[str, str, int]], verdicts: Sequence[Verdict]
) -> m.EvaluationResult:
    """Of all answers in their order: text, why it ended, number of tokens; and what they are worth."""
    return m.EvaluationResult(
        version=lease.version,
        set=lease.set,
        greedy=lease.greedy,
        first=lease.first,
        samples=lease.samples,
        asked=lease.asked,
        seconds=time.monotonic() - started,
        texts=[text for text, _, _ in answers],
        finish_reasons=[reason for _, reason, _ in answers],
        rewards=np.array([verdict.score for verdict in verdicts], np.float32),
        lengths=np.array([length for _, _, length in answers], np.int32),
        **errors_of(verdicts),
    )
