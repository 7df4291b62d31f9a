"""Rollout servers of one machine, and how often a process is started again: `rollout.restarts` and the like."""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.algorithm import Rollout
from configs.errors import SlipstreamError, coded
from slipstream.launch.children import Child
from slipstream.runtime.lifeline import CANNOT_START, RUN_FAILED, START_REFUSED

SOON_S = 10.0
"""A process that lived for less doubles the wait before its next start."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
"""Less than network.silent_after_s by default, so peers do not give replay up meanwhile."""
GOOD_RUN_S = 3600.0
"""A process that ran for this long gets its restarts back, so a run of weeks survives its fourth lost machine."""
GOOD_ORDER_S = 5.0
"""Exit code 0 means that the server knows the run is over; the launcher learns it within this time."""


class RunFailed(SlipstreamError, RuntimeError, code="SLIP-RUN-01"):
    """The run cannot go on; the message is the root-cause line."""


class EndedForGood(RunFailed):
    """The run or a part of it cannot go on, and another start would end alike."""


class NoneCanStart(EndedForGood):
    """Every rollout server of this machine refuses what it was given."""


class DidNotStart(RunFailed, code="SLIP-RUN-07"):
    """A process of the run did not start in time."""


class NodeAway(EndedForGood, code="SLIP-RUN-10"):
    """A learner node is away for longer than placement.give_up_after_s."""


@dataclass(slots=True)
class Restarts:
    """Restart budget of one process: the first restart is immediate, repeated ones back off."""

    limit: int
    good_run_s: float = GOOD_RUN_S
    backoff_s: float | None = None
    """Wait before the first restart; doubles, to LONGEST_WAIT_S. None is at once, unless the process dies soon."""
    count: int = 0
    due: float | None = None
    """Monotonic second of the next start; None while nothing has died."""
    _started: float = field(default_factory=time.monotonic)
    _wait_s: float = 0.0

    @property
    def are_used_up(self) -> bool:
        """Whether a death now ends the run."""
        return self.count >= self.limit and time.monotonic() - self._started < self.good_run_s

    def plan(self) -> str:
        """Schedule the next start after a death; returns `restart 2 of 3 in 0.5 s`."""
        now = time.monotonic()
        lived = now - self._started
        if lived >= self.good_run_s:
            self.count = 0
        if self.backoff_s is not None:
            self._wait_s = min(self.backoff_s * 2.0 ** min(self.count, 30), max(self.backoff_s, LONGEST_WAIT_S))
        elif self.count > 0 and lived < SOON_S:
            self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s or FIRST_WAIT_S)
        else:
            self._wait_s = 0.0
        self.count += 1
        self.due = now + self._wait_s
        return f"restart {self.count} of {self.limit}" + (f" in {self._wait_s:g} s" if self._wait_s else "")

    def begin(self, cause: str, key: str) -> str:
        """What is said of a death that a restart follows. Raises RunFailed when `key` allows none."""
        if self.are_used_up:
            raise RunFailed(f"{cause}; no restart left ({key} {self.limit})" if self.limit else cause)
        return f"{coded(cause, RunFailed.code)}; {self.plan()}"

    def is_due(self) -> bool:
        """Whether to start it now; once."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        self.due, self._started = None, now
        return True


@dataclass(slots=True)
class LocalServer:
    """A rollout server of this machine and its restarts."""

    child: Child
    restarts: Restarts
    given_up: bool = False
    left_at: float | None = None
    """When it was first seen to have ended with exit code 0."""
    last_code: int = 0
    """Of the process before."""
    ended_as_silent: Child | None = None
    """The process that was ended because replay heard nothing of it."""


@dataclass(slots=True)
class LocalServers:
    """Rollout servers or teachers of this machine; `start` launches one by name, `say` prints."""

    config: Rollout
    start: Callable[[str], Child]
    say: Callable[[str], None]
    are_teachers: bool = False
    """Processes of teachers: the run goes on without none of them."""
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
    def failures(self) -> dict[str, int | None]:
        """Names and exit codes of those that were given up without having left in good order."""
        codes = {name: server.child.exit_code() for name, server in self.by_name.items() if server.given_up}
        return {name: code for name, code in codes.items() if code != 0}

    def end_silent(self, silent: Iterable[Mapping[str, Any]]) -> None:
        """End those of our processes that are among replay's `silent` ones, so that `watch` starts them again.

        What computes for long still beats (rollout_server/server.py). Without restarts left, the process stays: it may
        be continued.
        """
        # Names are the run's own: containers of one host may share its name, and count their pids alike.
        here = {(one["name"], one["pid"]) for one in silent if one["host"] == socket.gethostname()}
        for name, server in self.by_name.items():
            is_silent = (name, server.child.pid) in here and server.child.exit_code() is None
            if is_silent and not server.restarts.are_used_up:
                server.ended_as_silent = server.child
                server.child.process.kill()

    def watch(self, run_is_over: bool) -> None:
        """Look once at each.

        Args:
            run_is_over: a server that ends in good order ends with the run.

        Raises:
            RunFailed: none of them can ever start, or none is left of those that are needed.
        """
        now = time.monotonic()
        for name, server in self.by_name.items():
            code = server.child.exit_code()
            if server.given_up or code is None:
                continue
            if server.restarts.due is not None:
                if server.restarts.is_due():
                    server.left_at, server.child = None, self.start(name)
                continue
            if code == 0:
                server.left_at = server.left_at or now
                server.given_up = run_is_over
                if server.given_up or now - server.left_at < GOOD_ORDER_S:
                    continue
            self._died(name, server, code)

    def _died(self, name: str, server: LocalServer, code: int) -> None:
        before, server.last_code = server.last_code, code
        code = CANNOT_START if before == code == START_REFUSED else code
        cause, limit = coded(server.child.root_cause(), RunFailed.code), self.config.restarts
        if server.ended_as_silent is server.child:
            who = f"{name} (pid {server.child.pid}) says nothing to replay (network.silent_after_s)"
            cause = coded(f"{who}: ended by SIGKILL [silent]", RunFailed.code)
        if code not in (RUN_FAILED, CANNOT_START) and not server.restarts.are_used_up:
            self.say(f"{cause}; {server.restarts.plan()}")
            return
        server.given_up = True
        if code == RUN_FAILED:
            self.say(f"{name} ended because the run has failed")
        elif self.are_teachers:
            kind = NoneCanStart if code == CANNOT_START else RunFailed
            raise kind(cause if code == CANNOT_START else f"{cause}; no restart left (rollout.restarts {limit})")
        elif code == CANNOT_START:
            if self.all_over:
                raise NoneCanStart(cause)
            self.say(f"{cause}; it is not started again, the run goes on with other servers")
        else:
            self.say(
                f"{cause}; no restart left (rollout.restarts {limit}): the run goes on with other servers, or waits"
                f" {self.config.wait_for_servers_s:g} s for one (rollout.wait_for_servers_s)"
            )
