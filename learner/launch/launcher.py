"""The launcher: starts replay, the learner ranks and local rollout servers, and watches over them.

When a child dies: a rollout server is started again (N times, with backoff), then the run waits for any
server; replay and learner end the run. One root-cause line each time.
"""

import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.loading import dump
from configs.schema import Config
from learner.launch import children
from learner.launch.children import Child
from learner.report.live_view import LiveView
from replay import messages as m
from replay.channel import ChannelError, Dealer, WireError
from replay.lifeline import CANNOT_START, PARENT

log = logging.getLogger(__name__)

POLL_S = 0.1
REPLAY_START_S = 60.0
FAREWELL_S = 20.0
"""How long the others have to leave after the learner has finished."""


GOOD_ORDER_S = 5.0
"""A server that ends with exit code 0 has heard that the run is over; the launcher hears it within this time."""


class RunFailed(RuntimeError):
    """The run cannot go on; the message is the root-cause line."""


@dataclass(slots=True)
class LocalServer:
    """A rollout server of this machine and its restarts."""

    child: Child
    restarts: int = 0
    start_again_at: float | None = None
    given_up: bool = False
    left_at: float | None = None
    """When it was first seen to have ended with exit code 0."""


@dataclass(slots=True)
class Launcher:
    """One run on this machine."""

    config: Config
    resume: bool
    view: LiveView
    replay: Child | None = None
    learner: Child | None = None
    servers: dict[str, LocalServer] = field(default_factory=dict)
    address: str = ""
    _metrics_offset: int = 0
    _metrics_inode: int = 0
    _started_at: float = field(default_factory=time.time)
    _status_asked: float = 0.0
    _rank_logs: dict[Path, int] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.config.run_dir)

    def start(self) -> None:
        """Start all processes of the run. Raises RunFailed when replay does not come up."""
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        run_id = f"{self.config.run.name}-{os.getpid()}-{int(time.time())}"
        self.replay = self._start("replay", "replay.main", "--run-id", run_id, "--parent", str(os.getpid()))
        # Model and torch are loaded while replay reads its data: ranks and servers wait for it to answer.
        ready = children.wait_for_line(self.replay, r"^replay ready at (\S+)$", REPLAY_START_S)
        if ready is None:
            raise RunFailed(f"replay did not start: {self.replay.how_it_ended()}")
        self.address = ready[1]
        self.learner = self._start_learner()
        if self.config.placement.local_rollouts:
            for i in range(self.config.num_rollout_servers):
                name = f"rollout-{i}"
                self.servers[name] = LocalServer(self._start_server(name))

    def watch(self) -> None:
        """Watch until the learner has finished.

        Raises:
            RunFailed: replay or the learner died, or no rollout server is left.
        """
        assert self.learner is not None and self.replay is not None
        status: dict[str, Any] | None = None
        with Dealer(self.address, f"launcher.{os.getpid()}", m.FROM_REPLAY) as dealer:
            while (code := self.learner.exit_code()) is None:
                status = self._ask_status(dealer, status)
                self.view.update(status, self._new_rows())
                if self.replay.exit_code() is not None and not self._learner_leaves():
                    raise RunFailed(self._root_cause("replay", self.replay))
                self._watch_servers(status)
                time.sleep(POLL_S)
            status = self._ask_status(dealer, status)
            self.view.update(status, self._new_rows())
        if code != 0:
            raise RunFailed(self._learner_root_cause())

    def leave(self) -> None:
        """Give the others time to leave by themselves after the learner's Goodbye."""
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline and any(child.exit_code() is None for child in self.all_children()):
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End everything that is left, by pid."""
        children.stop(self.all_children())

    def all_children(self) -> list[Child]:
        """Every process that this launcher has started and not replaced."""
        servers = [server.child for server in self.servers.values()]
        return [child for child in (self.learner, *servers, self.replay) if child is not None]

    def _learner_leaves(self) -> bool:
        """Whether the learner, which replay was told of, ends by itself: then what it says is the cause."""
        assert self.learner is not None and self.replay is not None
        deadline = time.monotonic() + (FAREWELL_S if self.replay.exit_code() == 0 else 2.0)
        while self.learner.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.learner.exit_code() is not None

    # ---- starting --------------------------------------------------------------------------------------

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        command = [sys.executable, "-m", module, "--config", str(self.run_dir / "config.yaml"), *arguments]
        return children.start(name, command, self._log_of(name), {})

    def _start_server(self, name: str) -> Child:
        arguments = ["--replay", self.address, "--server-name", name, "--parent", str(os.getpid())]
        return self._start(name, "rollout_server.main", *arguments)

    def _start_learner(self) -> Child:
        command = [
            sys.executable,
            "-m",
            "learner.launch.torchrun",
            "--standalone",
            f"--nproc-per-node={self.config.num_learner_ranks}",
            "-m",
            "learner.train",
            "--config",
            str(self.run_dir / "config.yaml"),
            "--replay",
            self.address,
            *(["--resume"] if self.resume else []),
        ]
        logs = [self.run_dir / "logs" / f"learner-{rank}.log" for rank in range(self.config.num_learner_ranks)]
        self._rank_logs = {path: path.stat().st_size if path.exists() else 0 for path in logs}
        environment = {
            "OMP_NUM_THREADS": str(self.config.learner.num_threads),
            "GLOO_SOCKET_IFNAME": "lo",
            PARENT: str(os.getpid()),
        }
        return children.start("learner", command, self._log_of("learner"), environment)

    def _log_of(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    # ---- watching --------------------------------------------------------------------------------------

    def _run_is_over(self, status: dict[str, Any] | None) -> bool:
        return bool(status and status.get("ended")) or (self.replay is not None and self.replay.exit_code() is not None)

    def _watch_servers(self, status: dict[str, Any] | None) -> None:
        now = time.monotonic()
        for name, server in self.servers.items():
            if server.given_up:
                continue
            if server.start_again_at is not None:
                if now >= server.start_again_at:
                    server.start_again_at = server.left_at = None
                    server.child = self._start_server(name)
                continue
            if server.child.exit_code() is None:
                continue
            if server.child.exit_code() == 0:
                server.left_at = server.left_at or now
                server.given_up = self._run_is_over(status)
                if server.given_up or now - server.left_at < GOOD_ORDER_S:
                    continue
            self._server_died(name, server, now)

    def _server_died(self, name: str, server: LocalServer, now: float) -> None:
        cause = self._root_cause(name, server.child)
        limit = self.config.rollout.restarts
        if server.child.exit_code() == CANNOT_START:
            server.given_up = True
            if all(other.given_up for other in self.servers.values()):
                raise RunFailed(cause)
            self.view.event(f"{cause}; it is not started again, the run goes on with other servers")
        elif server.restarts < limit:
            wait = self.config.rollout.restart_backoff_s * 2**server.restarts
            server.restarts += 1
            server.start_again_at = now + wait
            self.view.event(f"{cause}; restart {server.restarts} of {limit} in {wait:g} s")
        else:
            server.given_up = True
            self.view.event(
                f"{cause}; no restart left (rollout.restarts {limit}): the run goes on with other servers, or waits"
                f" {self.config.rollout.wait_for_servers_s:g} s for one (rollout.wait_for_servers_s)"
            )

    def _root_cause(self, name: str, child: Child) -> str:
        return f"{name} (pid {child.pid}) died: {child.how_it_ended()}"

    def _learner_root_cause(self) -> str:
        """The rank that was killed, or else the rank that stopped first: others fail because it is gone."""
        assert self.learner is not None
        killed = children.killed_rank(self.learner.log_path, self.learner.offset)
        if killed:
            return f"the learner stopped: {killed}"
        stops = [line for path, offset in self._rank_logs.items() for line in children.stop_lines(path, offset)]
        if stops:
            return f"the learner stopped: {children.without_time(min(stops))}"
        return self._root_cause("learner", self.learner)

    def _ask_status(self, dealer: Dealer, status: dict[str, Any] | None) -> dict[str, Any] | None:
        now = time.monotonic()
        try:
            while (envelope := dealer.poll(0)) is not None:
                if isinstance(envelope.message, m.Status):
                    status = envelope.message.state
            if now - self._status_asked > 0.5:
                self._status_asked = now
                dealer.send(m.StatusRequest())
        except (WireError, ChannelError) as error:
            log.warning("status of replay: %s", error)
        return status

    def _new_rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._metrics_inode:  # a resumed learner sets rows aside by writing the file anew
                self._metrics_inode, self._metrics_offset = found.st_ino, 0
            file.seek(self._metrics_offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the learner is writing it right now
                self._metrics_offset += len(line)
                row = json.loads(line)
                if row["time"] >= self._started_at:
                    rows.append(row)
        return rows
