"""SGLang as an engine of the rollout server: requests in flight, pauses, proven updates, health.

An update is one order, which schedulers carry out between two forwards: a loader of ours copies, digests beside the
next forward, and compares before the one after it (update/armed.py). Without a proof they stand still then. What they
sample since the order is shown once the caller has compared as well, and resumes, or is sampled again. A request starts
under the live version's namespace of the prefix cache, so it never meets KV of weights that it did not compute itself.
What an update does to running requests:

    keep_kv       they go on between two tokens with the KV they have; those without a token start anew
    recompute_kv  they end with what they have and go on as new requests, whose KV is computed by the new weights
    drain         they run to their end first; new ones wait
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from configs.schema import Config
from rollout_server.engines.base import (
    Completion,
    EngineError,
    FinishReason,
    Health,
    Partial,
    PauseMode,
    Pictures,
    Sampling,
    Scored,
    first_error,
)
from rollout_server.engines.prefixes import check_request, check_scored, settled
from rollout_server.engines.sglang.arguments import replayed
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.sglang.requests import AnswerPart, ResumableAnswer, scored_of
from rollout_server.engines.sglang.schedulers import Schedulers
from rollout_server.engines.sglang.update.orders import FOLDER, StagingFolder, Update, folder_tensors
from slipstream.families.experts import Experts

log = logging.getLogger(__name__)


class SGLangEngine:
    """Implements `Engine`, whose docstrings hold here. Make it on the loop that uses it.

    Raises as `SGLangProcess`.
    """

    def __init__(self, config: Config, process: Callable[[Config], SGLangProcess] = SGLangProcess) -> None:
        self._max_context, self._scored_context = config.max_context, config.scored_context
        self._experts = replayed(config)
        self._hold_limit_s, self._drain_limit_s = config.evaluation.deadline_s, config.replay.lease_s
        self._staging = StagingFolder(config.model.family)
        os.environ[FOLDER] = str(self._staging.path)
        tensors, lora = list(folder_tensors(Path(config.model.path))), config.learner.lora
        if lora.rank:
            self._staging.adapt(tensors, lora)
        else:
            self._staging.name_tensors(tensors)
        try:
            self.sglang = process(config)
        except BaseException:
            self._staging.close()
            raise
        self.schedulers = Schedulers(self.sglang, self._staging)
        self.version, self._paused, self._half_updated = 0, False, ""
        self._names = itertools.count()
        self._answers: dict[ResumableAnswer, None] = {}
        """In progress, the oldest first."""
        self._slots = asyncio.Semaphore(config.rollout.max_running)
        self._open = asyncio.Event()
        """Set while parts may start."""
        self._open.set()
        self._shown = asyncio.Event()
        """Set while what is sampled is of proven weights."""
        self._shown.set()
        self._mode: PauseMode = "keep_kv"
        self._digests: Mapping[str, int] | None = None
        """Of the last load, until somebody asks."""
        self._pinned: int | None = None
        self._evaluates = False
        """An evaluation of the pinned version has been accepted."""
        self._counts = {"aborted_tokens": 0.0, "interrupted_parts": 0.0}
        """Tokens of answers that were called off, and parts that went on as others after an update."""
        self._tokens, self._busy_s, self._busy_since = 0, 0.0, 0.0
        self._progress_at = time.monotonic()

    def _parts(self) -> list[AnswerPart]:
        return [answer.part for answer in self._answers if answer.part is not None]

    # ---- requests --------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        n: int,
        *,
        request_id: str,
        pinned: int | None = None,
        prefixes: Sequence[Partial] | None = None,
        pictures: Pictures | None = None,
    ) -> list[Completion]:
        given = settled(prefixes, n, sampling, self.sglang.vocab_size)
        check_request(token_ids, sampling, n, max_context=self._max_context, vocab_size=self.sglang.vocab_size)
        if pinned is not None and pinned != self._pinned:
            raise EngineError(f"version {pinned} is not held here; version {self.version} is live")
        self.sglang.check_alive()
        answers = [
            ResumableAnswer(
                *(request_id, token_ids, sampling),
                pinned=pinned,
                prefix=prefix,
                pictures=pictures,
                experts=self._experts if pinned is None else None,  # nobody trains on an evaluation
            )
            for prefix in given
        ]
        if not self._answers:
            self._busy_since = self._progress_at = time.monotonic()
        self._answers.update(dict.fromkeys(answers))
        try:
            async with asyncio.TaskGroup() as group:
                death = group.create_task(self.sglang.death())
                tasks = [group.create_task(self._answer(answer)) for answer in answers]
                await asyncio.wait(tasks)
                death.cancel()
        except ExceptionGroup as failed:
            raise first_error(failed) from failed
        finally:
            for answer in answers:
                del self._answers[answer]
            if not self._answers:
                self._busy_s += time.monotonic() - self._busy_since
        return [task.result() for task in tasks]

    async def score(
        self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, temperature: float, top: int
    ) -> Scored:
        """As `Engine.score`; SGLang batches them, and has read what it has sampled. An update has all scored again."""
        check_scored(sequences, firsts, max_context=self._scored_context, vocab_size=self.sglang.vocab_size)
        if temperature != self.sglang.scored_at:
            raise EngineError(
                f"SGLang scores prompts at temperature {self.sglang.scored_at:g} here, not at rollout.temperature"
                f" {temperature:g}; take rollout.temperature=1.0, or a teacher with a process of its own"
            )
        words, asked = self.sglang.vocab_size, [ids.tolist() for ids in sequences]
        while True:
            await self._open.wait()
            version, loads = self.version, self.sglang.loads
            calls = [self.sglang.score(ids, first, top, version) for ids, first in zip(asked, firsts, strict=True)]
            try:
                async with asyncio.TaskGroup() as group:
                    death = group.create_task(self.sglang.death())
                    tasks = [group.create_task(call) for call in calls]
                    await asyncio.wait(tasks)
                    death.cancel()
            except ExceptionGroup as failed:
                raise first_error(failed) from failed
            if loads == self.sglang.loads:  # no load came between
                break
        told = zip(tasks, asked, firsts, strict=True)
        found = [scored_of(task.result(), ids, first, top, words) for task, ids, first in told]
        return Scored(
            version=version,
            logprobs=np.array([one for logprobs, _ in found for one in logprobs], np.float32),
            ids=np.array([pair[1] for _, pairs in found for pair in pairs], np.int32),
            top=np.array([pair[0] for _, pairs in found for pair in pairs], np.float32),
        )

    async def _answer(self, answer: ResumableAnswer) -> Completion:
        if answer.ended is None:
            answer.ended = await self._to_its_end(answer)
        elif answer.experts is not None:
            await self._read_again(answer, answer.experts)
        return answer.completion(answer.ended)

    async def _read_again(self, answer: ResumableAnswer, experts: Experts) -> None:
        """Have a prefix that has ended routed: read with its prompt, for a token that is not looked at."""
        tokens, part = answer.prompt + answer.taken.token_ids.tolist(), self._new_part()
        loads = -1
        async with self._slots:
            while loads != self.sglang.loads:
                await self._open.wait()
                loads = self.sglang.loads
                async for output in self.sglang.generate(part, tokens, answer.sampling, 1, answer.pictures, True):
                    part.output = output
        answer.route(part.output, answer.taken.token_ids.size + 1, experts)

    def _new_part(self) -> AnswerPart:
        return AnswerPart(rid=f"{os.getpid():x}-{next(self._names):012x}", version=self.version)

    async def _to_its_end(self, answer: ResumableAnswer) -> FinishReason:
        """Run part after part until the answer is whole or aborted; how it ended."""
        async with self._slots:
            while True:
                if answer.pinned is None:  # an evaluation finishes what an update would otherwise wait for
                    await self._open.wait()
                if answer.aborted:
                    return "abort"
                part = answer.part = self._new_part()
                reason = await self._run(answer, part)
                answer.part = None
                if not (reason == "abort" and part.interrupted):
                    self._counts["aborted_tokens"] += answer.num_tokens if reason == "abort" else 0
                    return reason
                self._counts["interrupted_parts"] += 1
                if (ended := answer.at_its_end()) is not None:
                    return ended

    async def _run(self, answer: ResumableAnswer, part: AnswerPart) -> FinishReason:
        """One part; its tokens are added to the answer."""
        tokens = answer.prompt + answer.taken.token_ids.tolist()
        left = answer.sampling.max_new_tokens - answer.num_tokens
        try:
            routed = answer.experts is not None
            async for output in self.sglang.generate(part, tokens, answer.sampling, left, answer.pictures, routed):
                await self._shown.wait()  # since an order it may be of the next version, whose place is not known yet
                part.output = output
                self._progress_at = time.monotonic()
                part.seen = int(output["meta_info"].get("completion_tokens") or part.seen)
                self._cut(part)
                if answer.aborted:  # again, for one that had not reached SGLang's schedulers yet
                    self.sglang.abort(part.rid)
        except asyncio.CancelledError:
            self.sglang.abort(part.rid)
            raise
        count, reason = answer.take(part, part.output, self.sglang.late_tokens)
        self._tokens += count
        return reason

    def abort(self, request_id: str) -> None:
        self._end([answer for answer in self._answers if answer.request_id == request_id])

    def _end(self, answers: Iterable[ResumableAnswer]) -> None:
        for answer in answers:
            answer.aborted = True
            if answer.part is not None:
                answer.part.interrupted = False
                self.sglang.abort(answer.part.rid)

    def running_tokens(self) -> Mapping[str, int]:
        tokens: dict[str, int] = {}
        for answer in self._answers:
            tokens[answer.request_id] = tokens.get(answer.request_id, 0) + answer.num_tokens
        return tokens

    def waiting(self) -> set[str]:
        """As `Engine.waiting`; what has no token yet may wait for memory inside SGLang."""
        left = [answer for answer in self._answers if answer.ended is None]
        begun = {answer.request_id for answer in left if answer.part is not None and answer.part.seen}
        return {answer.request_id for answer in left} - begun

    def progress(self, request_id: str, since: Sequence[int] = ()) -> list[Partial]:
        """As `Engine.progress`, a stream interval behind at most."""
        answers = [answer for answer in self._answers if answer.request_id == request_id]
        if not answers:
            return []
        return [answer.progress(first) for answer, first in zip(answers, since or [0] * len(answers), strict=True)]

    # ---- updates ---------------------------------------------------------------------------------------

    def holds(self) -> int | None:
        """As `Engine.holds`: SGLang has one set of weights, so an evaluation keeps updates out."""
        return self._pinned if self._evaluates else None

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`, but what has a token decodes on until `load`, under keep_kv.

        Waits for a running evaluation first, for at most evaluation.deadline_s.
        """
        if self._paused:
            return
        self.sglang.check_alive()
        try:
            key = "evaluation.deadline_s"
            await self.sglang.until(lambda: self.holds() is None, self._hold_limit_s, "the evaluation", key)
        except EngineError as late:
            self.sglang.check_alive()
            log.error("%s; the evaluation is given up here", late)
        if self._pinned is not None:  # nobody has begun to evaluate it, or nobody has ended it
            await self.unpin(self._pinned)
        self._open.clear()
        try:
            await self._stop_parts(mode)
        except BaseException:
            self._open.set()  # nothing was touched: requests go on with the version that they have
            raise
        self._paused, self._mode = True, mode

    async def _stop_parts(self, mode: PauseMode) -> None:
        """Wait for running requests, or end parts that continue as new ones."""
        if mode == "drain":
            await self.sglang.until(lambda: not self._parts(), self._drain_limit_s, "requests to end", "replay.lease_s")
            return
        chosen = {part for part in self._parts() if mode == "recompute_kv" or part.seen == 0}
        for part in chosen:
            part.interrupted = True

        def ended() -> bool:
            left = [part for part in self._parts() if part in chosen]
            for part in left:  # again each time, for those that had not reached SGLang yet
                self.sglang.abort(part.rid)
            return not left

        await self.sglang.until(ended, self.sglang.deadline_s, "requests to end", "rollout.engine_deadline_s")

    async def load(self, update: Update, version: int, digests: Mapping[str, int] | None = None) -> None:
        """As `Engine.load`: copies and digests in schedulers, which go on by themselves where all hold `digests`."""
        if not self._paused:
            raise EngineError(f"load of version {version} while the engine decodes; pause it first")
        self._half_updated = f"version {version} was not loaded whole"
        await asyncio.to_thread(self._staging.write_update, update, digests)
        self._shown.clear()
        try:
            self._digests = await self.schedulers.load(version)
        finally:
            for answer in self._answers:
                answer.met(version, self.schedulers.tokens, self.sglang.late_tokens, tainted=self.schedulers.tainted)
                self._cut(answer.part)
        self._half_updated = ""
        self.version = version

    def _cut(self, part: AnswerPart | None) -> None:
        if part is not None and part.kept is not None:  # what it samples is not proven: it goes on as another one
            part.seen = min(part.seen, part.kept)
            self.sglang.abort(part.rid)

    async def digest(self) -> Mapping[str, int]:
        """As `Engine.digest`: taken by the last load, computed anew when asked again."""
        taken, self._digests = self._digests, None
        return taken if taken is not None else await self.schedulers.order(StagingFolder.write_digest)

    async def resume(self) -> None:
        if self._half_updated:
            raise EngineError(f"the engine is half updated ({self._half_updated}); load a version whole first")
        await self.schedulers.resume()
        self._paused = False
        self._shown.set()
        self._open.set()

    def stood(self) -> tuple[float, float] | None:
        return self.schedulers.stood if self._mode == "keep_kv" else None

    async def pin(self, version: int) -> None:
        """As `Engine.pin`. Before `hold`, an update may drop it: no server need evaluate every pinned version."""
        if self._half_updated or version != self.version:
            raise EngineError(f"version {version} cannot be pinned; version {self.version} is live")
        self._pinned = version

    def hold(self, version: int) -> None:
        """As `Engine.hold`. At once, not with the first request: episodes may queue or set up long before it."""
        self._evaluates = self._evaluates or version == self._pinned

    async def unpin(self, version: int) -> None:
        if version == self._pinned:
            self._pinned, self._evaluates = None, False
            self._end([answer for answer in self._answers if answer.pinned == version])

    # ---- life ------------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """As `Engine.health`: it stands still where requests show no token for rollout.engine_deadline_s."""
        self.sglang.check_alive()
        parts = self._parts()
        running = len(parts)
        now = time.monotonic()
        if running == 0 or self._paused:
            self._progress_at = now
        elif now - self._progress_at > self.sglang.deadline_s:
            waited = now - self._progress_at
            raise self.sglang.fail(f"{running} requests run and no token came for {waited:.0f} s", waited)
        memory = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return Health(
            version=self.version,
            running=running,
            waiting=len(self._answers) - running,
            generated_tokens=self._tokens + sum(part.seen for part in parts),
            busy_s=self._busy_s + (now - self._busy_since if self._answers else 0.0),
            memory_bytes=memory[1] - memory[0],
            detail={**self._counts, **self.schedulers.seconds},
        )

    async def close(self) -> None:
        for answer in self._answers:
            answer.aborted = True
        self._open.set()
        self._shown.set()
        try:
            await self.sglang.close()
        finally:
            self._staging.close()
