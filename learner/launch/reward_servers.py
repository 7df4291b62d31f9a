"""Reward servers of one machine: started before its rollout servers, and kept alive."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from configs.algorithm import Rollout
from configs.plan import Process
from learner.launch import children
from learner.launch.children import Child
from learner.launch.servers import DidNotStart, LocalServers

LISTENS = r"^reward server listens at (\S+)$"
LISTENS_S = 60.0
"""For its imports; it loads its model afterwards."""


@dataclass(slots=True)
class RewardServers:
    """The reward servers of this machine: none where the run has no reward model.

    `start` starts a process by name, command and environment; `say` prints. They are started again as often as
    rollout servers are, at the port that they had.
    """

    config: Rollout
    processes: Sequence[Process]
    start: Callable[[str, list[str], Mapping[str, str]], Child]
    say: Callable[[str], None]
    parent: Sequence[str]
    """`--parent` and the pid to end with."""
    _ports: dict[str, str] = field(default_factory=dict)
    _servers: LocalServers = field(init=False)

    def __post_init__(self) -> None:
        self._servers = LocalServers(self.config, self._start, self.say, are_needed=True)

    @property
    def children(self) -> list[Child]:
        """The present process of each."""
        return self._servers.children

    def begin(self) -> None:
        """Start all of them."""
        for process in self.processes:
            self._servers.add(process.name)

    def arguments(self) -> list[str]:
        """What rollout servers of this machine get, once all reward servers listen. Raises RunFailed: one does not."""
        deadline, words = time.monotonic() + LISTENS_S, []
        for process, child in zip(self.processes, self.children, strict=True):
            left = max(0.0, deadline - time.monotonic())
            found = children.wait_for_line(child, LISTENS, left, progress=r"(?!)", show=self.say)
            if found is None:
                ended = child.how_it_ended() + children.late(child, LISTENS_S)
                raise DidNotStart(f"{child.name} did not start: {ended}")
            self._ports[child.name] = found[1].rpartition(":")[2]
            words += ["--reward", f"{process.node}={found[1]}"]
        return words

    def watch(self, run_is_over: bool) -> None:
        """Look once at each. Raises RunFailed: none is left, and no answer could be scored any more."""
        self._servers.watch(run_is_over)

    def _start(self, name: str) -> Child:
        (process,) = [process for process in self.processes if process.name == name]
        port = ["--port", self._ports[name]] if name in self._ports else []
        return self.start(name, [*process.command, *port, *self.parent], process.environment)
