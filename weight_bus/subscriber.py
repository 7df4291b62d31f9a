"""The rollout server's end of the weight bus.

consumes:     epochs, buckets and decisions of the publisher
produces:     verified weights for the engine, through `load`; what the engine holds, to the publisher
waits for:    the publisher (its silence is logged, once, and outlived), broadcasts (collective timeout)
unblocked by: a message, a lost peer, stop(), Goodbye
"""

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from configs.infrastructure import WeightBus
from replay.channel import Keys, Message, WireError
from weight_bus import messages as m
from weight_bus.control import Dealer, Pulse
from weight_bus.digest import combined
from weight_bus.errors import BusClosed, RemovedFromBus, TransportError, WeightBusError
from weight_bus.intake import Intake, Load
from weight_bus.manifest import alignment_of
from weight_bus.remote import RemoteIntake
from weight_bus.staging import Staging
from weight_bus.transports import TransportFactory, make_transport

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


class _Engine(NamedTuple):
    load: Load
    activate: Activate
    quarantine: Quarantine


class Subscriber(AbstractContextManager["Subscriber"]):
    """Receives versions for one engine. `receive` and `close` belong to one thread, `stop` to any.

    Args:
        address: control address of the publisher.
        name: of this rollout server; the newest subscriber of a name wins.
        host: address of this machine's interface that the data plane binds.
        run_id: must be the publisher's.
        transport_factory: makes the data plane; none takes the configured one.
        keys: of this node, where the publisher has keys.
        intake: the data plane where it is in another process; takes the place of transport_factory.
        staging: memory of an earlier subscriber of this engine, which receives no more; none makes it here.
        on_silence: called once in each silence that lasts longer than weight_bus.deadline_s.

    Raises:
        WeightBusError: the backend is not available here.
        ChannelError: the address is not one.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        config: WeightBus,
        host: str,
        run_id: str,
        transport_factory: TransportFactory | None = None,
        dealer: type[Dealer] = Dealer,
        keys: Keys | None = None,
        intake: RemoteIntake | None = None,
        staging: Staging | None = None,
        on_silence: OnSilence = lambda what, waited_s: "",
    ) -> None:
        self.address, self.name = address, name
        self._on_silence = on_silence
        self.incarnation = 0
        """Of the learner that admitted this subscriber last, 0 before: in `activate`, that of the version."""
        self._config = config
        self._instance = secrets.token_hex(8)
        self._sessions = 0
        self._session = ""
        self._intake: Intake | RemoteIntake
        if intake is not None:
            self._intake = intake
        else:
            transport = (transport_factory or make_transport)(config, host)
            self._intake = Intake(transport, run_id, alignment_of(config), staging)
        identity = f"{name}.{self._instance}"
        self._dealer = dealer(address, identity, run_id, keys=keys)
        self._pulse = Pulse(address, self._dealer.route, run_id, config.heartbeat_s, keys)
        self._epoch = 0
        self._held = NOTHING  # (incarnation, version, digest) that the engine verifiably holds
        self._engaged: m.Commit | None = None
        """What the engine is loading at this moment."""
        self._heard_at, self._joined_at = time.monotonic(), -math.inf
        self._silent = self._overdue = self._closed = False
        self._stopping = threading.Event()

    @property
    def version(self) -> int:
        """Version that the engine verifiably holds, -1 for none."""
        return self._held[1]

    def receive(self, load: Load, *, activate: Activate, quarantine: Quarantine) -> int:
        """Block until one version has been received, applied, verified and activated; return it.

        Call it again soon: a subscriber that does not answer for an epoch is removed, and then joins anew.
        Nothing touches the engine before every byte is verified.

        Raises:
            BusClosed: stop() was called or the publisher said goodbye.
            RemovedFromBus: the publisher gave this subscriber up; the engine must not serve.
        """
        engine = _Engine(load, activate, quarantine)
        entered = time.monotonic()
        while True:
            self._join_when_due()
            message = self._dealer.poll(self._config.heartbeat_s)
            if self._stopping.is_set():
                raise BusClosed(f"subscriber {self.name!r} was stopped")
            self._watch(message is not None, entered)
            if isinstance(message, WireError):
                refused = f"{message} [{message.symptom}]"
                log.warning("weight bus: %r refused a message of %s: %s", self.name, self.address, refused)
            elif message is not None and self._handle(message, engine):
                return self._held[1]

    def hold(self, limit_s: float, reason: str) -> None:
        """From inside `load`: the engine keeps its older version for up to `limit_s` before it applies this one.

        The publisher does not wait for it meanwhile, and takes it for slow only afterwards. May be repeated, for
        longer. `load` itself waits, applies and returns as ever.

        Args:
            limit_s: seconds from now, applying included.
            reason: for logs and reports, such as "evaluation of version 12".

        Raises WeightBusError: nothing is being applied.
        """
        if self._engaged is None:
            raise WeightBusError("hold() is for the load callback: nothing is being applied")
        self._answer(m.Holding, self._engaged, limit_s=float(limit_s), reason=reason)

    def stop(self) -> None:
        """Make `receive` raise BusClosed, from any thread."""
        self._stopping.set()
        if not self._closed:
            self._dealer.wake()

    def close(self, reason: str = "the rollout server is done") -> None:
        """Leave the bus."""
        if self._closed:
            return
        self._closed = True
        self._pulse.close()
        self._dealer.send(m.Goodbye(session=self._session, reason=reason))
        self._dealer.close()
        self._intake.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_when_due(self) -> None:
        """Ask for a session while there is none. The request outlives a lost connection, so seldom is enough."""
        now = time.monotonic()
        if self._pulse.session or now - self._joined_at < JOIN_AGAIN_BEATS * self._config.heartbeat_s:
            return
        if not self._session:
            self._sessions += 1
            self._session = f"{self._instance}-{self._sessions}"
        # a policy is (incarnation, version), whatever its weights are
        _, version, digest = self._held if self._held[0] == self.incarnation else NOTHING
        join = m.Join(
            session=self._session,
            name=self.name,
            instance=self._instance,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=version,
            digest=digest,
            facts=self._intake.facts,
        )
        if self._dealer.send(join):
            self._joined_at = now

    def _watch(self, heard: bool, entered: float) -> None:
        """Log once when the publisher falls silent, once past the deadline, and once when it is back.

        Only this wait counts as silence.
        """
        now = time.monotonic()
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

    def _handle(self, message: Message, engine: _Engine) -> bool:
        """True when a version has been activated."""
        if not isinstance(message, m.InSession) or message.session != self._session:
            return False
        match message:
            case m.Welcome():
                self._welcome(message)
            case m.Epoch():
                self._intake.forget()
                self._epoch = message.epoch
                self._dealer.send(m.EpochReady(session=self._session, epoch=message.epoch))
            case m.Begin():
                if self._expected(message):
                    self._receive(message)
            case m.Commit():
                return self._commit(message, engine)
            case m.Abort():
                self._intake.decide(message)
                log.info("weight bus: %r: v%d was called off: %s", self.name, message.version, message.reason)
            case m.Removed():
                self._removed(message)
            case m.Goodbye():
                raise BusClosed(f"the publisher {self.address} said goodbye: {message.reason}")
        return False

    def _welcome(self, welcome: m.Welcome) -> None:
        if welcome.incarnation < self.incarnation:
            reason = f"publisher {self.address} is of incarnation {welcome.incarnation}, not {self.incarnation}"
            raise RemovedFromBus(f"{reason}: an older learner still runs there")
        claimed, self.incarnation = self._held[0] == self.incarnation, welcome.incarnation
        if claimed and self._held[0] != welcome.incarnation and self.version == welcome.version:
            # the next incarnation may have taken what Join claims to hold for its own version: join without the claim
            self._dealer.send(m.Goodbye(session=self._session, reason="what it holds is of an earlier incarnation"))
            self._session, self._joined_at = "", -math.inf
            return
        self._pulse.session = self._session

    def _removed(self, removed: m.Removed) -> None:
        self._pulse.session = self._session = ""
        self._joined_at = -math.inf
        self._intake.forget()
        if not removed.rejoin:
            raise RemovedFromBus(f"subscriber {self.name!r} was removed by {self.address}: {removed.reason}")
        log.warning("weight bus: %r was removed (%s); joins anew with v%d", self.name, removed.reason, self.version)

    def _receive(self, begin: m.Begin) -> None:
        try:
            corrupt = self._intake.take(begin)
        except (TransportError, WireError) as error:
            log.warning("weight bus: %r: v%d did not arrive: %s", self.name, begin.version, error)
            self._intake.forget()
            self._answer(m.ReceiveFailed, begin, reason=str(error))
            return
        if corrupt:
            log.warning("weight bus: %r: v%d arrived with corrupt tensors %s", self.name, begin.version, corrupt[:5])
        seconds = self._intake.seconds
        self._answer(m.Staged, begin, corrupt=corrupt[:MAX_NAMED], wire_s=seconds["wire"], verify_s=seconds["verify"])

    def _answer(self, kind: Callable[..., Message], about: m.Begin | m.Commit, **fields: Any) -> None:
        """Tell the publisher what became of a version."""
        self._dealer.send(kind(session=about.session, epoch=about.epoch, version=about.version, **fields))

    def _expected(self, begin: m.Begin) -> bool:
        """Whether a Begin is of the epoch that was agreed on, and not of a learner of the past."""
        older = (begin.incarnation, begin.version) < self._held[:2]
        if begin.epoch == self._epoch and begin.incarnation == self.incarnation and not older:
            return True
        offered = f"v{begin.version} of incarnation {begin.incarnation} in epoch {begin.epoch}"
        present = f"v{self.version} of incarnation {self.incarnation} in epoch {self._epoch}"
        log.warning("weight bus: %r ignores %s: it is at %s", self.name, offered, present)
        return False

    def _commit(self, commit: m.Commit, engine: _Engine) -> bool:
        """Apply, then hold what the engine holds against the manifest."""
        staged = self._intake.decide(commit)
        if staged is None or commit.digest != staged.digest:
            log.warning("weight bus: %r ignores a commit of v%d: that is not staged", self.name, commit.version)
            return False
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
            if self._intake.manifest.kept.keys() & set(differences):
                reason += "; no update carries that: start the engine with the learner's model.path and learner.lora"
        if reason:
            engine.quarantine(commit.version, reason)
        else:
            engine.activate(commit.version, staged.evaluate)
            self._held = (staged.incarnation, commit.version, staged.digest)
        digest = combined(held) if held else ""
        self._answer(m.Applied, commit, digest=digest, differences=differences[:MAX_NAMED], reason=reason)
        return not reason
