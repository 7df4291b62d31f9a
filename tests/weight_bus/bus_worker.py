"""A rollout server as a process, which stops or kills itself in the middle of chosen updates.

usage: bus_worker.py ADDRESS NAME [ACTION@UPDATE[:POINT] ...], ACTION stop | kill at a point of the UPDATE-th update
that it receives: `before-N` or `after-N`, around the call that receives bucket N (from 0; before-1 where nothing is
said), or `closing`, when all of them are under way. Prints one line per activated version: version and digest; at the
end why it ended. BUS_CONFIG in the environment holds JSON with other values for the weight_bus section.
"""

import json
import os
import signal
import sys
from collections.abc import Callable

import torch
from bus_harness import CONFIG, HOST, RUN, Engine, Faulty, digests

from weight_bus import BusClosed, RemovedFromBus, Subscriber
from weight_bus.digest import combined
from weight_bus.transports import Transport, make_transport
from weight_bus.transports.base import ignore

SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
NO_BUCKET = -1


class Watched(Faulty):
    """A transport that says which point of which update has come."""

    def __init__(self, inner: Transport, come: Callable[[int, str], None]) -> None:
        super().__init__(inner, NO_BUCKET, lambda _: None, before=True)
        self._come = come
        self._updates = 0

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        self._updates += index == 0
        self._come(self._updates, f"before-{index}")
        super().broadcast(bucket, index)
        self._come(self._updates, f"after-{index}")

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self._come(self._updates, "closing")
        super().finish(arrived)


def planned(fault: str) -> tuple[tuple[int, str], signal.Signals]:
    action, _, when = fault.partition("@")
    update, _, point = when.partition(":")
    return (int(update), point or "before-1"), SIGNALS[action]


def main(address: str, name: str, *faults: str) -> None:
    plan = dict(map(planned, faults))

    def come(update: int, point: str) -> None:
        if (update, point) in plan:
            os.kill(os.getpid(), plan[update, point])

    engine = Engine()
    config = CONFIG.model_copy(update=json.loads(os.environ.get("BUS_CONFIG", "{}")))
    with Subscriber(
        address,
        name=name,
        config=config,
        host=HOST,
        run_id=RUN,
        transport_factory=lambda config, host: Watched(make_transport(config, host), come),
    ) as subscriber:
        try:
            while True:
                version = subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
                print(version, combined(digests(engine.live)), flush=True)
        except BusClosed:
            print("closed", flush=True)
        except RemovedFromBus as removed:
            print("removed", removed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
