"""Transports of the weight bus, by name; chosen once, here."""

from configs.infrastructure import WeightBus
from weight_bus.errors import NotAvailable
from weight_bus.transports.base import DirectReceiver, Formation, Transport, TransportFactory, differing
from weight_bus.transports.direct import DIRECT_BACKENDS, direct_facts
from weight_bus.transports.disk import Disk
from weight_bus.transports.gloo import Collective
from weight_bus.transports.nccl import NcclCollective, set_nccl_defaults
from weight_bus.transports.ucc import resolve_ucc
from weight_bus.transports.ucc.collective import UccCollective

BACKENDS: dict[str, TransportFactory] = {"gloo": Collective, "nccl": NcclCollective, "ucc": UccCollective}
"""The collective transport, by weight_bus.backend."""


def make_transport(config: WeightBus, host: str) -> Transport:
    """The transport that the configuration names, bound to the interface `host`. Publisher only with apply `direct`.

    Raises WeightBusError: it is not available here.
    """
    if config.transport == "disk":
        return Disk(config, host)
    backends = DIRECT_BACKENDS if config.apply == "direct" else BACKENDS
    if config.backend not in backends:
        raise NotAvailable(
            f"weight_bus.backend {config.backend!r} is not available in this version with weight_bus.apply"
            f" {config.apply!r}; take weight_bus.apply: staged, or weight_bus.backend: gloo or nccl"
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
    "resolve_ucc",
    "set_nccl_defaults",
]
