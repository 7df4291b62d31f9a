"""Rollout servers of one machine: started, started again when they die, given up after `rollout.restarts`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.algorithm import Rollout
from learner.launch.children import Child
from learner.launch.restarts import Restarts
from replay.lifeline import CANNOT_START, RUN_FAILED

GOOD_ORDER_S = 5.0
"""Exit code 0 means that the server knows the run is over; the launcher learns it within this time."""


class RunFailed(RuntimeError):
    """The run cannot go on; the message is the root-cause line."""


@dataclass(slots=True)
class LocalServer:
    """A rollout server of this machine and its restarts."""

    child: Child
    restarts: Restarts
    given_up: bool = False
    left_at: float | None = None
    """When it was first seen to have ended with exit code 0."""


@dataclass(slots=True)
class LocalServers:
    """The rollout servers of this machine; `start` launches one by name, `say` prints."""

    config: Rollout
    start: Callable[[str], Child]
    say: Callable[[str], None]
    by_name: dict[str, LocalServer] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Start one more."""
        restarts = Restarts(self.config.restarts, backoff_s=self.config.restart_backoff_s)
        self.by_name[name] = LocalServer(self.start(name), restarts)

    @property
    def children(self) -> list[Child]:
        """The present process of each."""
        return [server.child for server in self.by_name.values()]

    @property
    def all_over(self) -> bool:
        """Whether none runs and none will be started again."""
        return all(server.given_up for server in self.by_name.values())

    @property
    def failures(self) -> list[str]:
        """The names of those that were given up without having left in good order."""
        return [name for name, server in self.by_name.items() if server.given_up and server.child.exit_code() != 0]

    def watch(self, run_is_over: bool) -> None:
        """Look once at each.

        Args:
            run_is_over: a server that ends in good order ends with the run.

        Raises:
            RunFailed: none of them can ever start.
        """
        now = time.monotonic()
        for name, server in self.by_name.items():
            if server.given_up:
                continue
            if server.restarts.due is not None:
                if server.restarts.is_due():
                    server.left_at, server.child = None, self.start(name)
                continue
            code = server.child.exit_code()
            if code is None:
                continue
            if code == 0:
                server.left_at = server.left_at or now
                server.given_up = run_is_over
                if server.given_up or now - server.left_at < GOOD_ORDER_S:
                    continue
            self._died(name, server)

    def _died(self, name: str, server: LocalServer) -> None:
        cause, limit = root_cause(name, server.child), self.config.restarts
        code = server.child.exit_code()
        if code == RUN_FAILED:
            server.given_up = True
            self.say(f"{name} ended because the run has failed")
        elif code == CANNOT_START:
            server.given_up = True
            if self.all_over:
                raise RunFailed(cause)
            self.say(f"{cause}; it is not started again, the run goes on with other servers")
        elif not server.restarts.are_used_up:
            self.say(f"{cause}; {server.restarts.plan()}")
        else:
            server.given_up = True
            self.say(
                f"{cause}; no restart left (rollout.restarts {limit}): the run goes on with other servers, or waits"
                f" {self.config.wait_for_servers_s:g} s for one (rollout.wait_for_servers_s)"
            )


def root_cause(name: str, child: Child) -> str:
    """Which process died, and how, in one line."""
    return f"{name} (pid {child.pid}) died: {child.how_it_ended()}"
