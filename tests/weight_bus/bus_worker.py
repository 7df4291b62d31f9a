"""A rollout server as a process, which stops or kills itself in the middle of chosen updates.

usage: bus_worker.py ADDRESS NAME [ACTION@UPDATE ...], ACTION stop | kill before the second bucket of the
UPDATE-th update that it receives. Prints one line per activated version: version and digest; at the end why it ended.
BUS_CONFIG in the environment holds JSON with other values for the weight_bus section.
"""

import json
import os
import signal
import sys

import torch
from bus_harness import CONFIG, HOST, RUN, Engine, digests, faulty

from weight_bus import BusClosed, RemovedFromBus, Subscriber
from weight_bus.digest import combined

SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def main(address: str, name: str, *faults: str) -> None:
    plan = {int(update): SIGNALS[action] for action, update in (fault.split("@") for fault in faults)}
    updates = 0

    def act(bucket: torch.Tensor) -> None:
        nonlocal updates
        updates += 1
        if updates in plan:
            os.kill(os.getpid(), plan[updates])

    engine = Engine()
    factory = faulty(1, act, before=True)
    config = CONFIG.model_copy(update=json.loads(os.environ.get("BUS_CONFIG", "{}")))
    with Subscriber(address, name=name, config=config, host=HOST, run_id=RUN, transport_factory=factory) as subscriber:
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
