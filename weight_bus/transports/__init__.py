"""Transports of the weight bus, by name; chosen once, here."""

from configs.infrastructure import WeightBus
from weight_bus.transports.base import Formation, Transport, TransportFactory
from weight_bus.transports.disk import DiskTransport
from weight_bus.transports.gloo import GlooCollective
from weight_bus.transports.nccl import NcclCollective, set_nccl_defaults
from weight_bus.transports.ucc import resolve_ucc
from weight_bus.transports.ucc.collective import UccCollective

BACKENDS: dict[str, TransportFactory] = {"gloo": GlooCollective, "nccl": NcclCollective, "ucc": UccCollective}
"""The collective transport, by weight_bus.backend."""


def make_transport(config: WeightBus, host: str) -> Transport:
    """The transport that the configuration names, bound to the interface `host`.

    Raises WeightBusError: it is not available here.
    """
    return DiskTransport(config, host) if config.transport == "disk" else BACKENDS[config.backend](config, host)
