"""Receives updates in the schedulers while they decode (weight_bus.stage_in: engine): in each, what it needs.

A thread with the bus's `Intake`, which the rollout server drives over a socket (weight_bus/remote). On a GPU it has
a stream of its own, so that its kernels run beside the engine's instead of taking turns with them. It shares the
interpreter with the scheduler, and so it mostly waits: in NCCL, in gloo, at the socket.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from configs.infrastructure import WeightBus
from replay.channel import Message, WireError
from rollout_server.engines.sglang.update.orders import exported, in_words
from weight_bus.control import wake_quickly
from weight_bus.errors import NotAvailable, TransportError
from weight_bus.intake import Intake
from weight_bus.manifest import alignment_of
from weight_bus.messages import Begin, NewLayout
from weight_bus.remote import ORDERS, Done, Forget, Hosting, NotTaken, Over, ReceiverConnection, Taken
from weight_bus.staging import Staging
from weight_bus.transports import Transport, TransportFactory, make_transport

log = logging.getLogger(__name__)

MAX_REASON = 2000
_receiver: "Receiver | None" = None
"""The one of this process that was started last."""


def start(order: Mapping[str, Any], device: torch.device) -> None:
    """Start a receiver, which waits for one whose server has not hung up yet.

    The order has `socket`, where the server listens, `config`, the weight_bus section, `host`, and `export`: whether
    other processes load from its memory.
    """
    global _receiver
    _receiver = Receiver(order, device, _receiver)
    _receiver.start()


def bucket(number: int, take: int) -> torch.Tensor:
    """See `Receiver.bucket`, of this process's receiver."""
    if _receiver is None:
        raise ValueError("nothing was ever received in this scheduler")
    return _receiver.bucket(number, take)


class Receiver(threading.Thread):
    """Serves one rollout server until it hangs up. What it raises stays in its thread."""

    def __init__(
        self,
        order: Mapping[str, Any],
        device: torch.device,
        before: "Receiver | None" = None,
        transport_factory: TransportFactory = make_transport,
    ) -> None:
        super().__init__(name="weight-bus-receiver", daemon=True)
        self._path = Path(order["socket"])
        self._config = WeightBus.model_validate(order["config"])
        self._host: str = order["host"]
        self._handles = Handles() if order["export"] else None
        self._device, self._before, self._factory = device, before, transport_factory
        self._intake: Intake | None = None
        self._staging, self._run_id = Staging(device), ""
        self._takes = 0
        """Versions that have begun to arrive; the last of them is what the buckets hold."""

    def bucket(self, number: int, take: int) -> torch.Tensor:
        """A staged bucket, flat uint8, for one load. Raises ValueError if `take` is over."""
        if self._intake is None or take != self._takes:
            raise ValueError(f"update {take} is not staged in this scheduler, which is at {self._takes}")
        return self._intake.staging.buckets[number]

    def run(self) -> None:
        """Connect, and carry out orders."""
        if self._before is not None:
            self._before.join()
            self._before = None  # and with it what it has staged
        wake_quickly()
        try:
            with closing(ReceiverConnection.connect(self._path)) as line, ExitStack() as stack:
                try:
                    if self._device.type == "cuda":  # a stream that waits for no kernels of others
                        torch.cuda.set_device(self._device)
                        stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
                        stack.enter_context(torch.cuda.stream(stream))
                    self._serve(line)
                except Exception as error:
                    if not line.lost:  # else the rollout server is gone
                        log.exception("weight bus: the receiver ends; no more updates arrive in this engine")
                    reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
                    line.send(Over(reason=reason, for_good=isinstance(error, NotAvailable)))
        except TransportError as error:
            log.warning("weight bus: the rollout server is gone: %s", error)
        finally:
            self._drop()

    def _serve(self, line: ReceiverConnection) -> None:
        transport = self._factory(self._config, self._host)
        line.send(Hosting(facts=transport.facts()))
        begins: list[Begin] = []
        while (order := line.receive(ORDERS, None)) is not None:
            intake = self._intake_of(order.run_id, transport)
            match order.message:
                case NewLayout():
                    intake.learn(order.message)
                case Begin():
                    begins.append(order.message)
                    if len(begins) == order.message.here:
                        line.send(self._take(intake, begins))
                        begins = []
                case Forget():
                    intake.forget()
                    line.send(Done())

    def _intake_of(self, run_id: str, transport: Transport) -> Intake:
        """That of a run. All have the same buffers: other ranks may have them mapped."""
        if self._intake is None or run_id != self._run_id:
            self._drop()
            make = partial(self._factory, self._config, self._host)
            self._intake = Intake(transport, run_id, alignment_of(self._config), self._staging, make)
            self._run_id = run_id
        return self._intake

    def _take(self, intake: Intake, begins: Sequence[Begin]) -> Message:
        self._takes += 1
        try:
            corrupt = intake.take(*begins)
        except TransportError as error:
            return NotTaken(reason=error.message, symptom=error.symptom)
        except WireError as error:
            return NotTaken(reason=str(error))
        buckets = intake.staging.buckets
        handles = self._handles.of(buckets) if self._handles is not None else [None] * len(buckets)
        memory = [{"kind": "staged", "take": self._takes, "cuda": handle} for handle in handles]
        return Taken(corrupt=corrupt, seconds=dict(intake.seconds), memory=memory)

    def _drop(self) -> None:
        intake, self._intake = self._intake, None
        if intake is not None:
            intake.close()


class Handles:
    """CUDA IPC handles of buckets. Exported once: each export adds to a reference count."""

    def __init__(self, export: Callable[[torch.Tensor], Any] | None = None) -> None:
        self._export = export or (lambda bucket: in_words(exported(bucket.untyped_storage())))
        self._known = WeakTensorKeyDictionary()
        """Without a hold on the buckets: those of another layout make room before new ones are made."""

    def of(self, buckets: Sequence[torch.Tensor]) -> list[Any]:
        """The handle of each bucket."""
        for bucket in buckets:
            if bucket not in self._known:
                self._known[bucket] = self._export(bucket)
        return [self._known[bucket] for bucket in buckets]
