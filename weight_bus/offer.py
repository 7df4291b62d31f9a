"""What the learner's thread and the bus thread share: the update on offer, what became of it, and counters."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from weight_bus.delta.changes import Change
from weight_bus.errors import LATE
from weight_bus.manifest import Manifest
from weight_bus.membership import Member, Membership
from weight_bus.packing import PackingProgress

log = logging.getLogger(__name__)

VERIFYING = "verifying what it received of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth counting or seeing."""

    kind: str  # join, epoch, sent, corrupt, quarantined, held, healed, live, removed, failed, superseded or left
    version: int
    epoch: int
    name: str = ""
    detail: str = ""
    symptom: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What became of one version.

    Example: PublishReport(version=12, served=["rollout-0"], failed={"rollout-1": "silent for 5.2 s while ..."}, ...)
    """

    version: int
    served: list[str]  # subscribers whose engine verifiably holds this version
    failed: dict[str, str]  # subscribers that do not, or not yet, and why
    held: dict[str, str]
    """Subscribers that finish an evaluation of an older version first, and why. They are not waited for."""
    seconds: dict[str, float]
    """By phase: gather (and pack) and encode (delta) on the caller's thread; queue, epoch, send, apply, total."""
    epoch: int
    num_bytes: int  # on the wire, to each subscriber
    spans: tuple[tuple[str, float, float], ...] = ()
    """When each phase began and ended, in monotonic seconds and order; a resend has phases of its own."""
    late: tuple[str, ...] = ()
    """Of `failed`, those that were silent or slow; the others have failed in another way."""


@dataclass(slots=True, kw_only=True)
class Offer:
    """One version on offer, with the packed buckets that joins and resends are served from."""

    version: int
    evaluate: bool
    buffer: int  # which of the two sets the buckets are
    started_at: float  # of `start_publish`
    manifests: Sequence[Manifest]  # of each lane, mostly one
    digest: str  # of the whole version
    buckets: list[torch.Tensor]  # of the lanes that this process sends
    progress: PackingProgress
    posted_at: float = 0.0
    deadline: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    change: Change | None = None  # what leads here from the version before, where it is worth sending
    wire_bytes: int = 0  # of the last round, or of a whole version, to each subscriber
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)  # of them, who was silent or slow
    report: PublishReport | None = None  # set once every member is settled
    sent_at: float = 0.0
    sending_since: float = 0.0  # of a round that is under way; 0: none
    staged_at: float = 0.0  # when the last receiver said that it has all

    @property
    def manifest(self) -> Manifest:
        """Of the first lane."""
        return self.manifests[0]

    def fail(self, name: str, reason: str, symptom: str = "") -> None:
        """Note why a subscriber does not have this version, unless the report is written."""
        if self.report is None:
            self.failed[name] = reason
            self.late |= {name} if symptom in LATE else set()

    def spend(self, phase: str, since: float) -> float:
        """Add the time since `since` to a phase; now."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - since
        self.spans.append((phase, since, now))
        return now


class Board:
    """Shared state; `changed` guards all of it."""

    def __init__(self, membership: Membership) -> None:
        self.changed = threading.Condition()
        self.membership = membership
        self.pending: Offer | None = None  # packed and not yet taken up by the bus thread
        self.current: Offer | None = None
        self.called_off = (0, -1)  # last epoch and version of what was sent, or a part of it, and is not to be applied
        self.doing = VERIFYING  # what a receiver of the current version does at the moment
        self.failure: BaseException | None = None
        self.closing = ""
        self.counters: dict[str, float] = dict.fromkeys(
            ("rounds", "epochs", "joins", "heals", "quarantines", "corrupt", "lost_peers", "superseded", "changes"), 0.0
        )
        self.on_event: list[Callable[[Event], None]] = []

    @property
    def version(self) -> int:
        """The current one, -1 for none."""
        return self.current.version if self.current is not None else -1

    def emit(self, kind: str, version: int, name: str = "", detail: str = "", symptom: str = "") -> None:
        """Call the listeners; they run on the bus thread and must be quick."""
        epoch = self.membership.epoch
        event = Event(kind=kind, version=version, epoch=epoch, name=name, detail=detail, symptom=symptom)
        for listener in self.on_event:
            listener(event)

    def supersede(self, offer: Offer, newer: int, now: float) -> None:
        """Close the report of a version that a newer one takes the place of, before all had it."""
        offer.report = self.report(offer, now)
        late = "; ".join(offer.report.failed.values())
        if late:
            self.counters["superseded"] += 1
            log.warning("weight bus: v%d is superseded by v%d before all had it: %s", offer.version, newer, late)
            self.emit("superseded", offer.version, detail=late)

    def call_off(self, offer: Offer, before: Offer | None, reason: str) -> None:
        """Withdraw a version that the bus may be sending; the one before stands."""
        with self.changed:
            offer.progress.call_off(reason)
            if self.pending is offer:
                self.pending = None
            elif self.current is offer:
                self.current = before
                self.called_off = (self.membership.epoch, offer.version)
                # the number of the version may come again, then in another epoch
                self.membership.main.sessions = self.membership.beside.sessions = ()
            self.changed.notify_all()

    def settle(self, now: float) -> None:
        """Write the current report once no member waits for its version any more."""
        offer = self.current
        if offer is not None and offer.report is None and not self.membership.unsettled(offer.version):
            offer.report = self.report(offer, now)
        self.changed.notify_all()

    def report(self, offer: Offer, now: float) -> PublishReport:
        """The report of an offer as it stands; names each unsettled member with its state."""
        if offer.report is not None:
            return offer.report
        served = [m.name for m in self.membership.members.values() if m.version == offer.version]
        holders = self.membership.held()
        held = {m.name: f"{m} holds an older version since {now - m.since:.1f} s: {m.hold}" for m in holders}
        failed = {name: reason for name, reason in offer.failed.items() if name not in served and name not in held}
        unsettled = self.membership.unsettled(offer.version)
        late = offer.late.union(member.name for member in unsettled)
        for member in unsettled:
            earlier = f"{failed[member.name]}; " if member.name in failed else ""
            failed[member.name] = earlier + self._laggard(member, now)
        seconds = {**offer.seconds, "total": now - offer.started_at}
        spans = list(offer.spans)
        if "queue" in seconds:
            spans.append(("queue", offer.posted_at, offer.posted_at + seconds["queue"]))
        sent_at = offer.sent_at
        if 0 < offer.sending_since < offer.staged_at:  # all have it, and the end of the broadcasts is not noticed yet
            sent_at = offer.staged_at
            seconds["send"] = seconds.get("send", 0.0) + sent_at - offer.sending_since
            spans.append(("send", offer.sending_since, sent_at))
        if sent_at:
            seconds["apply"] = now - sent_at
            spans.append(("apply", sent_at, now))
        return PublishReport(
            version=offer.version,
            served=served,
            failed=failed,
            held=held,
            seconds=seconds,
            epoch=self.membership.epoch,
            num_bytes=offer.wire_bytes,
            spans=tuple(sorted(spans, key=lambda span: span[1])),
            late=tuple(sorted(late.intersection(failed))),
        )

    def _laggard(self, member: Member, now: float) -> str:
        quiet = now - member.heard_at
        symptom = "silent" if quiet > self.membership.silent_after_s else "slow"
        state = f"{member.state.value} v{member.target}" if member.target >= 0 else member.state.value
        return f"{member} is {state} for {now - member.since:.1f} s, last heartbeat {quiet:.1f} s ago [{symptom}]"
