"""The launcher: starts replay, the learner ranks and local rollout servers, and watches over them.

A child that dies is named in one line. A rollout server is started again (N times, with backoff), then the run waits
for any server; replay and a learner that was killed are started again in place: replay goes on from its journal, the
learner, on all its nodes, from its newest checkpoint and the journalled steps after it. What refuses to go on ends the
run.
"""

import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from configs.loading import dump
from configs.schema import Config
from learner.checkpoints.folders import latest_complete
from learner.record import ledger
from replay import messages as m
from replay.channel import ChannelError, Dealer, WireError, load_keys
from slipstream.launch import children
from slipstream.launch.announcements import Announcements
from slipstream.launch.children import Child, RowTail
from slipstream.launch.learner.generations import Generations
from slipstream.launch.learner.ranks import RankGroup, cause
from slipstream.launch.machine import this_machine
from slipstream.launch.run_folder import JOB, RunFolder, new_job
from slipstream.launch.servers import GOOD_RUN_S, DidNotStart, LocalServers, NodeAway, Restarts, RunFailed
from slipstream.plan.processes import Machine, Plan, assign
from slipstream.runtime import ending
from slipstream.runtime.hang import registry
from slipstream.runtime.lifeline import CANNOT_GO_ON, CHECKPOINT, RUN_FAILED

log = logging.getLogger(__name__)

POLL_S = 0.1
STATUS_S = 0.5
REPLAY_START_S = 60.0
OVER_S = 1.0
LEAVES_S = 3.0
"""The ranks have this long to leave after one of them."""
NOTED_S = 1.0
"""How long another node may take to note what its ranks died of."""
ABSENT_S = 10.0
"""Learner nodes that are away for longer are named."""
CHECKPOINT_S = 15.0
"""How long a run that is told to end may take for a last checkpoint: the end of a step, the next one, and the copy."""
FAREWELL_S = 20.0
"""How long the others have to leave after the learner has finished."""


class View(Protocol):
    """What shows the run to a person (slipstream/view/live_view.py)."""

    def event(self, text: str) -> None:
        """Say something that happened beside the steps."""

    def update(self, status: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show replay's status, None before it has answered, and the newest rows of metrics.jsonl."""

    def close(self, summary: str) -> None:
        """Show the last state, and how the run ended."""


@dataclass(slots=True)
class Launcher:
    """One run on this machine."""

    config: Config
    resume: bool
    view: View
    learner_module: str = "learner.train"
    """What the learner ranks run; benchmarks take the loop of this one with phases of their own."""
    server_command: tuple[str, ...] = ("rollout_server.main",)
    """What rollout servers run: a module and its first arguments."""
    teacher_command: tuple[str, ...] = ("rollout_server.teacher",)
    """The same of teachers."""
    play: str | None = None
    """Run folder whose journal is played back instead of rolling out."""
    is_dry: bool = False
    """Nothing will be started, so this machine need not have the run's GPUs."""
    address: str = ""
    """Of replay, once it listens."""
    replay: Child = field(init=False)
    learner: RankGroup = field(default_factory=RankGroup)
    """The ranks of this node, once all other learner nodes have theirs."""
    servers: LocalServers = field(init=False)
    teachers: LocalServers = field(init=False)
    processes: dict[str, Child] = field(default_factory=dict)
    """The present process of each name."""
    _machine: Machine = field(init=False)
    _run_id: str = ""
    _replay_restarts: Restarts = field(init=False)
    _learner_restarts: Restarts = field(init=False)
    _metrics: RowTail = field(init=False)
    _announcements: Announcements = field(init=False)
    _started_at: float = field(default_factory=time.time)
    _status: dict[str, Any] | None = None
    _status_asked: float = 0.0
    _generations: Generations = field(init=False)
    _began: float = 0.0
    """When the present generation of ranks did."""
    _missed: bool = False
    """Nodes that have not come to it were named."""
    _failed: float | None = None
    """When the first rank or node of it was seen to have failed."""

    def __post_init__(self) -> None:
        self._machine = this_machine(self.config, is_of_the_run=not self.is_dry)
        self._replay_restarts = Restarts(self.config.replay.restarts)
        # A learner that only ever waits for its first batch is not running well.
        patience = 2 * self.config.learner.batch_deadline_s
        self._learner_restarts = Restarts(self.config.learner.restarts, good_run_s=max(GOOD_RUN_S, patience))

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.config.run_dir)

    @property
    def node(self) -> str:
        """What the placement calls this machine: replay and rank 0 are where the launcher is."""
        return self.config.shares[0].node

    @property
    def lacks_gpus(self) -> bool:
        """Whether this machine has none of the GPUs that the run is placed on."""
        return self.config.placement.device == "cuda" and self._machine.gpus is None

    def plan(self) -> Plan:
        """The processes of this node; has replay's address once known. Raises ConfigError."""
        return assign(
            self.config,
            {self.node: self._machine},
            config_file=str(self.run_dir / "config.yaml"),
            python=sys.executable,
            replay=self.address or None,
            resume=self.resume,
            only=self.node,
            learner_module=self.learner_module,
            server_command=self.server_command,
            teacher_command=self.teacher_command,
        )

    def start(self) -> None:
        """Start all processes of the run. Raises RunFailed when replay does not come up."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if not (self.run_dir / "config.yaml").exists():  # `python -m learner.main` has written it to claim the folder
            (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        self._metrics = RowTail(self.run_dir / "metrics.jsonl", newest=self._started_at)
        self._announcements = Announcements(self.run_dir / "logs")
        # the same for all starts of a job, so that rollout servers go on with the next one
        self._run_id = f"{self.config.run.name}-{os.environ.get(JOB) or new_job()}"
        parent = ("--parent", str(os.getpid()))
        self._generations = Generations(self.config)
        self._begin_generation()  # before replay answers: other learner nodes read then what this start has decided
        # Model and torch are loaded while replay reads its data: ranks and servers wait for it to answer.
        self.address = self._start_replay(*(["--play", self.play] if self.play is not None else []))
        self._start_ranks()
        by_name = {process.name: process for process in self.plan().processes}

        def start(name: str) -> Child:
            return self._start(name, [*by_name[name].command, *parent], by_name[name].environment)

        self.servers = LocalServers(self.config.rollout, start, self.view.event)
        self.teachers = LocalServers(self.config.rollout, start, self.view.event, are_teachers=True)
        for name, process in by_name.items():
            if process.role == "teacher" and self.play is None:
                self.teachers.add(name)
            elif process.role == "rollout" and self.config.placement.local_rollouts:
                self.servers.add(name)

    def watch(self) -> None:
        """Watch until the learner has finished.

        Raises:
            RunFailed: replay or the learner died, no rollout server is left, or the run folder is gone.
        """
        keys, folder = load_keys(self.config.network.keys), RunFolder(self.run_dir)
        with Dealer(self.address, f"launcher.{secrets.token_hex(4)}", m.FROM_REPLAY, keys=keys) as dealer:
            while not self.learner.is_done:
                folder.check()  # first: processes that die of it name some file
                try:
                    self._watch_once(dealer)
                except FileNotFoundError as error:
                    folder.check_after(error)
                time.sleep(POLL_S)
            self._look(dealer)

    def _watch_once(self, dealer: Dealer) -> None:
        """Look at everything."""
        self._look(dealer)
        if self.replay.exit_code() is not None:
            self._replay_died()
        self._watch_learner(dealer)
        for group in (self.servers, self.teachers):
            group.end_silent(self._status["silent"] if self._status else ())
            group.watch(self._run_is_over())

    def leave(self) -> None:
        """Wait for the other processes to exit after the learner's Goodbye."""
        deadline = time.monotonic() + FAREWELL_S
        leaving = list(self.processes.values())
        while time.monotonic() < deadline and any(child.exit_code() is None for child in leaving):
            time.sleep(POLL_S)
        for child in leaving:
            if said := children.late(child, FAREWELL_S):
                self.view.event(f"{child.name} (pid {child.pid}) has not left after the last step{said} [slow]")

    def write_checkpoint(self, why: str) -> None:
        """Have the learner write a checkpoint of its next step, for at most CHECKPOINT_S. Raises Interrupted."""
        if not self.learner.is_running or self.play is not None:
            return
        before, lines = latest_complete(self.run_dir)[0], ledger.read(self.run_dir)
        if not lines or (before is not None and before.name == f"step_{lines[-1]['step']}"):
            return
        self.view.event(f"{why}: a checkpoint is written, for at most {CHECKPOINT_S:g} s; another signal ends at once")
        self.replay.process.send_signal(CHECKPOINT)
        deadline = time.monotonic() + CHECKPOINT_S
        while time.monotonic() < deadline and self.learner.is_running:
            if latest_complete(self.run_dir)[0] != before:
                return
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End everything that is left, by pid."""
        children.stop(list(reversed(self.processes.values())))

    # ---- in place ---------------------------------------------------------------------------------------

    def _replay_died(self) -> None:
        """Restart replay in place, from its journal. Raises RunFailed when that cannot help."""
        restarts = self._replay_restarts
        if restarts.due is None:
            cause = self.replay.root_cause()
            if not self._replay_was_killed() or self.play is not None:
                if not self._learner_leaves():
                    raise RunFailed(cause)
                return
            self.view.event(f"{restarts.begin(cause, 'replay.restarts')} in place, from its journal")
        if not restarts.is_due():
            return
        self.resume = True
        try:
            self._start_replay("--port", self.address.rpartition(":")[2])
        except RunFailed:
            if not self._replay_was_killed():  # else, while it read its journal: the next look starts it again
                raise

    def _watch_learner(self, dealer: Dealer) -> None:
        """Restart the learner from its newest checkpoint when a rank failed. Raises RunFailed when that cannot help."""
        restarts, now = self._learner_restarts, time.monotonic()
        if restarts.due is not None:
            if restarts.is_due():
                self.resume = True
                self._begin_generation()
            return
        self.learner.note_failures()
        if (failure := self._failure()) is None:
            self._failed = None
            self._start_ranks()
            return
        self._failed = self._failed or now
        stays = self.learner.is_running
        if now - self._failed < (LEAVES_S if stays else NOTED_S * (len(self.config.learner_nodes) > 1)):
            return
        if stays:
            self.view.event(f"{failure.said}; a rank does not leave, and is ended by force")
        said = f"the learner stopped: {failure.said}"
        if failure.code == CANNOT_GO_ON or self._replay_says_over(dealer):
            raise RunFailed(said)
        self.view.event(f"{restarts.begin(said, 'learner.restarts')} from its newest checkpoint")
        self.learner.end()

    def _failure(self) -> ending.Ending | None:
        """Why the present generation of ranks cannot go on; None while it can."""
        noted = ending.of_ranks(self.run_dir / "logs")
        failed = cause([one for one in noted if one.generation == self._generations.number])
        if failed is not None:
            return replace(failed, said=children.without_time(failed.said))
        ranks = self._generations.pids | {(child.name, child.pid) for child in self.learner.children}
        status = self._status or {"peers": (), "silent": ()}
        limit = self.config.network.silent_after_s
        for peer in (*status["silent"], *(each for each in status["peers"] if each["silent_s"] > limit)):
            if (peer["name"], peer["pid"]) in ranks:
                said = f"{peer['name']} (pid {peer['pid']}) says nothing to replay (network.silent_after_s) [silent]"
                return ending.Ending(1, said, symptom="silent")
        if self._generations.all_came and (again := self._generations.missing()):
            return ending.Ending(1, f"learner node {again[0]} was started again [closed]", symptom="closed")
        return None

    def _learner_leaves(self) -> bool:
        """Whether the learner ends by itself within a deadline; its log then names the cause."""
        deadline = time.monotonic() + (FAREWELL_S if self.replay.exit_code() == 0 else 2.0)
        while self.learner.is_running and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(self.learner.children) and not self.learner.is_running

    def _replay_says_over(self, dealer: Dealer) -> bool:
        """Whether replay reports, within OVER_S, that the learner has ended the run."""
        deadline = time.monotonic() + OVER_S
        self._status = None
        while time.monotonic() < deadline:
            self._ask_status(dealer, every_s=0.0)
            if self._run_is_over():
                return not self._replay_was_killed()
            time.sleep(POLL_S)
        return False

    def _replay_was_killed(self) -> bool:
        return self.replay.exit_code() not in (None, 0, CANNOT_GO_ON, RUN_FAILED)

    def _run_is_over(self) -> bool:
        return bool(self._status and self._status.get("ended")) or self.replay.exit_code() is not None

    # ---- starting --------------------------------------------------------------------------------------

    def _start(self, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
        self.processes[name] = children.start(name, command, self.run_dir / "logs" / f"{name}.log", environment)
        return self.processes[name]

    def _start_replay(self, *arguments: str) -> str:
        """Start replay; returns its address. Raises RunFailed when it does not come up."""
        (process,) = self.plan().of(self.node, "replay")
        own = ("--run-id", self._run_id, "--parent", str(os.getpid()), *arguments)
        self.replay = self._start("replay", [*process.command, *own], process.environment)
        # It reads its data and journal first; the learner waits as long for a batch.
        limit = max(REPLAY_START_S, self.config.learner.batch_deadline_s)
        progress = r" INFO progress: (.*)$"
        address = children.wait_for(self.replay, self._replay_serves, limit, progress=progress, show=self.view.event)
        if address is None:
            raise DidNotStart(f"replay did not start: {self.replay.how_it_ended()}{children.late(self.replay, limit)}")
        return address

    def _replay_serves(self) -> str | None:
        noted = registry.member(self.run_dir, "replay")
        return noted.replay if noted is not None and noted.pid == self.replay.pid and noted.is_here() else None

    def _begin_generation(self) -> None:
        """Have all learner nodes start their ranks anew."""
        if self.resume:
            self.say_fallback()
        for path in (self.run_dir / "logs").glob(f"learner-*{ending.SUFFIX}"):
            path.unlink(missing_ok=True)
        self._generations.begin(resumes=self.resume)
        self.learner, self._failed, self._began, self._missed = RankGroup(), None, time.monotonic(), False

    def _start_ranks(self) -> None:
        """Start those of this node as soon as the other nodes have theirs. Raises RunFailed when one stays away."""
        if self.learner.children:
            return
        waited, limit = time.monotonic() - self._began, self.config.placement.give_up_after_s
        if missing := ", ".join(self._generations.missing()):
            key = "placement.give_up_after_s"
            if waited > limit:
                raise NodeAway(
                    f"learner node {missing} did not come within {limit:g} s ({key}) [silent]; start its part again and"
                    f" --resume {self.run_dir}, or place the learner on the nodes that are left"
                )
            if waited > ABSENT_S and not self._missed:
                self._missed = True
                self.view.event(f"the learner waits for node {missing}, for at most {limit:g} s ({key})")
            return
        (process,) = self.plan().of(self.node, "learner")
        self.learner = RankGroup.start(
            self._generations.number, process.command, process.of_ranks, self.run_dir / "logs"
        )
        self.processes |= {child.name: child for child in self.learner.children}

    def say_fallback(self) -> None:
        """Show which checkpoints are passed over, and where the learner continues."""
        found, passed_over = latest_complete(self.run_dir)
        for line in passed_over:
            there = f"from {found.name}" if found is not None else "without a checkpoint"
            self.view.event(f"{line}; the learner goes on {there}")

    # ---- watching --------------------------------------------------------------------------------------

    def _look(self, dealer: Dealer) -> None:
        """Ask replay how the run stands, and show it with the newest metrics."""
        self._ask_status(dealer)
        rows = self._metrics.new_rows()
        for line in self._announcements.new():
            self.view.event(line)
        self.view.update(self._status, rows)

    def _ask_status(self, dealer: Dealer, every_s: float = STATUS_S) -> None:
        try:
            while (envelope := dealer.poll(0)) is not None:
                if isinstance(envelope.message, m.Status):
                    self._status = envelope.message.state
            if time.monotonic() - self._status_asked > every_s:
                self._status_asked = time.monotonic()
                dealer.send(m.StatusRequest())
        except (WireError, ChannelError) as error:
            log.warning("status of replay: %s", error)
