"""Errors of the weight bus.

WeightBusError > NonFiniteWeights, NotAvailable, BusClosed, RemovedFromBus, EngineSpoiled, TransportError
"""


class WeightBusError(RuntimeError):
    """The weight bus cannot do what was asked."""


class NonFiniteWeights(WeightBusError):
    """An update holds NaN or infinity. Nothing of it is applied; subscribers keep the last version."""


class NotAvailable(WeightBusError):
    """What the configuration asks for is not on this machine; starting again does not help."""


class BusClosed(WeightBusError):
    """There will be no more updates: the other end said goodbye, or `stop()` was called."""


class RemovedFromBus(WeightBusError):
    """The publisher removed this subscriber for good (max_heals, duplicate name); the engine must not serve."""


class EngineSpoiled(WeightBusError):
    """`direct` only: the engine was touched and holds no whole version; it must be restarted."""


class TransportError(WeightBusError):
    """A broadcast or a rendezvous failed. `symptom` is one of closed, silent, slow, corrupt, full, duplicate."""

    def __init__(self, message: str, symptom: str) -> None:
        super().__init__(f"{message} [{symptom}]")
        self.message, self.symptom = message, symptom

    def during(self, what: str) -> "TransportError":
        """The same error, with what it prevented in front."""
        return TransportError(f"{what}: {self.message}", self.symptom)
