"""Peers of replay that do not keep to the rules: bare sockets, and the first bytes of ZMTP by hand."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

from replay.channel import Keys, routing_id
from tests.support.waiting import PATIENT_S


@contextmanager
def raw_dealer(
    address: str, identity: str, keys: Keys | None = None, *, high_water_mark: int = 1000
) -> Iterator["zmq.Socket[bytes]"]:
    """A DEALER that sends whatever frames it is given."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, routing_id(identity))
    made.set_hwm(high_water_mark)
    if keys is not None:
        keys.apply(made)
    made.connect(address)
    try:
        yield made
    finally:
        made.close(linger=100)
        context.term()


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.1, by hand."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes) -> bytes:
    """READY of a DEALER."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return b"\x04" + bytes([len(body)]) + body


def plain_connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENT_S)


def read_until_closed(connection: socket.socket) -> bytes:
    """What the server says before it closes the connection; fails when it does not."""
    said = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(65536):
            said += data
    return said
