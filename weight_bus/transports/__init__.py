"""Transports of the weight bus, by name; chosen once, here."""

from configs.infrastructure import WeightBus
from weight_bus.errors import WeightBusError
from weight_bus.transports.base import DirectReceiver, Formation, Transport, TransportFactory, differing
from weight_bus.transports.collective import Collective
from weight_bus.transports.direct import DIRECT_BACKENDS, direct_facts
from weight_bus.transports.nccl import NcclCollective, set_nccl_defaults

BACKENDS: dict[str, TransportFactory] = {"gloo": Collective, "nccl": NcclCollective}
"""The collective transport, by weight_bus.backend."""


def make_transport(config: WeightBus, host: str) -> Transport:
    """The transport that the configuration names, bound to the interface `host`. Publisher only with apply `direct`.

    Raises:
        WeightBusError: it is not available here.
    """
    backends = DIRECT_BACKENDS if config.apply == "direct" else BACKENDS
    if config.backend not in backends:
        raise WeightBusError(
            f"weight_bus.backend {config.backend!r} is not available in this version; take weight_bus.backend: gloo"
        )
    return backends[config.backend](config, host)


__all__ = [
    "BACKENDS",
    "DirectReceiver",
    "Formation",
    "Transport",
    "TransportFactory",
    "differing",
    "direct_facts",
    "make_transport",
    "set_nccl_defaults",
]
