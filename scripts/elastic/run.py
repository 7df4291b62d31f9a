"""One training run with real processes, started by the documented commands, whose rollout servers come and go."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from scripts.bus_faults.gates import Hand
from scripts.chaos import processes
from scripts.chaos.settings import ROOT
from scripts.elastic.account import Diary, Following
from scripts.elastic.plan import FIRST, MID_UPDATE_HOLD_S, Join, Leave, Plan, settings
from scripts.elastic.witness import SITE, diary_of, gate_of

POLL_S = 0.02
START_S = 90.0
"""How long a process may take to start on a busy machine."""
STEP_S = 60.0
"""How long anything may take that the next few steps bring."""
END_S = 180.0
JOINING_S, LEAVING_S, TOO_SOON_S = 1.5, 1.2, 10.0
"""How long one server is busy with the rewards of a step: while others start; while servers that hold leases leave; and
when the steps are used up faster than the plan allows."""
STANDSTILL_S = 1.0
"""How long the reward of one answer takes while a server joins far from the next update, or leaves."""
CAUGHT_S = 0.2
"""Leases that have lasted so long since will last; a quick reward may have been on its way."""
QUIET_S = 2.0
"""Without a new version before that server joins, and after it is served."""


class Missing(RuntimeError):
    """Something did not come; the message says what, and how long it was waited for."""


@dataclass(slots=True)
class Facts:
    """What only the one who started the processes knows. Written to facts.json for the judge."""

    steps: int
    target: float | None
    started: dict[str, float] = field(default_factory=dict)
    """Monotonic time at which each rollout server was started."""
    joins: dict[str, str] = field(default_factory=dict)
    """How each late server joined, in words."""
    leaves: dict[str, str] = field(default_factory=dict)
    """Signal that ended a server."""
    left_at: dict[str, float] = field(default_factory=dict)
    leases_left: dict[str, int] = field(default_factory=dict)
    """Leases that it held then."""
    exits: dict[str, int] = field(default_factory=dict)
    """Exit codes, the learner side's under `learner`."""
    ranks: list[list[int]] = field(default_factory=list)
    """Pids of the learner ranks before the first join and after the last departure."""
    seconds: float = 0.0

    def write(self, work: Path) -> None:
        """To facts.json."""
        (work / "facts.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> "Facts":
        """Of an earlier run."""
        return cls(**json.loads((work / "facts.json").read_text(encoding="utf-8")))


class ElasticRun:
    """A context manager that leaves no process behind."""

    def __init__(self, plan: Plan, work: Path, data: Path, seed: int) -> None:
        self.plan, self.work, self.seed = plan, work, seed
        self.folder = work / "run"
        self.witnesses = work / "witnesses"
        self.witnesses.mkdir(parents=True)
        (work / "site").mkdir()
        site = SITE.format(folder=str(self.witnesses))
        (work / "site" / "sitecustomize.py").write_text(site, encoding="utf-8")
        self.facts = Facts(steps=plan.steps, target=plan.target)
        self.diaries: dict[str, Diary] = {}
        self.hands: dict[str, Hand] = {}
        self.following = Following(self.folder / "journal")
        self.account = self.following.account
        self._settings = settings(plan, work, data)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()
        self._pace = ""
        self._step_s = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> "ElasticRun":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        roots = list(self._processes.values())
        for pid in [pid for root in roots for pid in (root.pid, *processes.below(root.pid))]:
            processes.send(pid, signal.SIGKILL)
        for root in roots:
            root.wait()

    # ---- the story -------------------------------------------------------------------------------------

    def play(self) -> Facts:
        """The whole run. Raises Missing."""
        plan = self.plan
        self._start_learner()
        self._start_server(FIRST, "bash", "scripts/start_rollout_nodes.sh")
        self.wait(lambda: self.account.version >= plan.alone, f"step {plan.alone} with one rollout server", START_S)
        self.facts.ranks.append(self._ranks())
        self.set_step_s(JOINING_S)
        for join in plan.joins:
            self._prepare(join)
        for join in plan.joins:
            self._join(join)
        self.set_step_s(0.0)
        self._all_train()
        for leave in plan.leaves:
            self._leave(leave)
        self.facts.ranks.append(self._ranks())
        self._finish()
        self.facts.seconds = round(time.monotonic() - self._began, 1)
        return self.facts

    def _start_learner(self) -> None:
        words = ("--async-lag", "1", "--seed", str(self.seed), "--name", "run", *self._settings)
        self._start("learner", "bash", "scripts/start_learner.sh", *words)
        self.wait(lambda: self._address() != "", "the line `replay listens at`", START_S)
        self.say(f"learner started (pid {self._processes['learner'].pid}), replay at {self._address()}")

    def _prepare(self, join: Join) -> None:
        """Start the process; unless it joins as it comes, it waits at the gate before its Join."""
        self.hands[join.server] = hand = Hand(gate_of(self.witnesses, join.server))
        if join.how != "as it comes":
            hand.aim("before Join", 2 * START_S)
        self._start_server(join.server, sys.executable, "-m", "rollout_server.main", "--replay", self._address())

    def _join(self, join: Join) -> None:
        name, hand = join.server, self.hands[join.server]
        self.facts.joins[name] = join.how
        if join.how != "as it comes":
            self.wait(lambda: hand.arrived, f"{name!r} at the gate before its Join", START_S)
        if join.how == "in the middle of an update":
            first = self.hands[FIRST]
            first.aim("middle bucket", MID_UPDATE_HOLD_S)
            self.wait(lambda: first.arrived, f"an update that is on its way to {FIRST!r}", STEP_S)
            hand.release()
            self.wait(lambda: self._has(name, "welcome"), f"the publisher's Welcome to {name!r}", STEP_S)
            first.release()
        elif join.how == "far from the next one":
            self.set_step_s(STANDSTILL_S * self.plan.samples_per_step)
            self._quiet()
            last = self.account.version
            self.wait(lambda: self._everybody_serves(last), f"v{last} at all rollout servers", STEP_S)
            hand.release()
        self.wait(lambda: self._has(name, "live"), f"the first version that {name!r} serves", START_S)
        asked, live = self.diaries[name].first("join"), self.diaries[name].first("live")
        assert asked is not None and live is not None
        took = live["at"] - asked["at"]
        self.say(f"{name} joined {join.how}: {took:.2f} s from its Join to serving v{live['version']}")
        if join.how == "far from the next one":
            self._quiet()
        self.set_step_s(JOINING_S)

    def _all_train(self) -> None:
        names = [FIRST, *(join.server for join in self.plan.joins)]
        trained = self.account.trained
        self.wait(lambda: all(trained[name] for name in names), f"a trained group of each of {names}", 2 * STEP_S)
        self._steps(self.plan.between)
        self.say(f"{len(names)} rollout servers, trained so far: " + ", ".join(f"{n} {trained[n]}" for n in names))

    def _leave(self, leave: Leave) -> None:
        """End a server while it holds leases, and go on without it."""
        name, sig = leave.server, leave.signal
        process = self._processes[name]
        self._catch_at_work(name)
        self._gone.add(name)
        process.send_signal(sig)
        self.facts.leaves[name], self.facts.left_at[name] = sig.name, time.monotonic()
        self.facts.leases_left[name] = self.account.held_by(name)
        self.wait(lambda: process.poll() is not None, f"the end of {name!r} after {sig.name}", STEP_S)
        self.wait(lambda: self.account.held_by(name) == 0, f"that no lease is left with {name!r}", STEP_S)
        took = time.monotonic() - self.facts.left_at[name]
        held = self.facts.leases_left[name]
        self.say(f"{name} left by {sig.name} (exit code {process.returncode}); its {held} leases moved in {took:.2f} s")
        self.set_step_s(0.0)
        self._steps(self.plan.between)

    def _catch_at_work(self, name: str) -> None:
        """Wait until a server holds leases, and see to it that it cannot finish them at once."""
        deadline = time.monotonic() + STEP_S
        self.set_step_s(LEAVING_S)
        while True:
            left_s = deadline - time.monotonic()
            self.wait(lambda: self.account.held_by(name) > 0, f"a lease of {name!r} that it works on", left_s)
            self.set_step_s(STANDSTILL_S * self.plan.samples_per_step)
            self._rest(CAUGHT_S)
            if self.account.held_by(name) > 0:
                return
            self.set_step_s(LEAVING_S)

    def _finish(self) -> None:
        self.say(
            f"training goes on to step {self.plan.steps} with {len(self._processes) - 1 - len(self._gone)} of them"
        )
        learner = self._processes["learner"]
        self.wait(lambda: learner.poll() is not None, "the end of the run", END_S)
        for name, process in self._processes.items():
            self.wait(lambda p=process: p.poll() is not None, f"the end of {name!r}", STEP_S)  # type: ignore[misc]
            self.facts.exits[name] = process.returncode
        self.following.poll()
        self.say(f"the run ended with exit code {learner.returncode}")

    # ---- processes -------------------------------------------------------------------------------------

    def _start_server(self, name: str, *command: str) -> None:
        self.hands.setdefault(name, Hand(gate_of(self.witnesses, name)))
        self.diaries[name] = Diary(diary_of(self.witnesses, name))
        self._start(name, *command, "--config", str(self.folder / "config.yaml"), "--server-name", name)
        self.facts.started[name] = time.monotonic()
        self.say(f"{name} started: {' '.join(Path(word).name if word == sys.executable else word for word in command)}")

    def _start(self, name: str, *command: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SLIPSTREAM_PYTHON": sys.executable,
            "PYTHONPATH": f"{self.work}/site:{ROOT}",
            "PORT": "0",
            "REPLAY": self._address(),
        }
        with self._output(name).open("wb") as file:
            self._processes[name] = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def _output(self, name: str) -> Path:
        return self.work / f"{name}.out"

    def _address(self) -> str:
        path = self._output("learner")
        found = (
            re.search(r"replay listens at (tcp://\S+):? start", path.read_text(errors="replace"))
            if path.exists()
            else None
        )
        return found[1].rstrip(":") if found else ""

    def _ranks(self) -> list[int]:
        return processes.of_role(self._processes["learner"].pid, "learner")

    # ---- waiting ---------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Poll until it holds. Raises Missing when it does not in time, or when a process has ended that must not."""
        deadline = time.monotonic() + limit_s
        while not condition():
            for name, process in self._processes.items():
                over = name in self._gone or self.account.version >= self.plan.steps
                if process.poll() is not None and not over:
                    raise Missing(
                        f"{name!r} ended with exit code {process.returncode} before {what}: {self._last(name)}"
                    )
            if time.monotonic() > deadline:
                raise Missing(f"{what} did not come within {limit_s:.0f} s; the run is at step {self.account.version}")
            self.following.poll()
            self._keep_pace()
            time.sleep(POLL_S)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until, "nothing", seconds + 1)

    def _last(self, name: str) -> str:
        return " | ".join(self._output(name).read_text(errors="replace").splitlines()[-3:])[-600:]

    def _steps(self, number: int) -> None:
        goal = self.account.version + number
        self.wait(lambda: self.account.version >= goal, f"step {goal}", STEP_S + TOO_SOON_S * number)

    def _quiet(self) -> None:
        """Wait until no step has come for a while."""
        seen = [self.account.version, time.monotonic()]

        def quiet() -> bool:
            if self.account.version != seen[0]:
                seen[:] = [self.account.version, time.monotonic()]
            return time.monotonic() - seen[1] > QUIET_S

        self.wait(quiet, f"{QUIET_S:g} s without a step", STEP_S)

    def _has(self, name: str, event: str) -> bool:
        return self.diaries[name].poll().first(event) is not None

    def _everybody_serves(self, version: int) -> bool:
        serving = [diary for diary in self.diaries.values() if diary.poll().versions("live")]
        return all(diary.versions("live")[-1] >= version for diary in serving)

    # ---- pace ------------------------------------------------------------------------------------------

    def set_step_s(self, seconds: float) -> None:
        """How long one server shall be busy with the rewards of a step from now on; 0 is as quick as it gets."""
        self._step_s = seconds
        self._keep_pace()

    def _keep_pace(self) -> None:
        """The reward of each answer takes its share of that; every server has one reward process."""
        wanted = self._step_s
        if len(self.facts.ranks) < 2 and self.account.version > self.plan.latest * self.plan.steps:
            wanted = TOO_SOON_S
        pace = f"{wanted / self.plan.samples_per_step:.6f}"
        if pace != self._pace:
            new = self.work / "pace.new"
            new.write_text(pace, encoding="utf-8")
            new.rename(self.work / "pace")  # whoever reads it meets the old or the new one, never half of one
            self._pace = pace

    def say(self, text: str) -> None:
        """One line about one event."""
        print(f"{time.monotonic() - self._began:6.1f} s  step {self.account.version:3d}  {text}", flush=True)
