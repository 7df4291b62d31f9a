"""The channel: wire frames and ZeroMQ sockets. Torch-free; the weight bus uses it for its control plane."""

from replay.channel.errors import ChannelError, KeysError
from replay.channel.frames import Envelope, Message, Registry, WireError, decode, encode, registry
from replay.channel.gate import Gate
from replay.channel.handshake import HandshakeWatch
from replay.channel.keys import Keys, load_keys
from replay.channel.sockets import AsyncDealer, AsyncRouter, Dealer, Limits, bind, configure

__all__ = [
    "AsyncDealer",
    "AsyncRouter",
    "ChannelError",
    "Dealer",
    "Envelope",
    "Gate",
    "HandshakeWatch",
    "Keys",
    "KeysError",
    "Limits",
    "Message",
    "Registry",
    "WireError",
    "bind",
    "configure",
    "decode",
    "encode",
    "load_keys",
    "registry",
]
