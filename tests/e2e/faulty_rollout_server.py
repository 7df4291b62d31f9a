"""A rollout server with planted faults, for tests: the real process, with one fault in its own hands.

`python -m tests.e2e.faulty_rollout_server FAULT ORDINAL <arguments of rollout_server.main>` where FAULT, in the
ORDINAL-th version that this server is sent, is
    wire    flip one byte of a received bucket, before it is staged
    live    flip one byte of the engine's fused qkv tensor, right after the load
    die     SIGKILL itself in the middle of the broadcast
"""

import logging
import os
import signal
import sys

import torch

from replay.channel import AsyncDealer, Dealer
from replay.messages import LeaseRequest
from rollout_server import main as rollout_main
from rollout_server.engines.torch.engine import TorchEngine
from tests.support.bus_receiver import Faulty
from weight_bus import Subscriber
from weight_bus.messages import Begin
from weight_bus.transports import make_transport

fault, ordinal = sys.argv[1], int(sys.argv[2])
sys.argv = ["rollout_server", *sys.argv[3:]]
seen = []  # versions that were sent
planted = []


def due(kind):
    """Whether this is where the fault belongs; once."""
    is_due = kind == fault and not planted and len(seen) == ordinal
    planted.extend([kind] * is_due)
    return is_due


class FaultyTransport(Faulty):
    def broadcast(self, bucket, index):
        if due("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.broadcast(bucket, index)
        if due("wire"):
            bucket[len(bucket) // 3] ^= 0x10


def transport(config, host):
    return FaultyTransport(make_transport(config, host), 0, lambda _: None, before=True)


class FaultyDealer(Dealer):
    def poll(self, timeout_s):
        envelope = super().poll(timeout_s)
        message = envelope and envelope.message
        if isinstance(message, Begin) and message.version not in seen:
            seen.append(message.version)
            if len(seen) == ordinal:
                logging.getLogger("test").warning("planting %s in v%d", fault, message.version)
        return envelope


class FaultySubscriber(Subscriber):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings, dealer=FaultyDealer, transport_factory=transport)


class WatchedDealer(AsyncDealer):
    """Counts leases that are asked for."""

    asked = 0

    async def send(self, message):
        WatchedDealer.asked += isinstance(message, LeaseRequest) and message.capacity > 0
        await super().send(message)


real_load = TorchEngine.load
at_the_flip = []  # leases asked for and tokens sampled by then


async def load_and_flip(self, named_tensors, new_version, digests):
    if at_the_flip:
        leases, tokens = WatchedDealer.asked, (await self.health()).generated_tokens
        what = (leases - at_the_flip[0], tokens - at_the_flip[1])
        logging.getLogger("test").warning("asked for %d leases and sampled %d tokens while corrupt", *what)
        at_the_flip.clear()
    await real_load(self, named_tensors, new_version, digests)
    if due("live"):
        at_the_flip.extend((WatchedDealer.asked, (await self.health()).generated_tokens))
        qkv = next(tensor for name, tensor in self.live.weights.tensors.items() if name.endswith("qkv"))
        qkv.view(-1).view(torch.uint8)[8] ^= 0x10


TorchEngine.load = load_and_flip

if __name__ == "__main__":
    sys.exit(rollout_main.main(parts=rollout_main.Parts(dealer=WatchedDealer, subscriber=FaultySubscriber)))
