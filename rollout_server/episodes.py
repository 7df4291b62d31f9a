"""Lease to group where an environment is: one episode a trajectory. No sockets."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from replay import messages as m
from replay import routing
from replay.data import stream_seed
from replay.state.answers import ERRORS, PROMPT_ERRORS
from rollout_server.engines.base import Completion, Partial, Sampling
from rollout_server.generate import (
    EVALUATION_TRIES,
    Generator,
    LeaseFailed,
    Verdict,
    both,
    errors_of,
    means,
    result_of,
    together,
)
from rollout_server.tasks.environments.pool import EnvironmentPool
from rollout_server.tasks.environments.process import FAILED, EpisodeResult
from rollout_server.tasks.environments.recorder import EpisodeSample
from rollout_server.tasks.environments.session import EpisodeLimits, Session
from rollout_server.tasks.pictures import Seen
from rollout_server.tasks.task import TaskError
from rollout_server.teachers.scores import Answer
from slipstream.families.pictures import packed

Begin = Callable[[int], Session]
"""Makes the session of an episode, by the number of the attempt."""
Played = tuple[Session, EpisodeResult | Verdict]
BETWEEN = "\n--------\n"
"""Between the texts of two samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an episode has left."""

    samples: list[EpisodeSample]
    verdict: Verdict
    text: str
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        """Behind the prompts of its samples."""
        return sum(sample.token_ids.size for sample in self.samples)


@dataclass(frozen=True, slots=True)
class EpisodeGenerator(Generator):
    """As a Generator; what samples are is up to the environment."""

    environments: EnvironmentPool = field(kw_only=True)
    _sessions: dict[str, list[Session]] = field(default_factory=dict)
    """By the request id of a lease: its episodes."""

    async def group(self, lease: m.Lease, request_id: str) -> m.Group:
        """Run the episodes of a lease. Raises LeaseFailed."""
        started, size, seen = time.monotonic(), self.config.rollout.group_size, await self._look(lease.prompt)
        sampling = self.sampling(lease.seed)
        sessions = self._sessions[request_id] = [
            self._session(
                f"{request_id}/{number}", replace(sampling, seed=stream_seed(lease.seed, number, 1)), lease.seed, seen
            )
            for number in range(size)
        ]
        try:
            played = await together(self._tried(lease.prompt, partial(_itself, one), 1) for one in sessions)
            made = [samples_of(*one) for one in played]
            asked = [[Answer(one.prompt_ids, one.token_ids, one.loss_mask) for one in samples] for samples in made]
            judging = self._judged([lease.prompt] * size, played, 1)
            verdicts, taught = await both(judging, self.taught(lease.prompt, asked))
            episodes = await self._ended(played, verdicts)
        finally:
            del self._sessions[request_id]
        samples = [sample for episode in episodes for sample in episode.samples]
        counts = [len(episode.samples) for episode in episodes]
        prompt_ids, prompt_lengths = prompts_of(samples, self.config.data.max_prompt_tokens)
        return m.Group(
            pass_=lease.pass_,
            index=lease.index,
            attempt=lease.attempt,
            finish_reasons=[episode.finish_reason for episode in episodes],
            reward_metrics=means([e.verdict.metrics for e in episodes if not e.verdict.left_out]),
            generate_s=time.monotonic() - started,
            data_source=str(lease.prompt.get("data_source", "")),
            lengths=np.array([sample.token_ids.size for sample in samples], np.int32),
            rewards=np.array([episode.verdict.score for episode in episodes], np.float32),
            samples=np.array(counts if set(counts) != {1} else [], np.int32),
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            **joined(samples),
            **taught,
            **errors_of([episode.verdict for episode in episodes]),
            **packed(() if seen is None else seen.sources),
            **routing.packed(
                [sample.prompt_ids for sample in samples] if prompt_lengths.size else [prompt_ids],
                [sample.token_ids for sample in samples],
                [sample.routing for sample in samples],
            ),
        )

    async def _look(self, row: dict[str, Any]) -> Seen | None:
        """Pictures of a row. Raises LeaseFailed: one cannot be used."""
        try:
            seen: Seen | None = await self._beside(self.task.look, row)
        except TaskError as error:
            raise LeaseFailed("prompt_not_rendered", str(error)) from error
        return seen

    def abort(self, request_id: str) -> None:
        for session in self._sessions.get(request_id, ()):
            session.abort()

    def running_tokens(self) -> Mapping[str, int]:
        running: defaultdict[str, int] = defaultdict(int)
        for name, count in self.engine.running_tokens().items():
            running[name.rpartition("/")[0]] += count  # of a turn, to its episode
        return {
            request_id: sum(session.recorder.sampled_tokens + running[session.name] for session in sessions)
            for request_id, sessions in list(self._sessions.items())
        }

    def queued(self) -> set[str]:
        waiting = self.engine.waiting()
        left = {name: [one for one in sessions if not one.has_ended] for name, sessions in self._sessions.items()}
        return {name for name, sessions in left.items() if sessions and all(one.waits(waiting) for one in sessions)}

    def progress(self, request_id: str, since: Sequence[int]) -> Sequence[Partial]:
        """Nothing: no other server could go on from it."""
        return [Partial() for _ in since]

    async def evaluation(self, lease: m.EvaluationLease) -> m.EvaluationResult:
        """As `Generator.evaluation`: every turn of every episode by the pinned version."""
        started, numbered = time.monotonic(), list(enumerate(lease.prompts, start=lease.first))
        episodes: list[Episode] = []
        # of prompts with pictures no more at once than run: pixels take far more memory than tokens
        has_pictures = any(row.get("images") for row in lease.prompts)
        at_once = max(1, self.config.environment.max_episodes // lease.samples) if has_pictures else len(numbered)
        for first in range(0, len(numbered), at_once):
            episodes += await self._evaluated(lease, numbered[first : first + at_once])
        answers = [(episode.text, episode.finish_reason, episode.num_tokens) for episode in episodes]
        return result_of(lease, started, answers, [episode.verdict for episode in episodes])

    async def _evaluated(
        self, lease: m.EvaluationLease, numbered: Sequence[tuple[int, dict[str, Any]]]
    ) -> list[Episode]:
        """Episodes of these rows of an evaluation, by their numbers in its set; one that fails is played again."""
        plays: list[tuple[dict[str, Any], Begin]] = []
        unasked: dict[int, Episode] = {}
        for number, row in numbered:
            try:
                seen = await self._look(row)
            except LeaseFailed as failed:
                verdict = Verdict.failed(self.config, failed.reason, failed.detail)
                unasked[number] = Episode(samples=[], verdict=verdict, text="", finish_reason="error")
                continue
            plays += [(row, partial(self._evaluation_session, lease, number, n, seen)) for n in range(lease.samples)]
        played = iter(await self._run(plays, tries=EVALUATION_TRIES))
        return [unasked.get(number) or next(played) for number, _ in numbered for _ in range(lease.samples)]

    def _evaluation_session(
        self, lease: m.EvaluationLease, number: int, sample: int, seen: Seen | None, attempt: int
    ) -> Session:
        """The same seeds in every attempt; the engine knows its turns by other names."""
        mode, again = "greedy" if lease.greedy else "sampled", f".{attempt}" if attempt else ""
        name = f"evaluation-{lease.version}-{lease.set}-{mode}-{number}/{sample}{again}"
        sampling = replace(
            self.sampling(stream_seed(lease.seed + number, sample, 1)),
            greedy=lease.greedy,
            temperature=lease.temperature,
            max_new_tokens=lease.max_new_tokens,
        )
        return self._session(name, sampling, stream_seed(lease.seed + number, 0, 2), seen, pinned=lease.version)

    def _session(
        self, name: str, sampling: Sampling, prompt_seed: int, seen: Seen | None, pinned: int | None = None
    ) -> Session:
        limits = EpisodeLimits(
            max_new_tokens=sampling.max_new_tokens,
            max_context=self.config.data.max_prompt_tokens + sampling.max_new_tokens,
            max_turns=self.config.environment.max_turns,
        )
        options: dict[str, Any] = {"limits": limits, "pinned": pinned, "prompt_seed": prompt_seed, "seen": seen}
        return Session(name, self.engine, self.task, self._texts, sampling=sampling, **options)

    async def _run(self, plays: Sequence[tuple[dict[str, Any], Begin]], *, tries: int = 1) -> list[Episode]:
        """All episodes at once; what fails more than one of them ends the others."""
        played = await together(self._tried(row, begin, tries) for row, begin in plays)
        return await self._ended(played, await self._judged([row for row, _ in plays], played, tries))

    async def _ended(self, played: Sequence[Played], verdicts: Sequence[Verdict]) -> list[Episode]:
        made = zip(played, verdicts, strict=True)
        return [await self._beside(self._episode, *one, verdict) for one, verdict in made]

    async def _tried(self, row: dict[str, Any], begin: Begin, tries: int) -> Played:
        """An episode, played again where it fails."""
        for attempt in range(tries):
            session = begin(attempt)
            outcome = await self._played(row, session)
            if isinstance(outcome, EpisodeResult) or outcome.error in PROMPT_ERRORS:
                break
        return session, outcome

    async def _played(self, row: dict[str, Any], session: Session) -> EpisodeResult | Verdict:
        """What an episode's function has returned, or how this one failed. Raises LeaseFailed, EngineError."""
        try:
            outcome = await self.environments.run(row, session)
        except LeaseFailed as failed:
            if failed.reason not in ERRORS:
                raise
            return Verdict.failed(self.config, failed.reason, failed.detail)
        if session.last is None:
            empty = "an episode ended without a turn"
            if session.too_long is None:
                return Verdict.failed(self.config, FAILED, empty)
            too_long = f"{empty}: {session.too_long}"
            if session.pinned is None:
                raise LeaseFailed("prompt_too_long", too_long)
            return Verdict.failed(self.config, "prompt_too_long", too_long)
        if unknown := sorted(set(outcome.leave_out) - session.recorder.turns):
            known = sorted(session.recorder.turns)
            return Verdict.failed(self.config, FAILED, f"leave_out {unknown}: the episode has had the turns {known}")
        return outcome

    async def _judged(self, rows: list[dict[str, Any]], played: list[Played], tries: int) -> list[Verdict]:
        """The function's own reward of each episode, else what reward.function says of the last answer."""
        asked: dict[int, Completion] = {}
        for number, (session, outcome) in enumerate(played):
            if isinstance(outcome, EpisodeResult) and outcome.reward is None and session.last is not None:
                asked[number] = session.last
        _, said = await self.score([rows[n] for n in asked], list(asked.values()), tries=tries) if asked else ([], [])
        found = dict(zip(asked, said, strict=True))
        return [
            outcome if isinstance(outcome, Verdict) else found.get(number) or Verdict(score=outcome.reward or 0.0)
            for number, (_, outcome) in enumerate(played)
        ]

    def _episode(self, session: Session, played: EpisodeResult | Verdict, verdict: Verdict) -> Episode:
        samples = samples_of(session, played)
        counted = {
            "episode/turns": float(session.recorder.num_turns),
            "episode/samples": float(len(samples)),
            "episode/environment_tokens": float(sum(int((sample.loss_mask == 0).sum()) for sample in samples)),
        }
        own: dict[str, float] = {}
        if isinstance(played, EpisodeResult):
            counted |= {"episode/environment_s": played.environment_s, "episode/blocked_s": played.blocked_s}
            own = played.metrics
        return Episode(
            samples=samples,
            # without a token there is nothing to train
            verdict=replace(
                verdict, metrics={**verdict.metrics, **own, **counted}, left_out=verdict.left_out or not samples
            ),
            text=BETWEEN.join(self.task.decode(sample.token_ids.tolist()) for sample in samples),
            finish_reason="error" if verdict.error == FAILED or session.last is None else session.last.finish_reason,
        )


def samples_of(session: Session, played: EpisodeResult | Verdict) -> list[EpisodeSample]:
    """Samples of an episode that has ended."""
    return session.recorder.samples(played.leave_out if isinstance(played, EpisodeResult) else ())


def _itself(session: Session, _attempt: int) -> Session:
    return session


def joined(samples: Sequence[EpisodeSample]) -> dict[str, Any]:
    """The token arrays of a group: those of all samples, one after the other."""
    kinds = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
    return {
        name: np.concatenate([np.empty(0, kind), *(getattr(sample, name) for sample in samples)])
        for name, kind in kinds.items()
    }


def prompts_of(samples: Sequence[EpisodeSample], most: int) -> tuple[m.Int32, m.Int32]:
    """`prompt_ids` and `prompt_lengths` of a group: one prompt where all samples have the same, of at most `most`."""
    if not samples:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    first = samples[0].prompt_ids
    if first.size <= most and all(np.array_equal(sample.prompt_ids, first) for sample in samples):
        return first, np.empty(0, np.int32)
    lengths = np.array([sample.prompt_ids.size for sample in samples], np.int32)
    return np.concatenate([sample.prompt_ids for sample in samples]), lengths
