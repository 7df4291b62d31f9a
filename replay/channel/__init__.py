"""The channel: wire frames and ZeroMQ sockets. Torch-free; the weight bus uses it for its control plane."""

from replay.channel.frames import Envelope, Message, Registry, WireError, decode, encode, registry
from replay.channel.sockets import AsyncDealer, AsyncRouter, ChannelError, Dealer, Limits, bind, configure

__all__ = [
    "AsyncDealer",
    "AsyncRouter",
    "ChannelError",
    "Dealer",
    "Envelope",
    "Limits",
    "Message",
    "Registry",
    "WireError",
    "bind",
    "configure",
    "decode",
    "encode",
    "registry",
]
