"""One run under faults: the real launcher, rollout servers behind proxies, and a supervisor that starts those again."""

import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from types import TracebackType

from configs.loading import load
from configs.schema import Config
from learner.launch.hosts.status_client import ask_replay
from scripts.chaos import processes
from scripts.chaos.logs import Logs
from scripts.chaos.proxy import Link, Proxy
from scripts.chaos.settings import ROOT, SERVERS, START_S, STEPS_PER_FAULT, Variant, arguments, recovery_s
from scripts.chaos.skewed_clock import DOUBLE
from scripts.chaos.skewed_clock import ROLES as CLOCKS
from scripts.chaos.watch import Producer, Watch

TICK_S = 0.004
PACE_EVERY_S = 0.3
PACES_S = (0.01, 0.05, 0.5)
"""Seconds that the reward of one trajectory takes (four make a group) while the run is where its faults are, ahead of
them, and so far ahead that it would end before they do."""
RESTART_S = 0.2


class Hung(RuntimeError):
    """A wait of the harness was not over by its deadline; the message says which."""


class Ended(RuntimeError):
    """The run ended although it should go on."""


class Trial:
    """A run and everything around it; a context manager that leaves nothing behind."""

    def __init__(self, variant: Variant, work: Path, data: Path, num_faults: int) -> None:
        self.variant, self.work, self.num_faults = variant, work, num_faults
        work.mkdir(parents=True)
        self.folder = work / "run"
        self.output = work / "launcher.out"
        self.outputs = {name: work / f"{name}.out" for name in SERVERS}
        self.logs = Logs(self.folder / "logs", [self.output, *self.outputs.values()])
        producers = {name: Producer(work / f"acks-{name}.jsonl") for name in SERVERS}
        self.watch = Watch(self.folder, work / "journal", producers)
        self.proxy = Proxy()
        self.links: dict[str, Link] = {}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.faults_done = 0
        self.over = False
        self._restart_at: dict[str, float] = {}
        self._paced_at = 0.0
        self._pace = ""
        self._clock = work / "clock"
        self._clock.write_bytes(bytes(DOUBLE.size * len(CLOCKS)))
        (work / "site").mkdir()
        shutil.copyfile(Path(__file__).with_name("skewed_clock.py"), work / "site" / "sitecustomize.py")
        self._arguments = arguments(variant, work, data, "run", num_faults)
        self.launcher: subprocess.Popen[bytes] | None = None

    # ---- life ------------------------------------------------------------------------------------------

    def __enter__(self) -> "Trial":
        self.proxy.__enter__()
        self.launcher = self._start("learner.main", *self._arguments, output=self.output)
        try:
            self.wait(lambda: self._address() is not None, "the launcher to say where replay listens", 2 * START_S)
            self.config: Config = load(self.folder / "config.yaml", [])
            for name in SERVERS:
                self.links[name] = self.proxy.link(self._address() or "")
                self._serve(name)
            self.wait(lambda: self.watch.version > 0, "the first step", 2 * START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.over = True
        roots = [p for p in (self.launcher, *self.servers.values()) if p is not None]
        left = [pid for root in roots for pid in (root.pid, *processes.below(root.pid))]
        for pid in left:
            processes.send(pid, SIGKILL)
        for root in roots:
            root.wait()
        self.proxy.__exit__()

    def _address(self) -> str | None:
        found = re.search(r"replay listens at (tcp://\S+):? start", self.output.read_text(errors="replace"))
        return found[1].rstrip(":") if found else None

    def _start(self, module: str, *words: str, output: Path) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{self.work}/site:{ROOT}",
            "CHAOS_CLOCK": str(self._clock),
        }
        with output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _serve(self, name: str) -> None:
        config = ("--config", f"{self.folder}/config.yaml", "--parent", str(os.getpid()))
        where = ("--replay", self.links[name].address, "--server-name", name)
        events = str(self.watch.producers[name].events)
        self.servers[name] = self._start("scripts.chaos.producer", events, *config, *where, output=self.outputs[name])

    # ---- while it runs ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at everything once: journal, producers, dead servers, pace."""
        self.watch.poll()
        now = time.monotonic()
        for name, process in self.servers.items():
            if process.poll() is None or self.over:
                continue
            if now >= self._restart_at.setdefault(name, now + RESTART_S):
                del self._restart_at[name]
                self._serve(name)
        if now - self._paced_at > PACE_EVERY_S:
            self._paced_at = now
            self._set_pace()
        time.sleep(TICK_S)

    def _set_pace(self) -> None:
        """Steps must last as long as faults do: slow when the run is ahead of them."""
        ahead = self.watch.high // STEPS_PER_FAULT - self.faults_done
        pace = "0" if self.faults_done >= self.num_faults else str(PACES_S[max(0, min(ahead, len(PACES_S) - 1))])
        if pace != self._pace:
            new = self.work / "pace.new"
            new.write_text(pace, encoding="utf-8")
            new.rename(self.work / "pace")  # whoever reads it meets the old or the new one, never half of one
            self._pace = pace

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Tick until the condition holds.

        Raises:
            Hung: it did not within the deadline.
            Ended: the launcher has ended meanwhile.
        """
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.launcher is not None and self.launcher.poll() is not None:
                raise Ended(f"the run ended while the harness waited for {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Hung(f"{what} did not come within {deadline_s:.0f} s; version {self.watch.version}")
            self.tick()

    def rest(self, seconds: float) -> None:
        """Tick for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()

    def last_words(self) -> str:
        """The last line of the launcher."""
        return (self.output.read_text(errors="replace").splitlines() or [""])[-1][:500]

    def go_on(self) -> None:
        """Wait until the run has gone on: two steps above all that were ever committed."""
        goal = min(self.watch.high + 2, self.config.learner.total_steps)
        self.wait(lambda: self.watch.version >= goal, f"step {goal}", recovery_s(self.config))

    def wait_for_peers(self, server: str) -> None:
        """Wait until replay knows a rollout server and all ranks, and the server has asked for leases."""
        self.wait(lambda: self._are_there(server), f"{server!r} and all ranks at replay", recovery_s(self.config))

    def _are_there(self, server: str) -> bool:
        answer = ask_replay(self.config, self._address() or "", 0.5)
        if answer is None:
            return False
        peers = answer.state["peers"]
        ranks = sum(peer["role"] == "learner" for peer in peers)
        leased = any(peer["name"] == server and (peer["version"] or 0) > 0 for peer in peers)
        return leased and ranks == self.config.num_learner_ranks

    def finish(self) -> int:
        """Let the run come to its end; its exit code. Raises Hung."""
        assert self.launcher is not None
        left = self.config.learner.total_steps - self.watch.version
        deadline = time.monotonic() + recovery_s(self.config) + 2.0 * left
        while self.launcher.poll() is None:
            if time.monotonic() > deadline:
                raise Hung(f"the run did not end; version {self.watch.version}")
            self.over = self.watch.version >= self.config.learner.total_steps
            self.tick()
        self.watch.poll()
        return self.launcher.returncode

    # ---- what faults reach for -------------------------------------------------------------------------

    def pids(self, role: str) -> list[int]:
        """Living processes of a role: replay, learner (its ranks), launcher, or the name of a rollout server."""
        assert self.launcher is not None
        if role == "launcher":
            return [self.launcher.pid]
        if role in self.servers:
            return [self.servers[role].pid] if self.servers[role].poll() is None else []
        return processes.of_role(self.launcher.pid, role)

    def skew(self, role: str, seconds: float) -> None:
        """Set the wall clock of a role off by so much."""
        position = {"replay": 0, "learner": 1, "server": 2, "launcher": 3}[role]
        with self._clock.open("r+b") as file:
            file.seek(position * DOUBLE.size)
            file.write(struct.pack("<d", seconds))
