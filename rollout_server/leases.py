"""The rollout server's end of the replay channel: what it holds, what it is asked for, what it owes.

A state machine without socket and clock: messages and what came of the work go in, with the time; messages for replay
are in `outbox`, and decisions go to `Jobs`. When messages are sent again: replay/channel/delivery.py.
"""

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from configs.errors import SlipstreamError
from configs.schema import Config
from replay import messages as m
from replay.channel import ChannelError, Message, PeerRefused, Repeat
from rollout_server.progress import LeaseKey, ProgressReports, ProgressSource, lease_key

log = logging.getLogger(__name__)

WELCOME_BEATS = 2.0
"""Heartbeats after which Hello is repeated without a Welcome that names the bus's address."""
EvaluationKey = tuple[int, str, bool, int]


class GoodbyeReceived(Exception):
    """Replay said Goodbye. `failed` tells how the run ended."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


class Jobs(Protocol):
    """Carries out what was decided. What comes of a lease is told by `finish` or `give_up`."""

    def begin(self, lease: m.Lease) -> None:
        """Generate and score the group of a lease."""

    def abort(self, key: LeaseKey) -> None:
        """End the work on a lease, which is then given up."""

    def evaluate(self, lease: m.EvaluationLease) -> None:
        """Do a part of an evaluation; work on other prompts of the same part ends first."""

    def stop(self, part: EvaluationKey) -> None:
        """End the work on a part of an evaluation; nothing comes of it."""

    def let_go(self, version: int) -> None:
        """Keep the weights of a version no longer."""

    def follow(self, address: str) -> None:
        """Take weights from the bus at this address."""


class Working(ProgressSource, Protocol):
    """What is known of running requests, by name."""

    def running_tokens(self) -> Mapping[str, int]: ...

    def queued(self) -> Container[str]: ...


class HeldLeases:
    """Leases and evaluations in progress, and their results until replay has them.

    `hello` introduces this server.
    """

    def __init__(self, config: Config, hello: m.Hello, jobs: Jobs) -> None:
        self.outbox: list[Message] = []
        """For replay, in order."""
        self.version: int | None = None
        """Version that is live and proven; None while no lease may be asked for."""
        self.incarnation = 0
        """Of the learner that made it."""
        self.served: list[tuple[int, int]] = []
        """(incarnation, version) of every policy that went live here, in order."""
        self.working: dict[LeaseKey, int] = {}
        """Leases in progress, with the position in `served` of the policy that was live first."""
        self.unacked: dict[LeaseKey, m.Group] = {}
        self.evaluating: dict[EvaluationKey, str] = {}
        """Parts of evaluations in progress, and what was asked for."""
        self.evaluated: dict[EvaluationKey, m.EvaluationResult] = {}
        """Results of evaluations that are not closed yet."""
        self.activity, self.activity_since = "joining", 0.0
        self.is_dark = False
        """Whether the engine is quarantined."""
        self._hello, self._jobs, self._capacity = hello, jobs, config.lease_capacity
        self._joining: Repeat | None = None
        """Until a Welcome with the bus's address has come."""
        self._hello_every_s = WELCOME_BEATS * config.network.heartbeat_s
        self._reports = ProgressReports(config.rollout.group_size, partial_rollouts=config.replay.partial_rollouts)

    def join(self, now: float) -> None:
        """Say Hello. The next beat tells what is held here: replay may have restarted."""
        self._joining = Repeat(self._hello_every_s)
        self._joining.due(now)
        self._reports.begin_again()
        self.outbox.append(self._hello)
        self._ask(self._capacity)

    def hear(self, message: Message, now: float) -> None:
        """React to one message. Raises GoodbyeReceived on Goodbye, ChannelError when replay refuses this server."""
        match message:
            case m.Welcome() if message.bus_address is not None:
                self._joining = None
                self._jobs.follow(message.bus_address)
            case m.Welcome():
                self.now_at("waiting for the learner", now)
            case m.Lease():
                self._take(message)
            case m.Cancel() if (key := lease_key(message)) in self.working:
                self._jobs.abort(key)
            case m.Ack():
                self._acked(message)
            case m.EvaluationLease():
                self._evaluate(message)
            case m.EvaluationClosed():
                self.close_evaluation(message.version)
            case m.Refused(code="hello"):
                self.join(now)
            case m.Refused(code="peer"):
                raise PeerRefused(f"replay refused {self._hello.name!r}: {message.reason}", "closed")
            case m.Refused():
                raise ChannelError(f"replay refused {self._hello.name!r}: {message.reason}", "closed")
            case m.Goodbye():
                raise GoodbyeReceived(message.reason, message.failed)

    def beat(self, now: float, gauges: dict[str, float], work: Working, *, sampled: int) -> None:
        """Say everything that may have been lost: the standing wish, and all that is held here.

        `sampled` are the tokens that the engine has sampled so far.
        """
        self.outbox.append(self.alive(now, gauges))
        if self._joining is not None and self._joining.due(now):
            self.join(now)
        else:
            self._ask(self._capacity)
        working = [(key, request_id(key)) for key in self.working]
        renew = self._reports.renew(working, work.running_tokens(), work, queued=work.queued(), sampled=sampled)
        parts: list[list[int | str | bool]] = [[*part, False] for part in self.evaluating]
        parts += [[*part, True] for part in self.evaluated]
        self.outbox.append(replace(renew, finished=[list(key) for key in self.unacked], evaluations=parts))

    def tell(self, work: Working) -> None:
        """Say all that running answers have got: this server is about to leave."""
        working = [(key, request_id(key)) for key in self.working]
        self.outbox += self._reports.rest(working, work.running_tokens(), work)

    def hand_back(self, work: Working) -> tuple[int, int]:
        """Leave: other servers go on from what is told here; how many answers and tokens that is."""
        self.tell(work)
        self.outbox.append(m.Goodbye(reason="stopped by signal"))
        return self._reports.told()

    def alive(self, now: float, gauges: dict[str, float]) -> m.Heartbeat:
        """What this server does; also called in the thread of the pulse."""
        since_s, blocked = now - self.activity_since, "quarantined" if self.is_dark else ""
        return m.Heartbeat(activity=self.activity, since_s=since_s, gauges=gauges, blocked=blocked)

    def went_live(self, version: int, incarnation: int) -> None:
        """The engine serves a proven version. The next incarnation's takes the place of all from it on.

        What comes of the old ones would be taken for the new ones', and the word that they are lost may be lost.
        """
        if incarnation != self.incarnation:
            self._forget([part for part in (*self.evaluating, *self.evaluated) if part[0] >= version])
        self.version, self.incarnation, self.is_dark = version, incarnation, False
        self.served.append((incarnation, version))
        self._ask(self._capacity)

    def went_dark(self, reason: str, now: float) -> None:
        """A quarantined engine takes no lease until a refill has been proven."""
        self._ask(0)
        self.version, self.is_dark = None, True
        self.now_at(f"quarantined: {reason}", now)

    def now_at(self, activity: str, now: float) -> None:
        """What the server does, in words."""
        if activity != self.activity:
            self.activity, self.activity_since = activity, now

    def finish(self, group: m.Group) -> None:
        """The group of a lease is there."""
        key = lease_key(group)
        first = self.working.pop(key)
        self.unacked[key] = replace(group, policies=policies_of(group.versions, self.served[first:]))
        self.outbox.append(self.unacked[key])

    def give_up(self, key: LeaseKey, reason: str, detail: str) -> None:
        """A lease cannot be finished here."""
        del self.working[key]
        pass_, index, attempt = key
        self.outbox.append(m.Cancel(pass_=pass_, index=index, attempt=attempt, reason=reason, detail=detail))

    def evaluated_part(self, result: m.EvaluationResult) -> None:
        """A part of an evaluation is done."""
        which = evaluation_key(result)
        del self.evaluating[which]
        self.evaluated[which] = result
        self.outbox.append(result)

    def failed_part(self, lease: m.EvaluationLease, error: SlipstreamError) -> None:
        """A part of an evaluation cannot be done here."""
        del self.evaluating[evaluation_key(lease)]
        reason = f"set {lease.set!r}: {error}" if lease.set else str(error)
        log.error("evaluation of version %d failed: %s", lease.version, reason)
        self.outbox.append(m.EvaluationFailed(version=lease.version, reason=reason))

    def close_evaluation(self, version: int) -> None:
        """End an evaluation, forget its results and let its version go."""
        self._forget([part for part in (*self.evaluating, *self.evaluated) if part[0] == version])
        self._jobs.let_go(version)

    def _forget(self, parts: Sequence[EvaluationKey]) -> None:
        for part in parts:
            self.evaluated.pop(part, None)
            if self.evaluating.pop(part, None) is not None:
                self._jobs.stop(part)

    def _ask(self, capacity: int) -> None:
        """Ask for so many leases, if there is a version to start them with."""
        if self.version is not None:
            wish = m.LeaseRequest(capacity=capacity, version=self.version, incarnation=self.incarnation)
            self.outbox.append(wish)

    def _take(self, lease: m.Lease) -> None:
        """Work on a lease, unless it was sent twice."""
        key = lease_key(lease)
        if key not in self.working and key not in self.unacked:
            self._reports.leased(lease)
            self.working[key] = max(0, len(self.served) - 1)
            self._jobs.begin(lease)

    def _acked(self, ack: m.Ack) -> None:
        """Drop a group that replay has answered, or send it again."""
        group = self.unacked.pop(key := lease_key(ack), None)
        if ack.status == "missing" and group is not None:
            self.unacked[key] = group
            self.outbox.append(group)
        if ack.status == "rejected":
            log.error("group (%d, %d) was rejected: %s", ack.pass_, ack.index, ack.reason)

    def _evaluate(self, lease: m.EvaluationLease) -> None:
        """Begin a part, unless it runs already, or send what it came to; other prompts of before make way."""
        which = evaluation_key(lease)
        done = self.evaluated.get(which)
        if done is not None and done.asked == lease.asked:
            self.outbox.append(done)
        elif self.evaluating.get(which) != lease.asked:
            self.evaluated.pop(which, None)
            self.evaluating[which] = lease.asked
            self._jobs.evaluate(lease)


def policies_of(versions: m.Int32, served: Sequence[tuple[int, int]]) -> list[list[int]]:
    """[incarnation, version] of each policy that may have sampled tokens of these versions.

    `served` are the policies that were live from the lease on, in order; a prefix is of the first one's line.
    """
    found = set(np.unique(versions).tolist())
    known = [policy for policy in served if policy[1] in found]
    incarnation = served[0][0] if served else 0
    known += [(incarnation, version) for version in found - {version for _, version in known}]
    return [list(policy) for policy in sorted(set(known))]


def evaluation_key(message: m.OfPart) -> EvaluationKey:
    """(version, set, whether greedy, number of its first prompt) of a part of an evaluation."""
    return message.version, message.set, message.greedy, message.first


def request_id(key: LeaseKey) -> str:
    """The name under which the engine knows a lease."""
    return f"{key[0]}/{key[1]}/{key[2]}"
