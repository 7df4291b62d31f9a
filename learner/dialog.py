"""One rank's dialog with replay: questions until they are answered, announcements that a restarted replay gets again.

A state machine without socket and clock: messages go in with the time, those for replay are in `outbox`. When messages
are sent again: replay/channel/delivery.py.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from configs.errors import SlipstreamError
from configs.schema import Config
from replay import messages as m
from replay.channel import ChannelError, Message, PeerRefused, Repeat

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""Messages are lost when replay is killed: a question, and the last commit, are sent again this often."""
Announcement = m.Committed | m.Published | m.Evaluate | m.Checkpointed | m.LowerLag


class RunEnded(SlipstreamError, RuntimeError, code="SLIP-RUN-02"):
    """Replay ended the run before the last step; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Evaluation results, and versions whose evaluation was closed, with the reason if that was too early."""

    results: list[m.EvaluationResult]
    closed: dict[int, str]


class Overdue(NamedTuple):
    """A wait that was too long: for what, how long, by which key, and in which symptom class."""

    what: str
    waited_s: float
    key: str
    symptom: str


class _Question(NamedTuple):
    message: Message
    answer: type[Message]
    what: str
    since: float
    repeat: Repeat

    def is_answered_by(self, message: Message) -> bool:
        """Whether this is the answer; to Take, of its step."""
        step = self.message.step if isinstance(self.message, m.Take) else None
        return isinstance(message, self.answer) and step in (None, getattr(message, "step", None))


class Dialog:
    """At most one question at a time, and what was announced."""

    def __init__(self, config: Config, rank: int, now: float) -> None:
        self.outbox: list[Message] = []
        """For replay, in order."""
        self.rank, self.incarnation = rank, 0
        self.inbox = Inbox([], {})
        self._deadline_s, self._silent_after_s = config.learner.batch_deadline_s, config.network.silent_after_s
        self._hello: m.Hello | None = None
        self._said: dict[tuple[type[Message], int], Message] = {}
        """Messages to repeat to a restarted replay; each of them may arrive twice."""
        self._question: _Question | None = None
        self.answer: Message | None = None
        """To the last question; None while it is open."""
        self._waiting_since = self._heard_at = now
        self._came_back_at = -math.inf
        self._blocked_at = -math.inf
        """When replay last said that it waits itself, and so answers nothing: deadlines count from then."""

    def ask(
        self, question: Message, answer: type[Message], what: str, now: float, *, since: float | None = None
    ) -> None:
        """Ask until an `answer` has come; the deadline counts from `since`, which is now if it is not given."""
        if isinstance(question, m.Hello):
            self._hello = question
        self.wait(now)  # silence counts from here: nothing was read before
        since, self.answer = now if since is None else since, None
        self._question = _Question(question, answer, what, since, Repeat(ASK_AGAIN_S))

    def take(self, step: int, now: float, *, have: bool = False, since: float | None = None) -> None:
        """Ask for this rank's part of a batch, or, once it holds that, for the word that all do."""
        what = f"batch {step} ({'other ranks have no part yet' if have else 'replay could not form it'})"
        take = m.Take(step=step, rank=self.rank, have=have)
        self.ask(take, m.Proceed if have else m.Batch, what, now, since=since)

    def wait(self, now: float) -> None:
        """Read from now on; silence before does not count."""
        self._waiting_since = now

    def advance(self, now: float) -> None:
        """Say what is due: the question, again and again, and with it the last commit, without which none comes."""
        asked = self._question
        if asked is None:
            return
        is_repeated = asked.repeat.asked
        if asked.repeat.due(now):
            if is_repeated and (m.Committed, -1) in self._said:
                self.outbox.append(self._said[m.Committed, -1])
            self.outbox.append(asked.message)

    def overdue(self, now: float, what: str = "") -> Overdue | None:
        """Replay is silent, or has no answer for too long; `what` else is waited for, without a question."""
        asked, silent = self._question, now - max(self._heard_at, self._waiting_since)
        if asked is not None and now - max(asked.since, self._blocked_at) >= self._deadline_s:
            return Overdue(asked.what, self._deadline_s, "learner.batch_deadline_s", "slow")
        if silent > self._silent_after_s:
            return Overdue(what if asked is None else asked.what, silent, "network.silent_after_s", "silent")
        return None

    def hear(self, message: Message, now: float) -> None:
        """React to one message; the answer to the question is `answer` then.

        Raises:
            RunEnded: replay gave the run up.
            ChannelError: replay refuses this rank.
        """
        self._heard_at, asked = now, self._question
        match message:
            case m.Refused(code="hello") if self._hello is not None:
                self._come_back(self._hello, now)
            case m.Refused(code="peer") if self.incarnation == 0:  # else another learner has taken its place
                raise PeerRefused(f"replay refused learner rank {self.rank}: {message.reason}", "closed")
            case m.Refused():
                raise ChannelError(f"replay refused learner rank {self.rank}: {message.reason}", "closed")
            case m.Goodbye():
                raise RunEnded(message.reason)
            case m.Heartbeat(blocked=blocked) if blocked:
                self._blocked_at = now
            case m.EvaluationResult():
                self.inbox.results.append(message)
            case m.EvaluationClosed():
                self.close_evaluation(message.version, message.reason)
            case m.Sent() if self._hello is not None and self._awaits_part(message.step):
                self._come_back(self._hello, now)
            case _ if asked is not None and asked.is_answered_by(message):
                self._question, self.answer = None, message
                if isinstance(message, m.Welcome):
                    self.incarnation = message.incarnation

    def announce(self, message: Announcement) -> None:
        """Send, and repeat to a restarted replay: the last of each kind, evaluations until they are closed (rank 0)."""
        self._said[type(message), message.version if isinstance(message, m.Evaluate) else -1] = message
        self.outbox.append(message)

    def oldest_evaluation(self) -> int | None:
        """The first version that was asked for and is not closed."""
        return min((version for kind, version in self._said if kind is m.Evaluate), default=None)

    def close_evaluation(self, version: int, reason: str) -> None:
        """Nothing more comes of the evaluation of this version."""
        self.inbox.closed[version] = reason
        self._said.pop((m.Evaluate, version), None)

    def _awaits_part(self, step: int) -> bool:
        """What replay sent before this word is not here, so it was lost."""
        asked = self._question.message if self._question is not None else None
        return isinstance(asked, m.Take) and not asked.have and asked.step == step

    def _come_back(self, hello: m.Hello, now: float) -> None:
        """Replay was restarted, took this rank for dead, or what it sent was lost: the same learner goes on.

        Replay refuses each beat of an update that goes on meanwhile: all of them together are answered once.
        """
        if now - self._came_back_at < ASK_AGAIN_S / 2:
            return
        self._came_back_at = now
        log.warning("learner rank %d says Hello to replay again", self.rank)
        self.outbox.append(replace(hello, incarnation=self.incarnation, cursor=None))
        self.outbox += self._said.values()
        if self._question is not None and not isinstance(self._question.message, m.Hello):
            self.outbox.append(self._question.message)
