"""Errors of the weight bus.

WeightBusError > NonFiniteWeights, NotAvailable, BusClosed, RemovedFromBus, TransportError
TransportError > one class for each symptom
"""

from typing import Any, Self

from configs.errors import SlipstreamError


class WeightBusError(SlipstreamError, RuntimeError, code="SLIP-BUS-01"):
    """The weight bus cannot do what was asked."""


class NonFiniteWeights(WeightBusError, code="SLIP-BUS-02"):
    """An update holds NaN or infinity. Nothing of it is applied; subscribers keep the last version."""


class NotAvailable(WeightBusError, code="SLIP-BUS-03"):
    """What the configuration asks for is not on this machine; starting again does not help."""


class BusClosed(WeightBusError, code="SLIP-BUS-04"):
    """There will be no more updates: the other end said goodbye, or `stop()` was called."""


class RemovedFromBus(WeightBusError, code="SLIP-BUS-05"):
    """The publisher removed this subscriber for good (max_heals, duplicate name); the engine must not serve."""


class TransportError(WeightBusError, code="SLIP-BUS-06"):
    """A broadcast or a rendezvous failed. `symptom` is one of closed, silent, slow, corrupt, full, duplicate."""

    def __new__(cls, *args: Any) -> Self:
        """The class of the symptom, as OSError does with errno."""
        kind: Any = BY_SYMPTOM.get(args[-1] if args else "", cls) if cls is TransportError else cls
        made: Self = super().__new__(kind, *args)
        return made

    def __init__(self, message: str, symptom: str) -> None:
        super().__init__(f"{message} [{symptom}]")
        self.message, self.symptom = message, symptom

    def during(self, what: str) -> "TransportError":
        """The same error, with what it prevented in front."""
        return TransportError(f"{what}: {self.message}", self.symptom)


class MemberClosed(TransportError, code="SLIP-BUS-07"):
    """A member of a broadcast is gone [closed]."""


class MemberSilent(TransportError, code="SLIP-BUS-08"):
    """A member of a broadcast gave no sign in time [silent]."""


class MemberSlow(TransportError, code="SLIP-BUS-09"):
    """A member of a broadcast takes too long [slow]."""


class FolderFull(TransportError, code="SLIP-BUS-10"):
    """An update cannot be stored [full]."""


class NotPacked(TransportError, code="SLIP-BUS-11"):
    """The learner is late with a bucket: no receiver's fault."""


class SenderBroken(TransportError, code="SLIP-BUS-12"):
    """A learner rank's end of a broadcast was broken, and is opened anew: no receiver's fault."""


LATE = ("silent", "slow")
"""Symptoms of one that may still do what it owes."""
BY_SYMPTOM = {"closed": MemberClosed, "silent": MemberSilent, "slow": MemberSlow, "full": FolderFull}
