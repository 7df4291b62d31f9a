"""Leases and evaluations in progress, and their results until replay has them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncDealer
from replay.trace import Part, Recorder, now_ns, to_ns
from rollout_server.engines.base import EngineError
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.progress import LeaseKey, ProgressReports, lease_key

log = logging.getLogger(__name__)

RESEND_S = 5.0
"""A group that was not acked for this long is sent again; replay deduplicates."""


def policies_of(versions: m.Int32, served: Sequence[tuple[int, int]]) -> list[list[int]]:
    """[incarnation, version] of each policy that may have sampled tokens of these versions.

    `served` are the policies that were live from the lease on, in order; a prefix is of the first one's line.
    """
    found = set(np.unique(versions).tolist())
    known = [policy for policy in served if policy[1] in found]
    incarnation = served[0][0] if served else 0
    known += [(incarnation, version) for version in found - {version for _, version in known}]
    return [list(policy) for policy in sorted(set(known))]


EvaluationKey = tuple[int, str, bool, int]


def evaluation_key(lease: m.EvaluationLease) -> EvaluationKey:
    """(version, set, whether greedy, number of its first prompt) of a part of an evaluation."""
    return lease.version, lease.set, lease.greedy, lease.first


class Leases:
    """Leases in progress and results without an acknowledgement."""

    def __init__(
        self, config: Config, generator: Generator, dealer: AsyncDealer, recorder: Recorder | None = None
    ) -> None:
        self._generator = generator
        self._recorder = recorder or Recorder.off()
        self._dealer = dealer
        self.served: list[tuple[int, int]] = []
        """(incarnation, version) of every policy that went live here, in order."""
        self.working: dict[LeaseKey, asyncio.Task[None]] = {}
        self.unacked: dict[LeaseKey, tuple[m.Group, float]] = {}
        self.evaluating: dict[EvaluationKey, tuple[str, asyncio.Task[None]]] = {}
        """What was asked for, and the work on it."""
        self._evaluated: dict[EvaluationKey, m.EvaluationResult] = {}
        """Results of evaluations that are not closed yet; a restarted replay gets them again."""
        self._reports = ProgressReports(config.rollout.group_size, partial_rollouts=config.replay.partial_rollouts)

    def take(self, lease: m.Lease, tasks: asyncio.TaskGroup) -> None:
        """Work on a lease, unless it was sent twice."""
        key = lease_key(lease)
        if key not in self.working and key not in self.unacked:
            self._reports.leased(lease)
            self.working[key] = tasks.create_task(self._work(lease, key))

    def cancel(self, message: m.Cancel) -> None:
        """Stop working on a lease; unknown ones are ignored."""
        if (key := lease_key(message)) in self.working:
            self._generator.abort(_request_id(key))

    def acked(self, ack: m.Ack) -> None:
        """Drop a group that replay has answered."""
        self.unacked.pop(lease_key(ack), None)
        if ack.status == "rejected":
            log.error("group (%d, %d) was rejected: %s", ack.pass_, ack.index, ack.reason)

    def evaluate(self, lease: m.EvaluationLease, tasks: asyncio.TaskGroup) -> None:
        """Run an evaluation, unless it runs already, or send what it came to; other prompts of before make way."""
        which = evaluation_key(lease)
        done, (asked, running) = self._evaluated.get(which), self.evaluating.get(which, ("", None))
        if done is not None and done.asked == lease.asked:
            tasks.create_task(self._dealer.send(done))
        elif running is None or asked != lease.asked:
            self._evaluated.pop(which, None)
            self._generator.engine.hold(lease.version)
            task = tasks.create_task(self._evaluate(lease, instead_of=running))
            self.evaluating[which] = lease.asked, task
            task.add_done_callback(partial(self._evaluation_ended, which))

    def _evaluation_ended(self, which: EvaluationKey, task: asyncio.Task[None]) -> None:
        if which in self.evaluating and self.evaluating[which][1] is task:
            del self.evaluating[which]

    async def close_evaluation(self, version: int) -> None:
        """End an evaluation, forget its results and let its version go.

        A learner that is restarted makes the version anew: what comes of the old one would be taken for the new one's.
        """
        for which in [which for which in self.evaluating if which[0] == version]:
            self.evaluating.pop(which)[1].cancel()
        self._evaluated = {which: result for which, result in self._evaluated.items() if which[0] != version}
        await self._generator.engine.unpin(version)

    def begin_again(self) -> None:
        """Forget what replay was sent: it may have restarted. Called before Hello."""
        self._reports.begin_again()

    async def send_again(self) -> None:
        """Send every result that replay has not acknowledged."""
        await self._resend(time.monotonic(), 0.0)
        for result in list(self._evaluated.values()):
            await self._dealer.send(result)

    async def renew(self, now: float, *, sampled: int) -> None:
        """Renew leases in progress; resend groups without an acknowledgement.

        `sampled` are the tokens that the engine has sampled so far.
        """
        if self.working:
            source, working = self._generator, [(key, _request_id(key)) for key in self.working]
            running, queued = source.running_tokens(), source.queued()
            await self._dealer.send(self._reports.renew(working, running, source, queued=queued, sampled=sampled))
        await self._resend(now, RESEND_S)

    async def _resend(self, now: float, older_than_s: float) -> None:
        for key, (group, sent) in list(self.unacked.items()):
            if now - sent >= older_than_s:
                self.unacked[key] = (group, now)
                await self._dealer.send(group)

    async def _work(self, lease: m.Lease, key: LeaseKey) -> None:
        first, began = max(0, len(self.served) - 1), now_ns()
        (pass_, index, attempt), outcome = key, "failed"
        parts: list[Part] = []
        try:
            group = await self._group(lease, key)
        except LeaseFailed as failed:
            await self._dealer.send(
                m.Cancel(pass_=pass_, index=index, attempt=attempt, reason=failed.reason, detail=failed.detail)
            )
        else:
            group = replace(group, policies=policies_of(group.versions, self.served[first:]))
            self.unacked[key] = (group, time.monotonic())
            outcome = f"{group.lengths.sum()} tokens"
            done = now_ns()
            sampled = min(done, began + to_ns(group.generate_s))
            parts = [("sample", began, sampled), ("score", sampled, done)]
            await self._dealer.send(group)
        finally:
            name, args = f"group {pass_}/{index}", {"attempt": attempt, "outcome": outcome}
            self._recorder.add("groups", name, began, now_ns(), at_once=True, parts=parts, **args)
            self.working.pop(key, None)

    async def _group(self, lease: m.Lease, key: LeaseKey) -> m.Group:
        """Generate the lease's group. A refused request fails the lease while the engine lives."""
        try:
            return await self._generator.group(lease, _request_id(key))
        except EngineError as error:
            await self._generator.engine.health()  # raises when the engine itself is dead
            raise LeaseFailed("engine_error", str(error)) from error

    async def _evaluate(self, lease: m.EvaluationLease, *, instead_of: asyncio.Task[None] | None) -> None:
        name = f"version {lease.version}, {len(lease.prompts)} prompts"
        if instead_of is not None:  # its requests have the same names
            instead_of.cancel()
            await asyncio.wait([instead_of])
        try:
            with self._recorder.span("evaluations", name, at_once=True):
                result = await self._generator.evaluation(lease)
        except (LeaseFailed, EngineError) as error:
            reason = f"set {lease.set!r}: {error}" if lease.set else str(error)
            log.error("evaluation of version %d failed: %s", lease.version, reason)
            await self._dealer.send(m.EvaluationFailed(version=lease.version, greedy=lease.greedy, reason=reason))
        else:
            self._evaluated[evaluation_key(lease)] = result
            await self._dealer.send(result)


def _request_id(key: LeaseKey) -> str:
    return f"{key[0]}/{key[1]}/{key[2]}"
