"""Run each node's part over ssh, show what the nodes say, and end all of it with this process.

One ssh per node runs learner.launch.hosts.node, which takes its node spec from stdin and ends when stdin does: nothing
outlives this process, the ssh session or the connection.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.launch.hosts.host_file import Host
from learner.launch.hosts.node_spec import NodeRole, NodeSpec
from learner.launch.terminal import Interrupted, catch_signals, ignore_signals, say

SSH = "SLIPSTREAM_SSH"
"""Environment variable with another command than ssh; it gets the target and one line of shell."""
SSH_COMMAND = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
SSH_FAILED = 255
POLL_S = 0.1
FAREWELL_S = 30.0
"""How long nodes have to end by themselves after the run has ended or another node has failed."""
STOP_S = 25.0
"""How long nodes have to end after their stdin was closed."""
LAST_LINES = 20


@dataclass(slots=True)
class Remote:
    """One node's ssh."""

    name: str
    host: Host
    process: "subprocess.Popen[bytes]"
    reader: threading.Thread | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    lost: bool = False
    """Its failure has been said."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def failure(self) -> str:
        """`node1 (10.0.0.2) failed: exit code 2: last line`."""
        code = self.exit_code()
        if self.reader is not None:
            self.reader.join(1.0)
        last = next((line for line in reversed(self.last_lines) if line.strip()), "")
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        if code == SSH_FAILED:
            how = f"ssh to {self.host.ssh} failed or lost its connection"
        return f"{self.name} ({self.host.address}) failed: {how}{f': {last}' if last else ''}"


def ssh_command() -> list[str]:
    """The ssh command up to the target."""
    given = os.environ.get(SSH, "")
    return shlex.split(given) or list(SSH_COMMAND)


def remote_line(spec: NodeSpec, root: str, python: str) -> str:
    """What ssh runs on the node; the node spec comes on stdin."""
    words = [python, "-m", "learner.launch.hosts.node", "--stdin", "--role", spec.role, "--node", spec.node]
    return f"cd {shlex.quote(root)} && exec {shlex.join(words)}"


def run(specs: Sequence[tuple[NodeSpec, Host]], role: NodeRole, root: str, python: str) -> int:
    """Run all specs to their end.

    Args:
        specs: with their hosts; a learner's first one is that of replay.
        role: a learner node that fails ends them all; rollout nodes go on without the one that failed.
        root: folder of the repository, on every node.
        python: interpreter, on every node.

    Returns:
        Exit code: 0 when all ended well, 130 after a signal.
    """
    remotes: list[Remote] = []
    catch_signals(signal.SIGHUP)
    try:
        for spec, host in specs:
            remotes.append(start(spec, host, root, python))
        return _watch_learner(remotes) if role == "learner" else _watch_rollouts(remotes)
    except Interrupted as interruption:
        say(f"{interruption}: ending {', '.join(remote.name for remote in remotes)}")
        return 130
    finally:
        ignore_signals()
        stop(remotes)


def start(spec: NodeSpec, host: Host, root: str, python: str) -> Remote:
    """Connect to a node and give it its spec."""
    process = subprocess.Popen(
        [*ssh_command(), host.ssh, remote_line(spec, root, python)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the nodes in order
    )
    remote = Remote(spec.node, host, process)
    remote.reader = threading.Thread(target=_show, args=(remote,), name=f"output-of-{spec.node}", daemon=True)
    remote.reader.start()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code and last line say why
        process.stdin.write(spec.line().encode())
        process.stdin.flush()
    return remote


def stop(remotes: Sequence[Remote]) -> None:
    """Close every node's stdin, which ends it; then end what is left of ssh."""
    for remote in remotes:
        assert remote.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            remote.process.stdin.close()
    deadline = time.monotonic() + STOP_S
    for remote in remotes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            remote.process.wait(max(0.0, deadline - time.monotonic()))
        if remote.exit_code() is None:
            say(f"{remote.name} did not end within {STOP_S:g} s [silent]; its ssh is killed")
            remote.process.kill()
            remote.process.wait()
        if remote.reader is not None:
            remote.reader.join(1.0)


def _watch_learner(remotes: Sequence[Remote]) -> int:
    while all(remote.exit_code() is None for remote in remotes):
        time.sleep(POLL_S)
    _wait(remotes)  # the others end with the run, and say why before we ask them to
    failed = [remote for remote in remotes if remote.exit_code() not in (0, None)]
    for remote in failed:
        say(remote.failure())
    for remote in remotes:
        if remote.exit_code() is None:
            say(f"{remote.name} still runs {FAREWELL_S:g} s after another node has ended [slow]")
    return 1 if any(remote.exit_code() != 0 for remote in remotes) else 0


def _watch_rollouts(remotes: Sequence[Remote]) -> int:
    while any(remote.exit_code() is None for remote in remotes):
        for remote in remotes:
            if not remote.lost and remote.exit_code() not in (None, 0):
                remote.lost = True
                say(f"{remote.failure()}; the run goes on with the servers of other nodes")
        time.sleep(POLL_S)
    failed = [remote for remote in remotes if remote.exit_code() != 0]
    for remote in failed:
        if not remote.lost:
            say(remote.failure())
    return 1 if failed else 0


def _wait(remotes: Sequence[Remote]) -> None:
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline and any(remote.exit_code() is None for remote in remotes):
        time.sleep(POLL_S)


def _show(remote: Remote) -> None:
    assert remote.process.stdout is not None
    for raw in remote.process.stdout:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        remote.last_lines.append(line)
        with contextlib.suppress(BrokenPipeError):  # no reader any more; the node's pipe must still be emptied
            sys.stdout.write(f"[{remote.name}] {line}\n")
            sys.stdout.flush()
