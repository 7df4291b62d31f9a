"""Which network interface of this machine has an address: collectives are told a name, people configure an address."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from configs.errors import SlipstreamError

SIOCGIFADDR = 0x8915
"""Linux: IPv4 address of an interface."""
IFREQ_BYTES = 256
"""At least the size of struct ifreq: the name first, the address from byte 20 on."""
IF_INET6 = Path("/proc/net/if_inet6")
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class InterfaceError(
    SlipstreamError,
    ValueError,
    code="SLIP-NET-07",
    cause="network.host is an address of another machine, or a name that is not resolved here.",
    mend="Give an address that `ip addr` shows on this node; each node has its own.",
):
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

    Raises InterfaceError, with the addresses that there are, when none has it. Only the first IPv4 address of an
    interface counts: for another, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in network.env.
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
    """(interface, address) of this machine: the first IPv4 address of each interface, and every IPv6 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{IFREQ_BYTES}s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # no IPv4 address on this one
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    if IF_INET6.exists():
        for line in IF_INET6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
