"""Which network interface of this machine has an address: collectives are told a name, people configure an address."""

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil

from configs.errors import SlipstreamError

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class InterfaceError(SlipstreamError, ValueError, code="SLIP-NET-07"):
    """An address belongs to no interface of this machine."""


def bind_collectives(environment: MutableMapping[str, str], host: str) -> None:
    """Tell gloo and NCCL to use the interface of `host` (network.host) where they have not been told any.

    `environment` is os.environ, before the first process group; for a wildcard address both choose for themselves.
    Raises InterfaceError, as `interface_of`.
    """
    missing = [name for name in NAMES if name not in environment]
    if missing and not _is_wildcard(host):
        interface = interface_of(host)
        # NCCL takes a bare name for the beginning of one: eth1 would be eth10 as well
        environment.update({name: f"={interface}" if name.startswith("NCCL") else interface for name in missing})


def interface_of(host: str) -> str:
    """Name of the interface with this address (or that of this host name). Example: "127.0.0.1" is on "lo".

    Raises InterfaceError, with the addresses that there are, when none has it.
    """
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise InterfaceError(f"network.host: {host!r} is not resolved on this machine: {error}") from error
    wanted = {ipaddress.ip_address(address) for address in found}
    held = [(name, ipaddress.ip_address(address)) for name, address in addresses()]
    for name, address in held:
        if address in wanted or (address.is_loopback and any(a.is_loopback for a in wanted)):
            return name
    known = ", ".join(f"{address} ({name})" for name, address in held)
    raise InterfaceError(
        f"network.host: no interface of this machine has the address {host}; there are {known}."
        " Give one of those, or name the interface in network.env (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    )


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of this machine, IPv4 and IPv6."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, one.address.partition("%")[0])
        for name, held in psutil.net_if_addrs().items()
        for one in held
        if one.family in families
    ]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
