"""Hosts that a command of this machine reaches: over ssh; by steps of srun: srun.py."""

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from slipstream.launch.host_file import Host, read_hosts
from slipstream.launch.node_spec import hosts_of
from slipstream.launch.reach import Output
from slipstream.runtime.ending import how

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
READ_S = 1.0
"""How long the last lines of a process that has ended may take to be read."""


class Command:
    """A command of this machine, whose other end is the process of a node."""

    def __init__(self, name: str, command: Sequence[str], line: str, lost: str = "") -> None:
        """`lost` says what exit code 255 means, where that is the way's own."""
        self.output = Output(name)
        self._lost = lost
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the start script alone, which ends the nodes in order
        )
        self._reader = threading.Thread(target=self._read, name=f"output-of-{name}", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code and last line say why
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it; 1 where the way to it has ended well without it."""
        code = self._process.poll()
        if code != 0 or not self.output.is_up:
            return code
        self._reader.join(READ_S)
        return 0 if self.output.has_ended else 1

    def how_it_ended(self) -> str:
        """What ended it, and its last line."""
        code = self._process.wait()
        self._reader.join(READ_S)
        said = self._lost if code == SSH_FAILED and self._lost else how(code) if code else "the way to it has ended"
        # what was killed from outside says no cause: its last line is unrelated
        last = self.output.last_line() if -code not in (signal.SIGKILL, signal.SIGTERM) else ""
        return f"{said}: {last}" if last else said

    def close_stdin(self) -> None:
        """Have it end in order."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the command, also where the other end of it does not; show its last lines."""
        self._process.kill()
        self._process.wait()
        self._reader.join(READ_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:  # also where nothing is shown any more: the node's pipe must be emptied
            self.output.take(raw)


class Commands:
    """A way by commands; which ones is the subclass's."""

    shares_files = False

    def hosts(self, config: Config, *, only_rollouts: bool = False) -> dict[str, Host]:
        """As Reach.hosts."""
        raise NotImplementedError

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """A command on a host, in this folder, as a command of this machine."""
        raise NotImplementedError

    def start(self, name: str, host: Host, words: Sequence[str], line: str) -> Command:
        """As Reach.start."""
        return Command(name, self.command(host, words), line)

    def shown(self, host: Host, words: Sequence[str]) -> str:
        """As Reach.shown."""
        return shlex.join(self.command(host, words))

    def close(self) -> None:
        """It holds nothing."""


@dataclass(frozen=True, slots=True)
class Ssh(Commands):
    """The machines of a host file."""

    file: Path

    def hosts(self, config: Config, *, only_rollouts: bool = False) -> dict[str, Host]:
        """As the host file has them. Raises ConfigError."""
        return hosts_of(config, read_hosts(self.file))

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Of ssh, and one line of shell on that machine."""
        ssh = shlex.split(os.environ.get(SSH, "")) or SSH_COMMAND
        return [*ssh, host.ssh, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"]

    def start(self, name: str, host: Host, words: Sequence[str], line: str) -> Command:
        """As Reach.start."""
        return Command(name, self.command(host, words), line, lost=f"ssh to {host.ssh} failed or lost its connection")
