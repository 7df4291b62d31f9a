"""A learner rank is killed while the weight bus has a fixed port, as in every preset for several nodes."""

import os
import signal
import socket

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GOES_ON_S = 60


def test_a_learner_that_starts_again_at_the_same_bus_port_is_followed(launch):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    run = launch(f"weight_bus.port={port}", "checkpoint.every_steps=2", steps=10_000)
    run.wait_for_step(3)
    os.kill(run.pids("learner.train")[-1], signal.SIGKILL)
    before = run.steps()[-1]["training/global_step"]
    run.wait_for_step(before + 2, GOES_ON_S)
    assert "incarnation 2 starts at version" in run.log("replay")
