"""Subscribers as processes that are stopped, killed and continued in the middle of a broadcast."""

import signal
import time
from functools import partial

import pytest

from tests.support import bus_receiver
from tests.support.bus_receiver import CONFIG, digests, printed, receiver_process, servers, until, weights
from tests.support.forking import Zygote

ROWS = 8000
"""Buckets of 4 MB: too large for the kernel's socket buffers, so that a sender really waits for the peer."""
line, publish = partial(printed, rows=ROWS), partial(bus_receiver.publish, rows=ROWS)
BOUND_S = CONFIG.collective_timeout_s + 4 * CONFIG.heartbeat_s + 3.0
"""Collective timeout, silence and control, and what two busy cores add."""


@pytest.fixture(scope="module")
def zygote():
    made = Zygote("weight_bus weight_bus.transports.gloo")
    yield made
    made.close()


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_peer_lost_mid_broadcast_costs_bounded_time(publisher, zygote, action, caplog):
    (survivor,) = servers(publisher, "rollout-0")
    with receiver_process(publisher, "rollout-1", f"{action}@2", zygote=zygote) as lost:
        assert sorted(publish(publisher, 1).served) == ["rollout-0", "rollout-1"]
        until(lambda: lost.lines == [line(1)], "the process holds what was sent")
        started = time.monotonic()
        report = publish(publisher, 2)
        assert time.monotonic() - started < BOUND_S
        assert report.served == ["rollout-0"] and report.failed.keys() == {"rollout-1"}
        symptom = "[closed]" if action == "kill" else "[silent]"
        named = [r for r in caplog.messages if f"'rollout-1' (pid {lost.process.pid}" in r and r.endswith("; removed")]
        assert len(named) == 1 and symptom in named[0] and ": v2 epoch " in named[0], caplog.text
        assert digests(survivor.engine.live) == digests(weights(2, rows=ROWS))

        epoch = publisher.epoch
        assert publish(publisher, 3).served == ["rollout-0"]
        assert survivor.engine.activated == [1, 2, 3]
        assert publisher.epoch == epoch, "the next version owes nothing to the lost peer"

        if action == "stop":
            lost.process.send_signal(signal.SIGCONT)
            until(lambda: lost.lines[-1] == line(3), "the continued process joins anew and is refilled")
            assert lost.lines == [line(1), line(3)], "it never held the version that it missed"
            assert sorted(publish(publisher, 4).served) == ["rollout-0", "rollout-1"]
            publisher.close()
            until(lambda: lost.lines[-1] == "closed", "it hears goodbye")
            assert lost.process.wait(20.0) == 0
