"""How the process of a node is started on its host: over ssh, by a step of srun, in an actor of Ray.

What is started is `python -m slipstream.launch.node --stdin`. Its stdin has one line, the node spec, and stays open:
its end ends the node's processes in order. So nothing outlives the command that started a run.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs.schema import Config
from slipstream.launch.host_file import Host
from slipstream.launch.terminal import write_line

UP = "\x1eup"
"""Line of a node's process, which is not shown: it has read its spec, and can do its part."""
END = "\x1eend"
"""Its last line where its part has ended well: srun ends with exit code 0 as well when it has lost its machine."""
LAST_LINES = 20


class Remote(Protocol):
    """The process of one node, somewhere."""

    output: "Output"

    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""

    def how_it_ended(self) -> str:
        """What ended it, and its last line: `exit code 2: no such model`."""

    def close_stdin(self) -> None:
        """Have it end in order; does nothing once it has ended."""

    def kill(self) -> None:
        """End what is left of it, or here of the way to it; returns when that is gone and its last lines are shown."""


class Reach(Protocol):
    """A way to hosts."""

    shares_files: bool
    """All hosts have the files of this one, key files included, at the same paths."""

    def hosts(self, config: Config, *, only_rollouts: bool = False) -> dict[str, Host]:
        """The placement's nodes, in its order; with `only_rollouts` the learner's are elsewhere. Raises ConfigError."""

    def start(self, name: str, host: Host, words: Sequence[str], line: str) -> Remote:
        """Start a command on a host, in this folder, with `line` on its stdin; a failure is an exit code."""

    def shown(self, host: Host, words: Sequence[str]) -> str:
        """For a person: how `start` would start it."""

    def close(self) -> None:
        """Give back what the way itself holds, once every process has ended."""


@dataclass(slots=True)
class Output:
    """What a node's process writes: every line is shown with the node's name, and the last ones are kept."""

    name: str
    is_up: bool = False
    """Whether it has read its spec."""
    has_ended: bool = False
    """Whether its part has ended well."""
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def take(self, raw: bytes) -> None:
        """One line, as it came."""
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line in (UP, END):
            self.is_up, self.has_ended = True, line == END
            return
        self._last.append(line)
        write_line(sys.stdout, f"[{self.name}] {line}")

    def last_line(self) -> str:
        """The last one that is not blank; empty before any."""
        return next((line for line in reversed(self._last) if line.strip()), "")
