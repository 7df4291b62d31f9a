"""The channel: wire frames and ZeroMQ sockets. Torch-free; the weight bus uses it for its control plane."""

from replay.channel.admission import (
    Arrivals,
    DuplicateMessage,
    NotAdmitted,
    may_be,
    routing_id,
    sequence_numbers,
    shown,
)
from replay.channel.delivery import Inventory, Repeat
from replay.channel.frames import Envelope, Message, Registry, WireError, decode, encode, registry
from replay.channel.gate import Gate
from replay.channel.handshake import HandshakeWatch
from replay.channel.keys import ChannelError, Keys, KeysError, PeerRefused, load_keys
from replay.channel.pulse import Pulse
from replay.channel.sockets import MAX_MESSAGE_BYTES, AsyncDealer, AsyncRouter, Dealer, bind, configure

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Arrivals",
    "AsyncDealer",
    "AsyncRouter",
    "ChannelError",
    "Dealer",
    "DuplicateMessage",
    "Envelope",
    "Gate",
    "HandshakeWatch",
    "Inventory",
    "Keys",
    "KeysError",
    "Message",
    "NotAdmitted",
    "PeerRefused",
    "Pulse",
    "Registry",
    "Repeat",
    "WireError",
    "bind",
    "configure",
    "decode",
    "encode",
    "load_keys",
    "may_be",
    "registry",
    "routing_id",
    "sequence_numbers",
    "shown",
]
