"""The learner's end of the replay channel: batches in, commits out, evaluation results on the side.

Every wait has a deadline and says what it waits for; replay's heartbeats tell a slow batch from a dead replay.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from configs.schema import Config
from learner.advantages import leave_out_flat_groups
from learner.dialog import ASK_AGAIN_S, Announcement, Dialog, Inbox
from replay import messages as m
from replay.channel import ChannelError, Dealer, Message, Pulse, Repeat, WireError, load_keys
from slipstream.runtime import ending
from slipstream.runtime.hang import expired
from slipstream.runtime.trace import ClockProbe
from slipstream.runtime.vitals.watch import Vitals

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)

POLL_S = 0.2
CLOCK_QUESTIONS = 8


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
        self.dialog = Dialog(config, rank, time.monotonic())
        self._fingerprint = dict(fingerprint)
        limits = config.network.max_message_bytes
        identity = f"learner-{rank}.{secrets.token_hex(4)}"
        keys = load_keys(config.network.keys)
        self._dealer = Dealer(address, identity, m.FROM_REPLAY, keys=keys, max_message_bytes=limits)
        self._doing = "starting", time.monotonic()
        """What this rank does, and since when; an update may take longer than any deadline of its peers."""
        beat = lambda: self._alive() if self.incarnation else None  # noqa: E731 - a peer after Welcome, not before
        self._pulse = Pulse(address, self._dealer.route, beat, config.network.heartbeat_s, keys=keys)

    @property
    def incarnation(self) -> int:
        """Of this learner; 0 before Welcome."""
        return self.dialog.incarnation

    @property
    def inbox(self) -> Inbox:
        return self.dialog.inbox

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
            status = self._ask(m.StatusRequest(about="clock"), m.Status, "its clock")
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
        teacher_buses: Mapping[str, str] = MappingProxyType({}),
        cursor: dict[str, Any] | None,
        rolls_back: bool = False,
    ) -> m.Welcome:
        """Say Hello with the version and digest of this rank's weights, and wait for Welcome.

        Rank 0 gives the control addresses of its weight buses (of teachers by name) and, of a resumed learner, replay's
        state; `rolls_back` says that the steps after this version shall not be repeated.

        Raises:
            ChannelError: replay is silent for network.silent_after_s, or refuses this rank.
        """
        hello = m.Hello(
            role="learner",
            name=f"learner-{self.rank}",
            pid=os.getpid(),
            host=socket.gethostname(),
            rank=self.rank,
            world_size=self.config.num_learner_ranks,
            fingerprint=self._fingerprint,
            bus_address=bus_address,
            teacher_buses=dict(teacher_buses),
            version=version,
            digest=digest,
            cursor=cursor,
            rolls_back=rolls_back,
            leaves_out_flat_groups=not self.config.learner.facts.from_data
            and leave_out_flat_groups(self.config.algorithm),
        )
        return self._ask(hello, m.Welcome, "Welcome")

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
        self._doing, ending.step = (f"waiting for batch {step}", since), step
        self._say_alive()
        self.dialog.take(step, since)
        batch = self._answer(m.Batch)
        check(batch)
        self.dialog.take(step, time.monotonic(), have=True, since=since)
        self._answer(m.Proceed)
        self._doing = f"training step {step}", time.monotonic()
        return batch

    def announce(self, message: Announcement) -> None:
        """Send, and repeat to a restarted replay: the last of each kind, evaluations until they are closed (rank 0)."""
        self.dialog.announce(message)
        self._flush()

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
        while self._poll(0):
            pass

    def wait_for_evaluations(self, deadline_s: float) -> None:
        """Wait until every evaluation that was asked for is closed, with all that came of it; expiry closes the rest.

        The last version's need not be the last to end: several servers evaluate, each a version of its own.
        """
        deadline, beat = time.monotonic() + deadline_s, Repeat(ASK_AGAIN_S)
        self.dialog.wait(time.monotonic())
        while (version := self.dialog.oldest_evaluation()) is not None:
            what = f"the evaluation of version {version}"
            if (now := time.monotonic()) < deadline:
                if beat.due(now):
                    self._say_alive()
                self._poll(POLL_S)
                self._check(what)
                continue
            said = expired(what, owed_by=("replay",), waited_s=deadline_s, key="evaluation.deadline_s", ends=False)
            log.error("%s did not come within %g s (evaluation.deadline_s)%s [slow]", what, deadline_s, said)
            self.dialog.close_evaluation(version, f"not done within {deadline_s:g} s")

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

    def _ask(self, question: Message, kind: type[Answer], what: str) -> Answer:
        """The answer to a question that may be asked twice.

        A replay that has been started again reads its journal first, or waits for the journal's disk: it says that it
        lives and answers later. Raises as `_answer`.
        """
        self.dialog.ask(question, kind, what, time.monotonic())
        return self._answer(kind)

    def _answer(self, kind: type[Answer]) -> Answer:
        """The answer to what was asked.

        Raises:
            ChannelError: replay is silent for network.silent_after_s, or gives none for learner.batch_deadline_s.
        """
        while True:
            self.dialog.advance(time.monotonic())
            self._flush()
            self._poll(POLL_S)
            if isinstance(answer := self.dialog.answer, kind):
                return answer
            self._check()

    def _poll(self, timeout_s: float) -> bool:
        """Hear the next message; whether one came within the time."""
        try:
            envelope = self._dealer.poll(timeout_s)
        except WireError as error:  # it is no sign of this run's replay
            log.warning("learner rank %d refuses a message of replay: %s [corrupt]", self.rank, error)
            return True
        if envelope is not None:
            self.dialog.hear(envelope.message, time.monotonic())
            self._flush()
        return envelope is not None

    def _check(self, what: str = "") -> None:
        """Raises ChannelError: this wait is too long."""
        if (late := self.dialog.overdue(time.monotonic(), what)) is None:
            return
        said = expired(late.what, owed_by=("replay",), waited_s=late.waited_s, key=late.key)
        if late.symptom == "silent":
            waits = (
                f"waits for {late.what}, but replay at {self._dealer.address} was last heard {late.waited_s:.1f} s ago"
            )
        else:
            waits = f"waited {late.waited_s:g} s for {late.what} of replay at {self._dealer.address}"
        raise ChannelError(f"learner rank {self.rank} {waits} ({late.key}){said}", late.symptom)

    def _flush(self) -> None:
        while self.dialog.outbox:
            self._dealer.send(self.dialog.outbox.pop(0))
