"""A subscriber's end of the control plane: sessions, epochs, versions that arrive, are applied and proven.

A state machine without socket and clock: messages of the publisher go in with the time, answers are in `outbox`. The
data plane and the engine are called from inside `hear`, which blocks in broadcasts and loads for as long as these do.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from configs.infrastructure import WeightBus
from replay.channel import Message, WireError
from weight_bus import messages as m
from weight_bus.digest import combined
from weight_bus.errors import BusClosed, RemovedFromBus, TransportError, WeightBusError
from weight_bus.intake import Intake, Load
from weight_bus.remote import RemoteIntake

log = logging.getLogger(__name__)

SILENT_BEATS = 3
MAX_NAMED = 16
JOIN_AGAIN_BEATS = 10
NOTHING = (-1, -1, "")

Activate = Callable[[int, bool], None]  # (version, evaluate): the engine verifiably holds this version and may serve it
OnSilence = Callable[[str, float], str]
"""(what is waited for, seconds): the publisher is silent past weight_bus.deadline_s; what to add to the log."""
Quarantine = Callable[[int, str], None]
"""(version, reason): the engine holds something else and must not serve; a refill follows."""
Busy = Callable[[], tuple[float, str] | None]
"""Why the engine takes no version now (an evaluation of the present one), and for how many seconds at most."""


def never() -> None:
    """The engine takes any version at once."""


class EngineCallbacks(NamedTuple):
    """What is done with a version."""

    load: Load
    activate: Activate
    quarantine: Quarantine
    busy: Busy = never


class Subscription:
    """What one subscriber knows of its publisher.

    Args:
        join: introduces it; session, version, digest and facts are filled in.
        on_silence: as in `Subscriber`.
    """

    def __init__(
        self,
        address: str,
        join: m.Join,
        config: WeightBus,
        intake: Intake | RemoteIntake,
        on_silence: OnSilence,
        now: float,
    ) -> None:
        self.address, self.name = address, join.name
        self.outbox: list[Message] = []
        """For the publisher, in order."""
        self.incarnation = 0
        """Of the learner that admitted this subscriber last."""
        self.session, self.admitted = "", False
        """The session that was asked for, and whether the publisher has welcomed it: then it has to beat."""
        self.epoch = 0
        self._join, self._config, self._intake, self._on_silence = join, config, intake, on_silence
        self._sessions = 0
        self._held = NOTHING  # (incarnation, version, digest) that the engine verifiably holds
        self._coming: list[m.Begin] = []
        """What has been announced of a version, which comes as several lanes."""
        self._staged: m.Begin | None = None
        """The version that has arrived, proven, and waits for a decision."""
        self._due: tuple[m.Begin, m.Commit] | None = None
        """The version that is staged, decided on, and waits for the engine."""
        self._is_announced = False
        """Whether the publisher knows that it waits."""
        self._busy_since: float | None = None
        """Since when the engine has taken no version."""
        self._engaged: m.Commit | None = None
        """What the engine is loading at this moment."""
        self._heard_at, self._joined_at = now, -math.inf
        self._silent = self._overdue = False

    @property
    def version(self) -> int:
        """Version that the engine verifiably holds, -1 for none."""
        return self._held[1]

    @property
    def expected(self) -> Mapping[str, int]:
        """See `Subscriber.expected`."""
        return self._intake.manifest.digests

    def hold(self, limit_s: float, reason: str) -> None:
        """See `Subscriber.hold`."""
        if self._engaged is None:
            raise WeightBusError("hold() is for the load callback: nothing is being applied")
        self._answer(m.Holding, self._engaged, limit_s=float(limit_s), reason=reason)

    def advance(self, now: float) -> None:
        """Ask for a session while there is none. The request outlives a lost connection, so seldom is enough."""
        if self.admitted or now - self._joined_at < JOIN_AGAIN_BEATS * self._config.heartbeat_s:
            return
        if not self.session:
            self._sessions += 1
            self.session = f"{self._join.instance}-{self._sessions}"
        # a policy is (incarnation, version), whatever its weights are
        _, version, digest = self._held if self._held[0] == self.incarnation else NOTHING
        facts = self._intake.facts
        self.outbox.append(replace(self._join, session=self.session, version=version, digest=digest, facts=facts))
        self._joined_at = now

    def watch(self, now: float, *, heard: bool, entered: float) -> None:
        """Log once when the publisher falls silent, once past the deadline, and once when it is back.

        Only this wait, which was entered then, counts as silence.
        """
        if heard:
            if self._silent:
                log.info("weight bus: %r hears the publisher %s again", self.name, self.address)
            self._heard_at, self._silent, self._overdue = now, False, False
            return
        quiet = now - max(self._heard_at, entered)
        if quiet > SILENT_BEATS * self._config.heartbeat_s and not self._silent:
            self._silent = True
            silence = f"last heard {now - self._heard_at:.1f} s ago, holds v{self.version} [silent]; keeps trying"
            log.warning("weight bus: %r waits for the publisher %s, %s", self.name, self.address, silence)
        if quiet > self._config.deadline_s and not self._overdue:
            self._overdue = True
            said = self._on_silence(f"a sign of the publisher {self.address}", quiet)
            log.warning(
                "weight bus: %r has waited %.1f s for publisher %s (weight_bus.deadline_s)%s [silent]; keeps trying",
                self.name, quiet, self.address, said,
            )  # fmt: skip

    @property
    def is_due(self) -> bool:
        """Whether a version waits for the engine."""
        return self._due is not None

    def hear(self, message: Message) -> None:
        """React to one message.

        Raises:
            BusClosed: the publisher said goodbye.
            RemovedFromBus: the publisher gave this subscriber up, or is of an older learner.
        """
        if isinstance(message, m.InSession) and message.session != self.session:
            return
        match message:
            case m.NewLayout():
                self._learn(message)
            case m.Begin() if rank := message.ranks.get(self.session):
                mine = replace(message, ranks={self.session: rank})
                if self._expected(mine) and self._is_whole(mine):
                    self._receive(sorted(self._coming, key=lambda begin: begin.lane))
            case m.Welcome():
                self._welcome(message)
            case m.Epoch():
                self._forget()
                self.epoch = message.epoch
                self.outbox.append(m.EpochReady(session=self.session, epoch=message.epoch))
            case m.Commit():
                self._commit(message)
            case m.Abort():
                self._decided(message)
                log.info("weight bus: %r: v%d was called off: %s", self.name, message.version, message.reason)
            case m.Removed():
                self._removed(message)
            case m.Goodbye():
                raise BusClosed(f"the publisher {self.address} said goodbye: {message.reason}")

    def _welcome(self, welcome: m.Welcome) -> None:
        if welcome.incarnation < self.incarnation:
            reason = f"publisher {self.address} is of incarnation {welcome.incarnation}, not {self.incarnation}"
            raise RemovedFromBus(f"{reason}: an older learner still runs there")
        claimed, self.incarnation = self._held[0] == self.incarnation, welcome.incarnation
        if claimed and self._held[0] != welcome.incarnation and self.version == welcome.version:
            # the next incarnation may have taken what Join claims to hold for its own version: join without the claim
            self.outbox.append(m.Goodbye(session=self.session, reason="what it holds is of an earlier incarnation"))
            self.session, self._joined_at = "", -math.inf
            return
        self.admitted = True

    def _removed(self, removed: m.Removed) -> None:
        self.session, self.admitted = "", False
        self._joined_at = -math.inf
        self._forget()
        if not removed.rejoin:
            raise RemovedFromBus(f"subscriber {self.name!r} was removed by {self.address}: {removed.reason}")
        log.warning("weight bus: %r was removed (%s); joins anew with v%d", self.name, removed.reason, self.version)

    def _forget(self) -> None:
        self._staged = self._due = None
        self._coming = []
        self._intake.forget()

    def _learn(self, new: m.NewLayout) -> None:
        try:
            self._intake.learn(new)
        except WireError as error:
            log.warning("weight bus: %r refused a layout of %s: %s", self.name, self.address, error)

    def _is_whole(self, begin: m.Begin) -> bool:
        """Whether every lane of the version has been announced."""
        its = (begin.epoch, begin.version, begin.lanes)  # any other was called off before all of it was there
        others = [one for one in self._coming if (one.epoch, one.version, one.lanes) == its and one.lane != begin.lane]
        self._coming = [*others, begin]
        return len(self._coming) == begin.lanes

    def _receive(self, begins: Sequence[m.Begin]) -> None:
        self._staged = self._due = None
        self._coming, begin = [], begins[0]
        try:
            corrupt = self._intake.take(*begins)
        except (TransportError, WireError) as error:
            log.warning("weight bus: %r: v%d did not arrive: %s", self.name, begin.version, error)
            self._forget()
            self._answer(m.ReceiveFailed, begin, reason=str(error))
            return
        if not corrupt:
            self._staged = begin
        else:
            log.warning("weight bus: %r: v%d arrived with corrupt tensors %s", self.name, begin.version, corrupt[:5])
        seconds = self._intake.seconds
        self._answer(m.Staged, begin, corrupt=corrupt[:MAX_NAMED], wire_s=seconds["wire"], verify_s=seconds["verify"])

    def _answer(self, kind: Callable[..., Message], about: m.Begin | m.Commit, **fields: Any) -> None:
        """Tell the publisher what became of a version."""
        self.outbox.append(kind(session=self.session, epoch=about.epoch, version=about.version, **fields))

    def _expected(self, begin: m.Begin) -> bool:
        """Whether a Begin is of the epoch that was agreed on, and not of a learner of the past."""
        older = (begin.incarnation, begin.version) < self._held[:2]
        if begin.epoch == self.epoch and begin.incarnation == self.incarnation and not older:
            return True
        offered = f"v{begin.version} of incarnation {begin.incarnation} in epoch {begin.epoch}"
        present = f"v{self.version} of incarnation {self.incarnation} in epoch {self.epoch}"
        log.warning("weight bus: %r ignores %s: it is at %s", self.name, offered, present)
        return False

    def _decided(self, decision: m.Commit | m.Abort) -> m.Begin | None:
        """What a decision is about, which is staged no longer; None when it is about something else."""
        staged = self._staged
        if staged is None or (staged.epoch, staged.version) != (decision.epoch, decision.version):
            return None
        self._staged = None
        return staged

    def _commit(self, commit: m.Commit) -> None:
        staged = self._decided(commit)
        if staged is None or commit.digest != staged.digest:
            log.warning("weight bus: %r ignores a commit of v%d: that is not staged", self.name, commit.version)
            return
        self._due = staged, commit
        self._is_announced = False

    def apply(self, engine: EngineCallbacks, now: float) -> bool:
        """Apply the version that is due, if the engine takes one now; True when it has been activated.

        While it does not, newer versions are staged in the place of this one: but for one to be evaluated.
        """
        if self._due is None:
            return False
        staged, commit = self._due
        if (busy := engine.busy()) is None:
            self._busy_since = None
        else:
            self._busy_since = now if self._busy_since is None else self._busy_since
            left_s = self._busy_since + busy[0] - now
            if left_s > 0:
                if not self._is_announced:
                    fields = {"limit_s": left_s + self._config.deadline_s, "reason": busy[1]}
                    self._answer(m.Holding, commit, **fields, stages=not staged.evaluate)
                    self._is_announced = True
                return False
        self._due = None
        return self._load(engine, staged, commit)

    def _load(self, engine: EngineCallbacks, staged: m.Begin, commit: m.Commit) -> bool:
        """Hold what the engine holds afterwards against the manifest."""
        self._held = NOTHING
        held: Mapping[str, int] = {}
        reason = ""
        self._engaged = commit
        try:
            held = self._intake.apply(commit.version, engine.load)
        except Exception as error:
            log.exception("weight bus: %r: the engine could not load v%d", self.name, commit.version)
            reason = f"the engine could not load: {type(error).__name__}: {error}"
        finally:
            self._engaged = None
        differences = self._intake.manifest.differences(held)
        if differences and not reason:
            reason = f"{len(differences)} tensors of the engine differ, first {differences[0]!r}"
            if set(self._intake.manifest.layout.kept) & set(differences):
                reason += "; no update carries that: start the engine with the learner's model.path and learner.lora"
        if reason:
            engine.quarantine(commit.version, reason)
        else:
            engine.activate(commit.version, staged.evaluate)
            self._held = (staged.incarnation, commit.version, staged.digest)
        digest = combined(held) if held else ""
        self._answer(m.Applied, commit, digest=digest, differences=differences[:MAX_NAMED], reason=reason)
        return not reason
