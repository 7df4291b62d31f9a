"""The collective transport by itself: groups per epoch in one process, lost members, interfaces."""

import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.chaos.probe import GatedStore
from tests.support.bus_receiver import CONFIG, HOST, formation, together
from weight_bus import TransportError
from weight_bus.transports.gloo import GlooCollective


def listening() -> set[str]:
    """Sockets on which this process accepts connections."""
    tables = [Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:] for name in ("tcp", "tcp6")]
    inodes = {f"socket:[{row.split()[9]}]" for table in tables for row in table if row.split()[3] == "0A"}
    held = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return inodes & {str(target) for target in held}


@pytest.mark.skipif(sys.platform != "linux", reason="counts ports in /proc")
def test_a_member_that_connects_to_nobody_costs_a_timeout_and_leaves_no_port_open():
    """gloo would wait five timeouts, and hand a connection that comes late to what is freed by then."""
    root, member = GlooCollective(CONFIG, HOST), GlooCollective(CONFIG, HOST)
    endpoint, meet = root.serve(), member._meeting.at
    for epoch in range(1, 30):  # which of two connects to the other is up to their addresses
        go_on, before = threading.Event(), listening()
        gate = SimpleNamespace(reach=lambda _, go_on=go_on: go_on.wait(20.0))
        member._meeting.at = lambda where, gate=gate: GatedStore(meet(where), gate)  # type: ignore[method-assign, return-value]
        thread = threading.Thread(target=together, args=(partial(member.form, formation(endpoint, epoch, 1, 2)),))
        thread.start()
        started = time.monotonic()
        (failed,) = together(partial(root.form, formation(endpoint, epoch, 0, 2)))
        took, ports = time.monotonic() - started, listening() - before
        go_on.set()
        thread.join(20.0)
        root.leave()
        member.leave()
        if failed is not None:
            break
    assert failed is not None and f"epoch {epoch} with 2 members did not form" in str(failed)
    assert took < 4 * CONFIG.collective_timeout_s
    assert failed.__traceback__ is not None  # what could hold the port
    # those that were open before, of groups that were left, close in their own time
    assert len(ports) == 1, "only the member still has its own"
    for transport in (root, member):
        transport.close()


@pytest.mark.parametrize("endpoint", ["nowhere", "127.0.0.1:", "127.0.0.1:port"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(TransportError, match="not host:port"):
        GlooCollective(CONFIG, HOST).form(formation(endpoint, 1, 1, 2))
