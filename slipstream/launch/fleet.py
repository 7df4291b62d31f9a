"""Run each node's part over ssh or srun, show what the nodes say, and end all of it with this process.

One ssh or step per node and role runs slipstream.launch.node, which takes its node spec from stdin and ends with
it: nothing outlives this process, the session or the connection.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.launch.children import wait_or_kill
from slipstream.launch.host_file import Host
from slipstream.launch.node_spec import NodeRole, NodeSpec
from slipstream.launch.terminal import Interrupted, catch_signals, ignore_signals, say, write_line
from slipstream.runtime import hang

SSH = "SLIPSTREAM_SSH"
"""Environment variable with another command than ssh; it gets the target and one line of shell."""
SSH_COMMAND = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
SSH_FAILED = 255
Over = Callable[[Host, Sequence[str]], list[str]]
"""A command on a host, as a command of this machine."""
POLL_S = 0.1
FAREWELL_S = 30.0
"""How long nodes have to end by themselves after the run has ended or another node has failed."""
STOP_S = 40.0
"""How long nodes have to end after their stdin was closed."""
LAST_LINES = 20


@dataclass(slots=True)
class Remote:
    """One node's ssh or step."""

    name: str
    role: NodeRole
    host: Host
    process: "subprocess.Popen[bytes]"
    reader: threading.Thread = field(init=False)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._show, name=f"output-of-{self.name}", daemon=True)
        self.reader.start()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def failure(self) -> str:
        """`node1 (10.0.0.2) failed: exit code 2: last line`."""
        code = self.exit_code()
        self.reader.join(1.0)
        last = next((line for line in reversed(self.last_lines) if line.strip()), "")
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        if code == SSH_FAILED:
            how = f"ssh to {self.host.ssh} failed or lost its connection"
        return f"{self.name} ({self.host.address}) failed: {how}{f': {last}' if last else ''}"

    def _show(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self.last_lines.append(line)
            write_line(sys.stdout, f"[{self.name}] {line}")  # also without a reader: the node's pipe must be emptied


def command_line(spec: NodeSpec, host: Host, over: Over) -> list[str]:
    """What runs on the node, in the same folder and interpreter; the node spec comes on stdin."""
    words = [sys.executable, "-m", "slipstream.launch.node", "--stdin", "--role", spec.role, "--node", spec.node]
    return over(host, words)


def over_ssh(host: Host, words: Sequence[str]) -> list[str]:
    """ssh, and a command on that machine in this folder."""
    ssh = shlex.split(os.environ.get(SSH, "")) or SSH_COMMAND
    return [*ssh, host.ssh, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"]


def run(specs: Sequence[tuple[NodeSpec, Host]], over: Over, run_dir: str) -> int:
    """Run all specs to their end.

    A learner node that fails ends them all; the run goes on without a rollout node that failed.

    Returns:
        0 when all learner nodes, or where there is none all nodes, ended well; 130 after a signal, or else 1.
    """
    remotes: list[Remote] = []
    catch_signals()
    try:
        for spec, host in specs:
            remotes.append(start(spec, host, over))
        return _watch(remotes, run_dir)
    except Interrupted as interruption:
        say(f"{interruption}: ending {', '.join(remote.name for remote in remotes)}")
        return 130
    finally:
        ignore_signals()
        stop(remotes)


def start(spec: NodeSpec, host: Host, over: Over) -> Remote:
    """Connect to a node and give it its spec."""
    process = subprocess.Popen(
        command_line(spec, host, over),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the nodes in order
    )
    remote = Remote(spec.node, spec.role, host, process)
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
    killed = wait_or_kill([remote.process for remote in remotes], STOP_S)
    for remote in remotes:
        if remote.process in killed:
            say(f"{remote.name} did not end within {STOP_S:g} s [silent]; its ssh was killed")
        remote.reader.join(1.0)


def _watch(remotes: Sequence[Remote], run_dir: str) -> int:
    """Name each node that fails; a learner's others have FAREWELL_S to end by themselves, and to say why.

    Ranks that are done end before the first node, whose launcher still waits for servers and writes picture and trace.
    """
    learners = [remote for remote in remotes if remote.role == "learner"]
    named: set[tuple[str, str]] = set()
    deadline = math.inf
    while True:
        running = [remote for remote in remotes if remote.exit_code() is None]
        for remote in remotes:
            if remote.exit_code() not in (None, 0) and (remote.role, remote.name) not in named:
                named.add((remote.role, remote.name))
                goes_on = remote.role == "rollout" and running
                say(f"{remote.failure()}{'; the run goes on with the servers of other nodes' if goes_on else ''}")
        if learners and (learners[0] not in running or any(role == "learner" for role, _ in named)):
            deadline = min(deadline, time.monotonic() + FAREWELL_S)
        if not running or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if running:
        hang.begin("launch", run_dir)
        names = [remote.name for remote in running]
        said = hang.expired("the end of the nodes", owed_by=names, waited_s=FAREWELL_S, key="a fixed deadline")
        say(f"{', '.join(names)} still run {FAREWELL_S:g} s after another node has ended{said} [slow]")
    return 1 if any(remote.exit_code() != 0 for remote in learners or remotes) else 0
