"""The learner's end of the replay channel: batches in, commits out, evaluation results on the side.

Every wait has a deadline and says what it waits for; replay's heartbeats tell a slow batch from a dead replay.
"""

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from configs.errors import SlipstreamError
from configs.schema import Config
from replay import messages as m
from replay.channel import ChannelError, Dealer, Limits, Message, Pulse, WireError, load_keys
from replay.hang import expired
from replay.trace import ClockProbe
from replay.vitals.watch import Vitals

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)

POLL_S = 0.2
ASK_AGAIN_S = 2.0
"""Messages are lost when replay is killed: a question, and the last commit, are sent again this often."""
CLOCK_QUESTIONS = 8


class RunEnded(
    SlipstreamError,
    RuntimeError,
    code="SLIP-RUN-02",
    cause="Replay ended the run; the message has its reason.",
    mend="Look up the reason; --resume goes on from the newest checkpoint once it is mended.",
):
    """Replay ended the run before the last step; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Evaluation results, and versions whose evaluation was closed, with the reason if that was too early."""

    results: list[m.EvaluationResult]
    closed: dict[int, str]


class BatchReader:
    """One rank's DEALER to replay."""

    def __init__(
        self,
        config: Config,
        address: str,
        *,
        rank: int,
        fingerprint: Mapping[str, str],
        vitals: Vitals | None = None,
    ) -> None:
        self.config = config
        self.vitals = vitals
        """The watch of this process; its gauges go to replay with every batch that is asked for."""
        self.rank = rank
        self.incarnation = 0
        self.inbox = Inbox([], {})
        self._fingerprint = dict(fingerprint)
        self._hello: m.Hello | None = None
        self._said: dict[tuple[type[Message], int], Message] = {}
        """Messages to repeat to a restarted replay; each of them may arrive twice."""
        self._waiting_since = time.monotonic()
        limits = Limits(config.network.max_message_bytes)
        identity = f"learner-{rank}.{secrets.token_hex(4)}"
        keys = load_keys(config.network.keys)
        self._dealer = Dealer(address, identity, m.FROM_REPLAY, limits, keys=keys)
        self._doing = "starting", time.monotonic()
        """What this rank does, and since when; an update may take longer than any deadline of its peers."""
        beat = lambda: self._alive() if self.incarnation else None  # noqa: E731 - a peer after Welcome, not before
        self._pulse = Pulse(address, self._dealer.route, beat, config.network.heartbeat_s, keys=keys)
        self._came_back_at = -math.inf

    def connect(self) -> tuple[str, int]:
        """Ask replay for (run id, incarnation of the last learner).

        Raises:
            ChannelError: replay is silent for network.silent_after_s.
        """
        status = self._ask(m.StatusRequest(), m.Status, "its status")
        return self._dealer.run_id, int(status.state["incarnation"])

    def clock(self) -> ClockProbe:
        """How far replay's clock is ahead. Raises ChannelError when replay is silent."""
        probe = ClockProbe()
        for _ in range(CLOCK_QUESTIONS):
            asked = time.monotonic()
            probe.ask(time.time())
            status = self._ask(m.StatusRequest(), m.Status, "its clock")
            probe.answer(float(status.state.get("unix_s", 0.0)), time.time())
            if time.monotonic() - asked > ASK_AGAIN_S:  # asked twice: the next answer may be that of this question
                break
        return probe

    def join(
        self,
        *,
        version: int,
        digest: str,
        bus_address: str | None,
        cursor: dict[str, Any] | None,
        rolls_back: bool = False,
    ) -> m.Welcome:
        """Say Hello with the version and digest of this rank's weights, and wait for Welcome.

        Rank 0 gives the control address of the weight bus and, of a resumed learner, replay's state; `rolls_back` says
        that the steps after this version shall not be repeated.

        Raises:
            ChannelError: replay is silent for network.silent_after_s, or refuses this rank.
        """
        self._hello = m.Hello(
            role="learner",
            name=f"learner-{self.rank}",
            pid=os.getpid(),
            host=socket.gethostname(),
            rank=self.rank,
            world_size=self.config.num_learner_ranks,
            fingerprint=self._fingerprint,
            bus_address=bus_address,
            version=version,
            digest=digest,
            cursor=cursor,
            rolls_back=rolls_back,
        )
        welcome = self._ask(self._hello, m.Welcome, "Welcome")
        self.incarnation = welcome.incarnation
        return welcome

    def take(self, step: int, check: Callable[[m.Batch], None]) -> m.Batch:
        """This rank's part of batch `step`, once all ranks hold theirs (invariant 9).

        Args:
            step: that the batch is for.
            check: raises what is wrong with the part. It runs before this rank says that it holds it: as soon as all
                do, they enter collectives, and a rank that fails there leaves the others waiting.

        Raises:
            ChannelError: nothing within learner.batch_deadline_s, or replay is silent.
            RunEnded: replay gave the run up.
        """
        since = time.monotonic()
        self._doing = f"waiting for batch {step}", since
        self._say_alive()
        take = m.Take(step=step, rank=self.rank, have=False)
        batch = self._ask(take, m.Batch, f"batch {step} (replay could not form it)", since=since)
        check(batch)
        self._ask(replace(take, have=True), m.Proceed, f"batch {step} (other ranks have no part yet)", since=since)
        self._doing = f"training step {step}", time.monotonic()
        return batch

    def announce(self, message: m.Committed | m.Published | m.Evaluate | m.Checkpointed | m.LowerLag) -> None:
        """Send, and repeat to a restarted replay: the last of each kind, evaluations until they are closed (rank 0)."""
        self._said[type(message), message.version if isinstance(message, m.Evaluate) else -1] = message
        self._dealer.send(message)

    def cursor(self, step: int) -> dict[str, Any]:
        """Replay's state for a checkpoint (rank 0). Raises ChannelError when replay is silent."""
        return self._ask(m.CursorRequest(step=step), m.Cursor, f"the cursor of step {step}").state

    def heartbeat(self) -> None:
        """Show replay that this rank lives, while it waits for something else than replay; reads what has arrived.

        Raises RunEnded: replay gave the run up meanwhile.
        """
        self._say_alive()
        self.drain()

    def drain(self) -> None:
        """Read what has arrived, without waiting."""
        while True:
            try:
                envelope = self._dealer.poll(0)
            except WireError as error:
                log.warning("learner rank %d refuses a message of replay: %s [corrupt]", self.rank, error)
                continue
            if envelope is None:
                return
            self._aside(envelope.message)

    def wait_for_evaluations(self, deadline_s: float) -> None:
        """Wait until every evaluation that was asked for is closed, with all that came of it; expiry closes the rest.

        The last version's need not be the last to end: several servers evaluate, each a version of its own.
        """
        self._waiting_since = time.monotonic()
        while (version := min((v for kind, v in self._said if kind is m.Evaluate), default=None)) is not None:
            self._wait_for_evaluation(version, deadline_s)
            self._said.pop((m.Evaluate, version), None)

    def _wait_for_evaluation(self, version: int, deadline_s: float) -> None:
        """Until `deadline_s` after the wait for all of them began."""
        deadline, beat_at = self._waiting_since + deadline_s, 0.0
        while (now := time.monotonic()) < deadline:
            if version in self.inbox.closed:
                return
            if now > beat_at:
                self._say_alive()
                beat_at = now + ASK_AGAIN_S
            self._next(f"the evaluation of version {version}")
        what, key = f"the evaluation of version {version}", "evaluation.deadline_s"
        said = expired(what, owed_by=("replay",), waited_s=deadline_s, key=key, ends=False)
        log.error("%s did not come within %g s (%s)%s [slow]", what, deadline_s, key, said)
        self.inbox.closed[version] = f"not done within {deadline_s:g} s"

    def abandon(self) -> None:
        """Close without Goodbye, so that a restarted rank can continue the run."""
        self._pulse.close()
        self._dealer.close()

    def close(self, reason: str, *, failed: bool) -> None:
        """Say Goodbye; rank 0's ends the run."""
        self._pulse.close()
        self._dealer.send(m.Goodbye(reason=reason, failed=failed))
        self._dealer.close()

    def _say_alive(self) -> None:
        self._dealer.send(replace(self._alive(), gauges=self.vitals.gauges() if self.vitals is not None else {}))

    def _alive(self) -> m.Heartbeat:
        """Also called in the thread of the pulse."""
        activity, since = self._doing
        return m.Heartbeat(activity=activity, since_s=time.monotonic() - since)

    def _next(self, what: str) -> Message | None:
        """The caller's next message, or None after POLL_S; evaluations go to the inbox."""
        try:
            envelope = self._dealer.poll(POLL_S)
        except WireError as error:
            log.warning("learner rank %d refuses a message of replay: %s [corrupt]", self.rank, error)
            envelope = None  # it is no sign of this run's replay
        silent = time.monotonic() - max(self._dealer.last_heard, self._waiting_since)
        if envelope is None:
            if silent > self.config.network.silent_after_s:
                key = "network.silent_after_s"
                raise ChannelError(
                    f"learner rank {self.rank} waits for {what}, but replay at {self._dealer.address} was last heard"
                    f" {silent:.1f} s ago ({key}){expired(what, owed_by=('replay',), waited_s=silent, key=key)}",
                    "silent",
                )
            return None
        return self._aside(envelope.message)

    def _aside(self, message: Message) -> Message | None:
        match message:
            case m.Refused(code="hello") if self._hello is not None:
                self._come_back(self._hello)
            case m.Refused():
                raise ChannelError(f"replay refused learner rank {self.rank}: {message.reason}", "closed")
            case m.Goodbye():
                raise RunEnded(message.reason)
            case m.EvaluationResult():
                self.inbox.results.append(message)
            case m.EvaluationClosed():
                self.inbox.closed[message.version] = message.reason
                self._said.pop((m.Evaluate, message.version), None)
            case m.Heartbeat():
                pass
            case _:
                return message
        return None

    def _come_back(self, hello: m.Hello) -> None:
        """Replay was restarted, or took this rank for dead: the same learner goes on.

        Replay refuses each beat of an update that goes on meanwhile: all of them together are answered once.
        """
        if (now := time.monotonic()) - self._came_back_at < ASK_AGAIN_S / 2:
            return
        self._came_back_at = now
        log.warning("learner rank %d says Hello to replay again", self.rank)
        self._dealer.send(replace(hello, incarnation=self.incarnation, cursor=None))
        for message in self._said.values():
            self._dealer.send(message)

    def _ask(self, question: Message, kind: type[Answer], what: str, *, since: float | None = None) -> Answer:
        """The answer to a question that may be asked twice; to Take, that of its step.

        A replay that has been started again reads its journal first, or waits for the journal's disk: it says that it
        lives and answers later.

        Raises:
            ChannelError: replay is silent for network.silent_after_s, or gives no answer for learner.batch_deadline_s
                after `since`, which is now if it is not given.
        """
        self._waiting_since = time.monotonic()  # silence counts from here: the socket was not read before
        deadline_s = self.config.learner.batch_deadline_s
        step = question.step if isinstance(question, m.Take) else None
        ask_at = 0.0
        while (now := time.monotonic()) < (since or self._waiting_since) + deadline_s:
            if now > ask_at:
                if ask_at and (m.Committed, -1) in self._said:
                    self._dealer.send(self._said[m.Committed, -1])
                self._dealer.send(question)
                ask_at = now + ASK_AGAIN_S
            message = self._next(what)
            if isinstance(message, kind) and step in (None, getattr(message, "step", None)):
                return message
        key = "learner.batch_deadline_s"
        raise ChannelError(
            f"replay at {self._dealer.address}: learner rank {self.rank} waited {deadline_s:g} s for {what} ({key})"
            f"{expired(what, owed_by=('replay',), waited_s=deadline_s, key=key)}",
            "slow",
        )
