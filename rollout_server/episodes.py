"""Lease to group where an environment is: one episode a trajectory. No sockets."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from replay import messages as m
from replay.pictures import packed
from replay.prompts import stream_seed
from rollout_server.engines.base import Partial
from rollout_server.environments.pool import Environments
from rollout_server.environments.process import FAILED, Outcome
from rollout_server.environments.recorder import Sample
from rollout_server.environments.session import Limits, Session
from rollout_server.generate import Generator, LeaseFailed, means, result_of, together
from rollout_server.tasks import TaskError
from rollout_server.tasks.pictures import Seen

BETWEEN = "\n--------\n"
"""Between the texts of two samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an episode has left."""

    samples: list[Sample]
    reward: float
    metrics: dict[str, float]
    text: str
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        """Behind the prompts of its samples."""
        return sum(sample.token_ids.size for sample in self.samples)


@dataclass(frozen=True, slots=True)
class EpisodeGenerator(Generator):
    """As a Generator; what samples are is up to the environment."""

    environments: Environments = field(kw_only=True)
    _sessions: dict[str, list[Session]] = field(default_factory=dict)
    """By the request id of a lease: its episodes."""

    async def group(self, lease: m.Lease, request_id: str) -> m.Group:
        """Run the episodes of a lease. Raises LeaseFailed."""
        started, size = time.monotonic(), self.config.rollout.group_size
        limits, seen = self._limits(self.config.rollout.max_new_tokens), await self._look(lease.prompt)
        seeds = [stream_seed(lease.seed, number, 1) for number in range(size)]
        names = [f"{request_id}/{number}" for number in range(size)]
        sessions = self._sessions[request_id] = [
            self._session(name, limits, (seed, lease.seed), seen) for name, seed in zip(names, seeds, strict=True)
        ]
        try:
            episodes = await self._run(sessions, [lease.prompt] * size)
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
            reward_metrics=means([episode.metrics for episode in episodes]),
            generate_s=time.monotonic() - started,
            data_source=str(lease.prompt.get("data_source", "")),
            lengths=np.array([sample.token_ids.size for sample in samples], np.int32),
            token_ids=np.concatenate([sample.token_ids for sample in samples]),
            loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
            logprobs=np.concatenate([sample.logprobs for sample in samples]),
            versions=np.concatenate([sample.versions for sample in samples]),
            rewards=np.array([episode.reward for episode in episodes], np.float32),
            samples=np.array(counts if max(counts) > 1 else [], np.int32),
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            **packed(() if seen is None else seen.sources),
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
        return result_of(lease, started, [(e.text, e.finish_reason, e.reward, e.num_tokens) for e in episodes])

    async def _evaluated(
        self, lease: m.EvaluationLease, numbered: Sequence[tuple[int, dict[str, Any]]]
    ) -> list[Episode]:
        """Episodes of these rows of an evaluation, by their numbers in its set."""
        rows, sessions = [], []
        limits, mode = self._limits(lease.max_new_tokens), "greedy" if lease.greedy else "sampled"
        for number, row in numbered:
            seen = await self._look(row)
            for sample in range(lease.samples):
                name = f"evaluation-{lease.version}-{lease.set}-{mode}-{number}/{sample}"
                seed = stream_seed(lease.seed + number, sample, 1)
                session = self._session(name, limits, (seed, stream_seed(lease.seed + number, 0, 2)), seen, lease)
                rows.append(row)
                sessions.append(session)
        return await self._run(sessions, rows)

    def _limits(self, max_new_tokens: int) -> Limits:
        return Limits(
            max_new_tokens=max_new_tokens,
            max_context=self.config.data.max_prompt_tokens + max_new_tokens,
            max_turns=self.config.environment.max_turns,
        )

    def _session(
        self,
        name: str,
        limits: Limits,
        seeds: tuple[int, int],
        seen: Seen | None,
        evaluation: m.EvaluationLease | None = None,
    ) -> Session:
        """`seeds` are the episode's and the prompt's."""
        sampling = self.sampling(seeds[0])
        if evaluation is not None:
            sampling = replace(sampling, greedy=evaluation.greedy, temperature=evaluation.temperature)
        pinned = None if evaluation is None else evaluation.version
        options: dict[str, Any] = {"limits": limits, "pinned": pinned, "prompt_seed": seeds[1], "seen": seen}
        return Session(name, self.engine, self.task, self._texts, sampling=sampling, **options)

    async def _run(self, sessions: list[Session], rows: list[dict[str, Any]]) -> list[Episode]:
        """All episodes at once; the first that fails ends the others."""
        try:
            pairs = zip(rows, sessions, strict=True)
            outcomes = await together(self.environments.run(row, session) for row, session in pairs)
        except TaskError as error:
            raise LeaseFailed(FAILED, str(error)) from error
        rewards = await self._judged(rows, sessions, outcomes)
        made = zip(sessions, outcomes, rewards, strict=True)
        return [await self._beside(self._episode, session, outcome, *reward) for session, outcome, reward in made]

    async def _judged(
        self, rows: list[dict[str, Any]], sessions: list[Session], outcomes: list[Outcome]
    ) -> list[tuple[float, dict[str, float]]]:
        """(reward, metrics) of each: the function's own, else what reward.function says of the last answer."""
        open_ = [number for number, outcome in enumerate(outcomes) if outcome.reward is None]
        answers = [(number, sessions[number].last) for number in open_]
        for number, (session, outcome) in enumerate(zip(sessions, outcomes, strict=True)):
            if session.last is None:
                empty = f"episode {number} ended without a turn"
                if session.too_long is not None:
                    raise LeaseFailed("prompt_too_long", f"{empty}: {session.too_long}")
                raise LeaseFailed(FAILED, empty)
            if unknown := sorted(set(outcome.leave_out) - session.recorder.turns):
                known = sorted(session.recorder.turns)
                raise LeaseFailed(FAILED, f"leave_out {unknown}: episode {number} has had the turns {known}")
        last = [answer for _, answer in answers if answer is not None]
        said = await self.score([rows[number] for number in open_], last) if open_ else ([], [])
        found = {
            number: (outcome.score, {**outcome.metrics, "seconds": outcome.seconds})
            for number, outcome in zip(open_, said[1], strict=True)
        }
        return [found.get(number, (outcome.reward or 0.0, {})) for number, outcome in enumerate(outcomes)]

    def _episode(self, session: Session, outcome: Outcome, reward: float, judged: dict[str, float]) -> Episode:
        samples = session.recorder.samples(outcome.leave_out)
        assert session.last is not None
        counted = {
            "episode/turns": float(session.recorder.num_turns),
            "episode/samples": float(len(samples)),
            "episode/environment_tokens": float(sum(int((sample.loss_mask == 0).sum()) for sample in samples)),
            "episode/environment_s": outcome.environment_s,
            "episode/blocked_s": outcome.blocked_s,
        }
        return Episode(
            samples=samples,
            reward=reward,
            metrics={**judged, **outcome.metrics, **counted},
            text=BETWEEN.join(self.task.decode(sample.token_ids.tolist()) for sample in samples),
            finish_reason=session.last.finish_reason,
        )


def prompts_of(samples: Sequence[Sample], most: int) -> tuple[m.Int32, m.Int32]:
    """`prompt_ids` and `prompt_lengths` of a group: one prompt where all samples have the same, of at most `most`."""
    first = samples[0].prompt_ids
    if first.size <= most and all(np.array_equal(sample.prompt_ids, first) for sample in samples):
        return first, np.empty(0, np.int32)
    lengths = np.array([sample.prompt_ids.size for sample in samples], np.int32)
    return np.concatenate([sample.prompt_ids for sample in samples]), lengths
