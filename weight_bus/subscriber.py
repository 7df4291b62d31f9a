"""The rollout server's end of the weight bus.

consumes:     epochs, buckets and decisions of the publisher
produces:     verified weights for the engine, through `load`; what the engine holds, to the publisher
waits for:    the publisher (its silence is logged, once, and outlived), broadcasts (collective timeout)
unblocked by: a message, a lost peer, stop(), Goodbye
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial

from configs.infrastructure import WeightBus
from replay.channel import ChannelError, Dealer, DuplicateMessage, Envelope, Keys, Message, Pulse, WireError
from weight_bus import messages as m
from weight_bus.errors import BusClosed
from weight_bus.intake import Intake, Load
from weight_bus.manifest import alignment_of
from weight_bus.remote import RemoteIntake
from weight_bus.staging import Staging
from weight_bus.subscription import Activate, Busy, EngineCallbacks, OnSilence, Quarantine, Subscription, never
from weight_bus.transports import TransportFactory, make_transport

log = logging.getLogger(__name__)

REMEMBERED = 1024  # messages of the publisher whose copies are known as such
LOOK_S = 0.25  # how often a wait for messages looks whether it was stopped
DUE_S = 0.02  # how often a version that waits for the engine looks whether it is free


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
        self._intake: Intake | RemoteIntake
        if intake is not None:
            self._intake = intake
        else:
            make = partial(transport_factory or make_transport, config, host)
            self._intake = Intake(make(), run_id, alignment_of(config), staging, make)
        instance = secrets.token_hex(8)
        join = m.Join(session="", name=name, instance=instance, pid=os.getpid(), host=socket.gethostname())
        self.subscription = Subscription(address, join, config, self._intake, on_silence, time.monotonic())
        self._dealer = dealer(address, f"{name}.{instance}", m.TO_SUBSCRIBER, keys=keys)
        self._dealer.run_id = run_id
        self._pulse = Pulse(address, self._dealer.route, self._beat, config.heartbeat_s, keys=keys, run_id=run_id)
        self._look_s = min(LOOK_S, config.heartbeat_s)
        # no window like the publisher's: a publisher that restarts with its clock behind counts from below
        self._had: deque[int] = deque(maxlen=REMEMBERED)
        self._closed = False
        self._stopping = threading.Event()

    @property
    def version(self) -> int:
        """Version that the engine verifiably holds, -1 for none."""
        return self.subscription.version

    @property
    def expected(self) -> Mapping[str, int]:
        """From inside `load`: the digests of the version that is being applied."""
        return self.subscription.expected

    @property
    def incarnation(self) -> int:
        """Of the learner that admitted this subscriber last, 0 before: in `activate`, that of the version."""
        return self.subscription.incarnation

    def receive(self, load: Load, *, activate: Activate, quarantine: Quarantine, busy: Busy = never) -> int:
        """Block until one version has been received, applied, verified and activated; return it.

        Call it again soon: a subscriber that does not answer for an epoch is removed, and then joins anew.
        Nothing touches the engine before every byte is verified.

        Raises:
            BusClosed: stop() was called or the publisher said goodbye.
            RemovedFromBus: the publisher gave this subscriber up; the engine must not serve.
        """
        engine, subscription = EngineCallbacks(load, activate, quarantine, busy), self.subscription
        entered = time.monotonic()
        while True:
            subscription.advance(time.monotonic())
            self._flush()
            message = self._next_message()
            if self._stopping.is_set():
                raise BusClosed(f"subscriber {subscription.name!r} was stopped")
            subscription.watch(time.monotonic(), heard=message is not None, entered=entered)
            if isinstance(message, WireError):
                refused = f"{message} [{message.symptom}]"
                log.warning(
                    "weight bus: %r refused a message of %s: %s", subscription.name, subscription.address, refused
                )
            try:
                if isinstance(message, Envelope):
                    subscription.hear(message.message)
                if subscription.apply(engine, time.monotonic()):
                    return self.version
            finally:
                self._flush()

    def _next_message(self) -> Envelope | WireError | None:
        """What has come, soon or not at all. Raises ChannelError: the publisher refuses this one (keys)."""
        try:
            envelope = self._dealer.poll(DUE_S if self.subscription.is_due else self._look_s)
        except WireError as error:
            return error
        if envelope is not None:
            if envelope.sequence in self._had:
                # a Begin twice would wait for a broadcast that is another's, which gloo ends the process for
                return DuplicateMessage(f"{type(envelope.message).__name__} number {envelope.sequence} came before")
            self._had.append(envelope.sequence)
        return envelope

    def _flush(self) -> None:
        while self.subscription.outbox:
            self._send(self.subscription.outbox.pop(0))

    def _send(self, message: Message) -> None:
        with suppress(ChannelError):  # the queue is full, or this one is refused: the next poll says so
            self._dealer.send(message)

    def _beat(self) -> Message | None:
        """Beats are of the session that the publisher has welcomed; for the pulse's thread."""
        session = self.subscription.session if self.subscription.admitted else ""
        return m.Heartbeat(session=session) if session else None

    def hold(self, limit_s: float, reason: str) -> None:
        """From inside `load`: the engine keeps its older version for up to `limit_s` before it applies this one.

        The publisher does not wait for it meanwhile, and takes it for slow only afterwards. May be repeated, for
        longer. `load` itself waits, applies and returns as ever.

        Args:
            limit_s: seconds from now, applying included.
            reason: for logs and reports, such as "evaluation of version 12".

        Raises WeightBusError: nothing is being applied.
        """
        self.subscription.hold(limit_s, reason)
        self._flush()

    def stop(self) -> None:
        """Make `receive` raise BusClosed, from any thread."""
        self._stopping.set()

    def close(self, reason: str = "the rollout server is done") -> None:
        """Leave the bus."""
        if self._closed:
            return
        self._closed = True
        self._pulse.close()
        self._send(m.Goodbye(session=self.subscription.session, reason=reason))
        self._dealer.close()
        self._intake.close()

    def __exit__(self, *_: object) -> None:
        self.close()
