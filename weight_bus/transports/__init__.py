"""Transports of the weight bus, by name; chosen once, here."""

from configs.infrastructure import WeightBus
from weight_bus.errors import WeightBusError
from weight_bus.transports.base import Formation, Transport, TransportFactory, differing
from weight_bus.transports.collective import Collective
from weight_bus.transports.nccl import NcclCollective, set_nccl_defaults

BACKENDS: dict[str, TransportFactory] = {"gloo": Collective, "nccl": NcclCollective}
"""The collective transport, by weight_bus.backend."""


def make_transport(config: WeightBus, host: str) -> Transport:
    """The transport that the configuration names, bound to the interface `host`.

    Raises:
        WeightBusError: it is not available here.
    """
    if config.apply != "staged":
        reason = f"weight_bus.apply {config.apply!r} is not available in this version; take weight_bus.apply: staged"
        raise WeightBusError(reason)
    if config.backend not in BACKENDS:
        raise WeightBusError(
            f"weight_bus.backend {config.backend!r} is not available in this version; take weight_bus.backend: gloo"
        )
    return BACKENDS[config.backend](config, host)


__all__ = [
    "BACKENDS",
    "Formation",
    "Transport",
    "TransportFactory",
    "differing",
    "make_transport",
    "set_nccl_defaults",
]
