"""A rollout server with planted faults, for tests: the real process, with one fault in its own hands.

`python faulty_rollout_server.py FAULT VERSION <arguments of rollout_server.main>` where FAULT is
    wire    flip one byte of a received bucket of VERSION, before it is staged
    live    flip one byte of the engine's fused qkv tensor right after VERSION was loaded
    die     SIGKILL itself in the middle of VERSION's broadcast
"""

import os
import signal
import sys

from rollout_server import main as rollout_main
from rollout_server import weights
from rollout_server.engines.torch_engine import TorchEngine
from weight_bus import subscriber as subscriber_module
from weight_bus.transports import make_transport

fault, version = sys.argv[1], int(sys.argv[2])
sys.argv = ["rollout_server", *sys.argv[3:]]
planted = {"done": False}


class FaultyTransport:
    """The real transport, with a hand on the received bytes."""

    def __init__(self, config, host):
        self._transport = make_transport(config, host)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def receive(self, *args, **kwargs):
        buffer = args[0]
        if fault == "die" and due():
            os.kill(os.getpid(), signal.SIGKILL)
        result = self._transport.receive(*args, **kwargs)
        if fault == "wire" and due():
            planted["done"] = True
            buffer[len(buffer) // 3] ^= 0x10
        return result


class CountingSubscriber(subscriber_module.Subscriber):
    """Knows which version is on the wire."""

    def _handle(self, message, engine):
        if type(message).__name__ == "Begin":
            planted["version"] = message.version
        return super()._handle(message, engine)


def due():
    return not planted["done"] and planted.get("version") == version


real_load = TorchEngine.load


async def load_and_flip(self, named_tensors, new_version):
    await real_load(self, named_tensors, new_version)
    if fault == "live" and new_version == version and not planted["done"]:
        planted["done"] = True
        name = next(name for name in self.live_tensors() if "qkv" in name and "weight" in name or name.endswith("qkv"))
        self.live_tensors()[name].view(-1).view(dtype=__import__("torch").uint8)[8] ^= 0x10


TorchEngine.load = load_and_flip
subscriber_module.make_transport = FaultyTransport
weights.Subscriber = CountingSubscriber

if __name__ == "__main__":
    sys.exit(rollout_main.main())
