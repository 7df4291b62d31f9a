"""A learner rank's end of the bus beside rank 0: packs its lanes, and sends them when rank 0's publisher says so.

consumes:     packed lanes of the learner's thread, orders of the publisher
produces:     buckets in the groups of its lanes; what became of them, to the publisher
waits for:    orders; members of its groups and its own packing (collective timeout)
unblocked by: an order, Goodbye, close()
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from configs.infrastructure import WeightBus
from replay.channel import ChannelError, Dealer, Keys, WireError
from weight_bus.control import wake_quickly
from weight_bus.errors import NotPacked, TransportError
from weight_bus.lanes import Lane, joined
from weight_bus.messages import TO_SENDER, Enlist, Goodbye, Send, Sent
from weight_bus.packing import Named, Packer, PackingProgress
from weight_bus.sender import Parcel, Sender
from weight_bus.staging import HOST
from weight_bus.transports import TransportFactory, make_transport
from weight_bus.transports.base import Formation, group_prefix

log = logging.getLogger(__name__)

LOOK_S = 0.05
ENLIST_S = 5.0
"""Between two calls to a publisher that may have lost the first one."""


class Packed(NamedTuple):
    """A version in one of the two sets."""

    version: int
    buckets: list[torch.Tensor]
    progress: PackingProgress


class LaneSender(AbstractContextManager["LaneSender"]):
    """Sends the lanes of one learner rank. `pack` and `close` are for one thread.

    Args:
        address: control address of the publisher.
        session: which only learner ranks know.
        lanes: of all ranks.
        others: as for `Publisher`.

    Raises as `Publisher`.
    """

    def __init__(
        self,
        config: WeightBus,
        *,
        address: str,
        session: str,
        rank: int,
        lanes: Sequence[Lane],
        host: str,
        run_id: str,
        incarnation: int,
        transport_factory: TransportFactory | None = None,
        keys: Keys | None = None,
        pack_on_host: bool = False,
        from_gpu: bool = False,
    ) -> None:
        self._session, self._rank, self._run_id, self._incarnation = session, rank, run_id, incarnation
        self._timeout_s = config.collective_timeout_s
        mine = [lane for lane in lanes if lane.sender == rank]
        self._joined = joined([lane.layout for lane in mine])
        make = partial(transport_factory or make_transport, config, host)
        transports = [make() for _ in mine]
        self._facts = transports[0].facts()
        device = HOST if pack_on_host else transports[0].device
        self._packer = Packer(config.bucket_bytes, device, layout=self._joined.layout, pinned=from_gpu)
        self._changed = threading.Condition()
        self._sets: list[Packed | None] = [None, None]
        self._closing = ""
        self._answer = Sent(session=session, epoch=0, version=-1)
        """To the last order."""
        self._sender = Sender(
            transports,
            make,
            mine,
            self._timeout_s,
            doing=lambda _: None,
            closing=lambda: self._closing,
            done=lambda: None,
        )
        self._dealer = Dealer(address, f"sender-{rank}.{secrets.token_hex(8)}", TO_SENDER, keys=keys)
        self._dealer.run_id = run_id
        self._thread = threading.Thread(target=self._run, name="weight-bus", daemon=True)
        self._thread.start()

    def pack(self, version: int, into: int, named_tensors: Named) -> None:
        """Pack the lanes of a version into set `into`, as rank 0 has chosen it; they are sent meanwhile.

        Raises as `Packer.pack`. The version is then not sent.
        """
        room = self._packer.room(into)
        assert room is not None, "the layout is known from the start"
        progress = PackingProgress(len(room[1]), 0)
        with self._changed:
            self._sets[into] = Packed(version, room[1], progress)
            self._changed.notify_all()
        try:
            self._packer.pack(named_tensors, into, progress.reach)
        except BaseException as error:
            progress.call_off(str(error))
            raise

    def close(self, limit_s: float = 0.0) -> None:
        """Serve resends until the publisher's goodbye, for `limit_s` at most, and end the thread."""
        self._thread.join(limit_s)
        self._closing = self._closing or "the learner is done"
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        wake_quickly()
        enlist = Enlist(session=self._session, rank=self._rank, endpoints=self._endpoints(), facts=self._facts)
        heard, due = False, 0.0
        try:
            while not self._closing:
                if not heard and time.monotonic() >= due:
                    due = time.monotonic() + ENLIST_S
                    with suppress(ChannelError):
                        self._dealer.send(enlist)
                try:
                    envelope = self._dealer.poll(LOOK_S)
                except (WireError, ChannelError) as error:
                    log.warning("weight bus: learner rank %d refused a message: %s", self._rank, error)
                    continue
                match envelope.message if envelope is not None else None:
                    case Send(session=self._session) as order:
                        heard = True
                        self._carry_out(order)
                    case Goodbye(session=self._session) as goodbye:
                        self._closing = goodbye.reason
        except Exception:
            log.exception(
                "weight bus: the sender of learner rank %d failed; the publisher misses its lanes", self._rank
            )
        finally:
            self._sender.close()
            self._dealer.close()

    def _carry_out(self, order: Send) -> None:
        if order.number != self._answer.number:
            self._answer = self._result(order)
        with suppress(ChannelError):  # it will ask again
            self._dealer.send(self._answer)

    def _result(self, order: Send) -> Sent:
        answer = Sent(session=self._session, epoch=order.epoch, version=order.version, number=order.number)
        try:
            self._send(order)
        except TransportError as error:
            log.warning("weight bus: learner rank %d: v%d epoch %d: %s", self._rank, order.version, order.epoch, error)
            self._sender.leave(beside=order.beside)
            answer = replace(answer, reason=error.message, symptom=error.symptom, code=error.code)
        return replace(answer, endpoints=self._endpoints())

    def _endpoints(self) -> list[str]:
        return [*self._sender.endpoints(), *self._sender.endpoints(beside=True)]

    def _send(self, order: Send) -> None:
        packed = self._opened(order.version)
        prefix = group_prefix(self._run_id, self._incarnation, order.epoch)
        formation = Formation(epoch=order.epoch, rank=0, size=order.size, endpoint="", prefix=prefix)
        parcel = Parcel(order.version, packed.buckets, self._joined.sources, packed.progress, self._joined.layout)
        self._sender.send(parcel, formation if order.fresh else None, beside=order.beside).result()

    def _opened(self, version: int) -> Packed:
        """The version, once its packing has begun. Raises NotPacked."""

        def find() -> Packed | None:
            return next((packed for packed in self._sets if packed is not None and packed.version == version), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._closing, self._timeout_s / 2)
            packed = find()
        if packed is None:
            raise NotPacked(f"learner rank {self._rank} has not begun to pack v{version}", "slow")
        return packed
