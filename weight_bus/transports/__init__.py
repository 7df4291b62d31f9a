"""Transports of the weight bus, by name; chosen once, here."""

from configs.infrastructure import WeightBus
from weight_bus.transports.base import Formation, Transport, TransportFactory
from weight_bus.transports.collective import Collective

TRANSPORTS: dict[str, TransportFactory] = {"collective": Collective}


def make_transport(config: WeightBus, host: str) -> Transport:
    """The transport that the configuration names, bound to the interface `host`."""
    return TRANSPORTS[config.transport](config, host)


__all__ = ["TRANSPORTS", "Formation", "Transport", "TransportFactory", "make_transport"]
