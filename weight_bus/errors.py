"""Errors of the weight bus.

WeightBusError > NonFiniteWeights, NotAvailable, BusClosed, RemovedFromBus, TransportError
TransportError > one class for each symptom
"""

from typing import Any, Self

from configs.errors import SlipstreamError


class WeightBusError(
    SlipstreamError,
    RuntimeError,
    code="SLIP-BUS-01",
    cause="Keys of weight_bus do not go with this engine or folder, or the thread of the bus has failed.",
    mend="Change the key that the message names; docs/weight-bus.md.",
):
    """The weight bus cannot do what was asked."""


class NonFiniteWeights(
    WeightBusError,
    code="SLIP-BUS-02",
    cause="An update of the policy has diverged.",
    mend="Lower learner.lr or learner.max_grad_norm, look at the rewards, and go on from an earlier checkpoint.",
):
    """An update holds NaN or infinity. Nothing of it is applied; subscribers keep the last version."""


class NotAvailable(
    WeightBusError,
    code="SLIP-BUS-03",
    cause="A backend or package of weight_bus.backend or weight_bus.compression is not installed here.",
    mend="Install it, or take the value that the message proposes.",
):
    """What the configuration asks for is not on this machine; starting again does not help."""


class BusClosed(
    WeightBusError,
    code="SLIP-BUS-04",
    cause="The run has ended, or the learner was ended.",
    mend="Look at the last line of the learner's log for the reason.",
):
    """There will be no more updates: the other end said goodbye, or `stop()` was called."""


class RemovedFromBus(
    WeightBusError,
    code="SLIP-BUS-05",
    cause="This rollout server failed weight_bus.max_heals updates in a row, or another one has its name.",
    mend="Look at its log for the reason of each update; give each rollout server a name of its own.",
):
    """The publisher removed this subscriber for good (max_heals, duplicate name); the engine must not serve."""


class TransportError(
    WeightBusError,
    code="SLIP-BUS-06",
    cause="What arrived is not what the manifest says.",
    mend="It is sent again by itself; where it goes on, look at memory and network of that node.",
):
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


class MemberClosed(
    TransportError,
    code="SLIP-BUS-07",
    cause="A member of the broadcast has ended or hung up.",
    mend="Look at its log; the launcher starts it again, and it joins the next epoch.",
):
    """A member of a broadcast is gone [closed]."""


class MemberSilent(
    TransportError,
    code="SLIP-BUS-08",
    cause="A member stands still, its node is overloaded, or the network between is cut.",
    mend="Look at the member that the message names; raise weight_bus.collective_timeout_s for a slow network.",
):
    """A member of a broadcast gave no sign in time [silent]."""


class MemberSlow(
    TransportError,
    code="SLIP-BUS-09",
    cause="A member lives and does not finish within weight_bus.deadline_s.",
    mend="Look at the load of that node; raise weight_bus.deadline_s for large models.",
):
    """A member of a broadcast takes too long [slow]."""


class FolderFull(
    TransportError,
    code="SLIP-BUS-10",
    cause="The disk of weight_bus.folder or the memory of a node takes no more.",
    mend="Free space there, or take weight_bus.transport collective.",
):
    """An update cannot be stored [full]."""


class NotPacked(
    TransportError,
    code="SLIP-BUS-11",
    cause="The learner gathers its weights slower than weight_bus.collective_timeout_s allows for a bucket.",
    mend="Nothing is to be done where it is rare: the version is sent again; else raise that key.",
):
    """The learner is late with a bucket: no receiver's fault."""


LATE = ("silent", "slow")
"""Symptoms of one that may still do what it owes."""
BY_SYMPTOM = {"closed": MemberClosed, "silent": MemberSilent, "slow": MemberSlow, "full": FolderFull}
