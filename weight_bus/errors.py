"""Errors of the weight bus.

WeightBusError
├── NonFiniteWeights   an update holds NaN or infinity; nothing of it is applied
├── NotAvailable       what the configuration asks for is not on this machine; starting again does not help
├── BusClosed          the other end said goodbye, or `stop()` was called
├── RemovedFromBus     the publisher will not serve this subscriber again (max_heals, duplicate name)
├── EngineSpoiled      `direct` only: the engine was touched and holds no whole version; it must be restarted
└── TransportError     the data plane lost a peer; `symptom` is its class
"""


class WeightBusError(RuntimeError):
    """The weight bus cannot do what was asked."""


class NonFiniteWeights(WeightBusError):
    """An update holds NaN or infinity. Subscribers keep the last version."""


class NotAvailable(WeightBusError):
    """What the configuration asks for is not installed, or cannot be used, on this machine."""


class BusClosed(WeightBusError):
    """There will be no more updates."""


class RemovedFromBus(WeightBusError):
    """The publisher removed this subscriber for good; the engine must not serve."""


class EngineSpoiled(WeightBusError):
    """An update that went straight into the engine did not arrive whole. The engine must be restarted."""


class TransportError(WeightBusError):
    """A broadcast or a rendezvous failed. `symptom` is one of closed, silent, slow, corrupt, full, duplicate."""

    def __init__(self, message: str, symptom: str) -> None:
        super().__init__(f"{message} [{symptom}]")
        self.message, self.symptom = message, symptom

    def during(self, what: str) -> "TransportError":
        """The same error, with what it prevented in front."""
        return TransportError(f"{what}: {self.message}", self.symptom)
