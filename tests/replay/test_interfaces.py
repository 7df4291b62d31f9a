"""From an address to the interface that collectives are told to use."""

import pytest

from replay.channel import interfaces
from replay.channel.interfaces import InterfaceError, bind_collectives, interface_of


def test_an_interface_is_found_by_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "192.168.5.7"), ("ib0", "fd00::7")]
    monkeypatch.setattr(interfaces, "addresses", lambda: held)
    assert [interface_of(a) for a in ("10.0.0.7", "192.168.5.7", "fd00:0::0007")] == ["eth0", "ib0", "ib0"]


def test_a_foreign_address_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InterfaceError, match=r"no interface of this machine has the address 192\.0\.2\.77; .*\(lo\)"):
        interface_of("192.0.2.77")
    with pytest.raises(InterfaceError, match=r"'no-such-host\.invalid' is not resolved"):
        interface_of("no-such-host.invalid")


def test_what_is_set_already_stays() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    bind_collectives(environment, "127.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}
    bind_collectives(environment, "192.0.2.77")  # not looked at: nothing is missing
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_names_no_interface(host: str) -> None:
    environment: dict[str, str] = {}
    bind_collectives(environment, host)
    assert environment == {}
