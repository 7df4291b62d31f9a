"""The channel: wire frames and ZeroMQ sockets. Torch-free; the weight bus uses it for its control plane."""

from replay.channel.admission import (
    DuplicateMessage,
    may_be,
    routing_id,
    sequence_numbers,
    shown,
)
from replay.channel.delivery import Inventory, Repeat
from replay.channel.frames import Envelope, Message, Registry, WireError, decode, encode, registry
from replay.channel.keys import ChannelError, Keys, KeysError, PeerRefused, load_keys
from replay.channel.pulse import Pulse
from replay.channel.sockets import MAX_MESSAGE_BYTES, AsyncDealer, AsyncRouter, Dealer, Hub, configure
