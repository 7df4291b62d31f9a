"""The learner's end of the weight bus.

Example:
    publisher = Publisher(config.weight_bus, host="127.0.0.1", run_id="toy", incarnation=1)
    publisher.start_publish(3, named_tensors, digests)     # packs here, sends from the bus thread
    report = publisher.wait()                              # never longer than weight_bus.deadline_s
"""

import logging
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from configs.infrastructure import WeightBus
from replay.channel import Keys
from weight_bus.bus import Bus
from weight_bus.control import Router
from weight_bus.delta.changes import ChangeMaker
from weight_bus.digest import add, combined
from weight_bus.errors import WeightBusError
from weight_bus.lanes import Lane, Place, joined
from weight_bus.manifest import Layout, Manifest, alignment_of
from weight_bus.membership import Membership
from weight_bus.offer import Board, Offer, PublishReport
from weight_bus.packing import Named, Packer, PackingProgress
from weight_bus.staging import HOST
from weight_bus.transports import TransportFactory, make_transport

log = logging.getLogger(__name__)

SILENT_BEATS = 3


class Publisher(AbstractContextManager["Publisher"]):
    """Publishes versions to all subscribers. Its methods are for one thread (except `members` and `stats`).

    Args:
        host: address of the interface that control and data plane bind.
        run_id: subscribers of another run are refused.
        incarnation: the learner's start within the run; part of every group's name.
        transport_factory: makes the data plane; none takes the configured one.
        kept: names in `digests` of tensors that never travel; every engine must hold them.
        lanes: where other learner ranks send, too (`LaneSender`), or engines receive in several scheduler ranks.
        from_gpu: whether what rank 0 packs for lanes lies on a GPU.
        keys: of the learner's node; without, `host` must be a loopback address unless `insecure` allows more.

    Raises:
        WeightBusError: the backend is not available here.
        ChannelError: the port is taken or the host is not an address of this machine.
    """

    def __init__(
        self,
        config: WeightBus,
        *,
        host: str,
        run_id: str,
        incarnation: int,
        transport_factory: TransportFactory | None = None,
        kept: Collection[str] = (),
        keys: Keys | None = None,
        insecure: bool = False,
        pack_on_host: bool = False,
        lanes: Sequence[Lane] = (),
        from_gpu: bool = False,
    ) -> None:
        self._config, self._lanes = config, lanes
        mine = [lane.layout for lane in lanes if lane.sender == 0]
        make = partial(transport_factory or make_transport, config, host)
        transports = [make() for _ in range(max(1, len(mine)))]
        device = HOST if pack_on_host else transports[0].device
        layout = joined(mine).layout if mine else None
        self._packer = Packer(config.bucket_bytes, device, alignment_of(config), kept, layout=layout, pinned=from_gpu)
        self._overlaps = config.transport == "collective"
        """Buckets are sent while others are packed: no engine stands still for it, and nothing outlives a version."""
        self._changes = ChangeMaker(config)
        transports[0].serve()  # here, so that a host which is not ours is an error of the constructor
        membership = Membership(silent_after_s=SILENT_BEATS * config.heartbeat_s, max_faults=config.max_heals)
        self._board = Board(membership)
        self._router = Router(host, config.port, run_id, keys=keys, insecure=insecure)
        self.address = self._router.address  # control address for subscribers, `tcp://host:port`
        self.on_event = self._board.on_event
        """Listeners to what happens on the bus; they run on its thread and must be quick."""
        self._last: Offer | None = None
        self._closed = False
        self.session = secrets.token_hex(16)
        """By which the senders of other learner ranks are known."""
        self._bus = Bus(
            config,
            router=self._router,
            board=self._board,
            transports=transports,
            another=make,
            incarnation=incarnation,
            lanes=lanes,
            sender_session=self.session,
        )

    @property
    def version(self) -> int:
        """Last version handed to the bus, -1 before the first."""
        with self._board.changed:
            return self._board.pending.version if self._board.pending is not None else self._board.version

    @property
    def epoch(self) -> int:
        """Number of the last epoch that was started; 0 before the first."""
        with self._board.changed:
            return self._board.membership.epoch

    def publish(
        self, version: int, named_tensors: Named, digests: Mapping[str, int], *, evaluate: bool = False
    ) -> PublishReport:
        """`start_publish` and `wait`. Returns immediately when there are no subscribers."""
        self.start_publish(version, named_tensors, digests, evaluate=evaluate)
        return self.wait()

    def start_publish(
        self,
        version: int,
        named_tensors: Named,
        digests: Mapping[str, int],
        *,
        evaluate: bool = False,
        slices: Mapping[Place, int] | None = None,
    ) -> None:
        """Pack a version on this thread; the bus thread sends it, from the second version on while it is being packed.

        A version that is still being sent is finished or superseded by this one, never mixed with it.

        Args:
            version: above every version published before.
            named_tensors: HF names, in wire dtype, on any device; none may be written before this returns.
            digests: of the parameters and of `kept`, taken from the learner's own shards. The engines' digests are held
                against them, so they must not come from `named_tensors`.
            evaluate: subscribers keep this version for an evaluation.
            slices: digests of slices by tensor and begin, where lanes carry slices.

        With lanes, the tensors are those of rank 0's lanes, in the order of `joined`.

        Raises:
            NonFiniteWeights: nothing is applied, subscribers keep the last version.
            ValueError: the version is not newer, the layout changed, or names and digests differ; or a tensor does not
                lie aligned in a file of weight_bus.transport `disk`.
            WeightBusError: the bus thread has failed, with its cause; or the publisher is closed.
        """
        started = time.monotonic()
        spare, before = self._spare_buffer(version)
        base = before if before is not None and before.buffer != spare else None
        due = self._changes.due(base.digest if base is not None else "")
        room = self._packer.room(spare) if self._overlaps and not due else None
        layout, buckets = room or self._packer.pack(named_tensors, spare)
        offer = Offer(
            version=version,
            evaluate=evaluate,
            buffer=spare,
            manifests=self._manifests(layout, digests, slices or {}),
            digest=combined(digests),
            buckets=buckets,
            progress=PackingProgress(len(buckets), 0 if room else len(buckets)),
            started_at=started,
        )
        offer.wire_bytes = sum(manifest.layout.num_bytes for manifest in offer.manifests)
        packed = offer.spend("gather", started)
        if due and base is not None:
            offer.change = self._changes.change(base.digest, base.buckets, buckets, layout)
            offer.spend("encode", packed)
        last = self._post(offer)
        if room is not None:
            try:
                self._pack_behind(offer, named_tensors)
            except BaseException as error:
                self._last = last
                self._board.call_off(offer, before, str(error))
                log.warning("weight bus: v%d is called off: %s", version, error)
                raise

    def wait(self, deadline_s: float | None = None) -> PublishReport:
        """Wait until every subscriber is served or given up, at most `weight_bus.deadline_s` after start_publish.

        On expiry (or after `deadline_s` from now) the report names the laggards in `failed`; the bus goes on with them.

        Raises WeightBusError: nothing was published, or the bus thread has failed, with its cause.
        """
        offer = self._last
        if offer is None:
            raise WeightBusError("wait() before start_publish()")
        now = time.monotonic()
        limit = offer.deadline if deadline_s is None else min(offer.deadline, now + deadline_s)
        with self._board.changed:
            self._board.changed.wait_for(lambda: offer.report or self._board.failure, timeout=max(0.0, limit - now))
            self._raise_failure()
            return self._board.report(offer, time.monotonic())

    @property
    def settled(self) -> bool:
        """Whether no subscriber is waited for any more."""
        with self._board.changed:
            return self._last is None or self._last.report is not None

    def members(self) -> dict[str, tuple[str, int]]:
        """Subscribers by name: what each is doing, and the version it verifiably serves (-1 for none)."""
        with self._board.changed:
            return {m.name: (m.state.value, m.version) for m in self._board.membership.members.values()}

    def stats(self) -> dict[str, float]:
        """Counters since the start, and seconds per phase of the last version, for metrics."""
        with self._board.changed:
            members = {"members": float(len(self._board.membership.members))}
            if self._last is None:
                return {**self._board.counters, **members, "num_bytes": 0.0}
            report = self._board.report(self._last, time.monotonic())
            seconds = {f"seconds/{phase}": value for phase, value in report.seconds.items()}
            return {**self._board.counters, **members, **seconds, "num_bytes": float(report.num_bytes)}

    def close(self, reason: str = "the learner is done") -> None:
        """Say goodbye to all subscribers and stop the bus thread."""
        if self._closed:
            return
        self._closed = True
        with self._board.changed:
            self._board.closing = reason
        self._router.wake()
        limit = self._config.deadline_s + self._config.collective_timeout_s
        self._bus.thread.join(limit)
        if self._bus.thread.is_alive():
            log.error("weight bus: the publisher's thread did not end in %.0f s", limit)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, offer: Offer) -> Offer | None:
        """Hand a version to the bus thread; the one that was posted before."""
        offer.posted_at = time.monotonic()
        offer.deadline = offer.posted_at + self._config.deadline_s
        with self._board.changed:
            self._raise_failure()
            last, self._last, self._board.pending = self._last, offer, offer
        self._router.wake()
        return last

    def _pack_behind(self, offer: Offer, named_tensors: Named) -> None:
        """Pack a version that the bus sends meanwhile, a bucket behind."""

        def packed(count: int) -> None:
            offer.seconds["gather"] = time.monotonic() - offer.started_at
            offer.progress.reach(count)

        try:
            self._packer.pack(named_tensors, offer.buffer, packed)
        finally:
            offer.spans.append(("gather", offer.started_at, time.monotonic()))
            self._router.wake()

    def spare(self, version: int) -> int:
        """The set of buffers (0 or 1) that every learner rank packs this version into. Raises as `start_publish`."""
        return self._spare_buffer(version)[0]

    def _manifests(self, layout: Layout, digests: Mapping[str, int], slices: Mapping[Place, int]) -> Sequence[Manifest]:
        """Of each lane."""
        if not self._lanes:
            return [layout.with_digests(digests)]
        found = []
        for lane in self._lanes:
            its = {name: digests[name] for name in lane.layout.names}
            parts: dict[str, list[int]] = {}
            for e in lane.layout.entries:
                if e.shape != e.whole:
                    parts.setdefault(e.name, []).append(slices[e.name, e.start])
            its |= {name: add(found) for name, found in parts.items()}
            found.append(lane.layout.with_digests(its))
        return found

    def _spare_buffer(self, version: int) -> tuple[int, Offer | None]:
        """The set of buffers that the bus does not use, and the version in the other one."""
        if version <= self.version:
            raise ValueError(f"version {version} is not above {self.version}, which was published before")
        with self._board.changed:
            self._raise_failure()
            waiting, current = self._board.pending, self._board.current
            if waiting is not None:  # the bus has not begun it, so it gives its set up
                self._board.pending = None
                self._board.supersede(waiting, version, time.monotonic())
            return (1 - current.buffer if current is not None else 0), current

    def _raise_failure(self) -> None:
        if self._board.failure is not None:
            raise WeightBusError(f"the weight bus thread has failed: {self._board.failure}") from self._board.failure
        if self._closed:
            raise WeightBusError("the publisher is closed")
