"""A training run of real processes and everything around it, quick to notice a fault: one cluster for all campaigns."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple, Self

from configs.loading import load
from configs.schema import Config
from replay.status_client import ask_replay
from scripts.chaos import checker, processes, site_start
from scripts.chaos.polling import Ended, T, replace_text, wait_until
from scripts.chaos.proxy import Link, Proxy
from scripts.chaos.watch import Logs, Probe, Watch

ROOT = Path(__file__).parents[2]
START_S = 60.0  # how long a process may take to start on a busy machine; no key of the configuration says that
SERVERS = ("rollout-a", "rollout-b")
SHOWN = ("tracking.live=plain", "tracking.plot=false")
TICK_S = 0.004
LAUNCHER = "launcher"
CLOCKS = ("replay", "learner", "server", LAUNCHER)  # roles whose clock can be shifted, in the order of site_start.ROLES


class Variant(NamedTuple):
    """Settings in which one run differs from the others."""

    name: str
    settings: tuple[str, ...]
    keys: bool = False  # CURVE on every socket: then the proxy sees sealed messages


PARTIAL = ("replay.async_lag=4", "replay.partial_rollouts=true")
TEACHERS = "{even: {path: MODEL, rows: {half: 0}, timeout_s: 8}, odd: {path: MODEL, timeout_s: 8}}"
TAUGHT = (
    *("replay.async_lag=1", f"teachers={TEACHERS}", "algorithm.distillation={top_k: {k: 4}}", "rollout.restarts=1000"),
    "replay.lease_s=60",  # a group waits for its teacher's next start
)
VARIANTS = (
    Variant("lag 1", ("replay.async_lag=1",)),
    Variant("lag 0, fsync every", ("replay.async_lag=0", "replay.fsync=every")),
    Variant("lag 4, drop, partial rollouts, fsync never", (*PARTIAL, "replay.on_stale=drop", "replay.fsync=never")),
    Variant("lag 1, mask, two ranks", ("replay.async_lag=1", "replay.on_stale=mask", "placement.split=2:2")),
    Variant("lag 1, keys", ("replay.async_lag=1",), keys=True),
    Variant("lag 4, partial rollouts, all of the journal", (*PARTIAL, "replay.journal_keep=all")),
    Variant("lag 1, two teachers", TAUGHT),
)

# every deadline is short, so that a fault costs seconds
SMALL = """
    rollout.group_size=4 rollout.groups_per_step=8 rollout.max_running=32 placement.local_rollouts=false
    evaluation.every_steps=0 checkpoint.every_steps=12 learner.lr=1e-4 limits.flat_reward_steps=0
    network.heartbeat_s=0.5 network.silent_after_s=5
    weight_bus.heartbeat_s=0.5 weight_bus.collective_timeout_s=2 weight_bus.deadline_s=10
    replay.lease_s=8 replay.max_attempts=6 replay.restarts=1000 replay.wait_for_learner_s=120
    learner.restarts=1000 learner.batch_deadline_s=120 rollout.wait_for_servers_s=120
"""
REWARD = '''"""The quick start's reward at a pace that the harness sets; evaluations are not slowed."""

import time

from rollout_server.tasks.rewards.built_in.texts import exact


def reward(sample):
    if sample["data_source"] == "train":
        with open({pace!r}, encoding="utf-8") as file:
            time.sleep(float(file.read()))
    return exact(sample)
'''


def make(module: str, *words: str) -> None:
    command = (sys.executable, "-m", module, *words)
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)


def make_data(folder: Path, *, seed: int = 0) -> Path:
    """The quick start's model and prompts, made where they are missing."""
    make("examples.sort6", "--out", str(folder), "--seed", str(seed))
    return (ROOT / folder).resolve()


def recovery_s(config: Config) -> float:
    """Deadline for a run to go on after a fault: its own deadlines in a row, and a process's start."""
    network, bus = config.network, config.weight_bus
    waits = 2 * network.silent_after_s + 2 * config.replay.lease_s + bus.deadline_s + 2 * bus.collective_timeout_s
    return waits + START_S


class Cluster:
    """The launcher, rollout servers, proxies, probes; a context manager that leaves no process behind.

    The run is in work/run; rollout servers and learner rank 0 have probes. `pace` is asked again and
    again for the seconds that the reward of one trajectory takes; every rollout server has one reward process.
    """

    config: Config

    def __init__(self, work: Path, *, pace: Callable[[], float] = lambda: 0.0) -> None:
        (work / "site").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_start.__file__, work / "site" / "sitecustomize.py")
        self.work, self.folder = work, work / "run"
        self.watch = Watch(self.folder, work / "journal")
        self.history, self.logs, self.proxy = self.watch.history, Logs(self.folder / "logs", []), Proxy()
        self.links: dict[str, Link] = {}
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._again: dict[str, Callable[[], None]] = {}  # how a process is started again when it ends
        self._may_end: set[str] = set()
        self._pace, self._paced = pace, -1.0
        self._clock = work / "clock"
        self._clock.write_bytes(bytes(site_start.DOUBLE.size * len(CLOCKS)))
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SLIPSTREAM_PYTHON": sys.executable,
            "PYTHONPATH": f"{work}/site:{ROOT}",
            "CHAOS_CLOCK": str(self._clock),
            "CHAOS_PROBES": str(work / "probes"),
        }

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        roots = self.started.values()
        for pid in [pid for root in roots for pid in (root.pid, *processes.below(root.pid))]:
            processes.send(pid, SIGKILL)
        for root in roots:
            root.wait()
        self.proxy.__exit__()

    def start(self, name: str, *command: str, restarts: bool = False, **environment: str) -> None:
        """Start a process; what it prints goes to NAME.out."""
        output = self.output(name)
        if output not in self.logs.others:
            self.logs.others.append(output)
        with output.open("ab") as file:
            ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            env = self._environment | environment
            self.started[name] = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **ends)
        if restarts:
            self._again[name] = partial(self.start, name, *command, restarts=False, **environment)

    def settings(self, data: Path) -> list[str]:
        """Of every run; writes the reward that they name."""
        reward = self.work / "paced_reward.py"
        reward.write_text(REWARD.format(pace=str(self.work / "pace")), encoding="utf-8")
        rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        halves = "".join(json.dumps({**row, "half": number % 2}) + "\n" for number, row in enumerate(rows))
        (train := self.work / "train.jsonl").write_text(halves, encoding="utf-8")
        paths = [f"model.path={data}/model", f"data.train={train}", f"data.eval={data}/eval.jsonl"]
        return [*paths, f"run.dir={self.work}", "run.name=run", f"reward.function={reward}:reward", *SHOWN]

    def launch(self, settings: Sequence[str] = (), *command: str, local: bool = False, **environment: str) -> None:
        """Start the learner side, until it says where replay listens; with `local` rollout servers it does not."""
        words, boots = command or (sys.executable, "-m", "learner.main"), self.history.boots
        self.output(LAUNCHER).unlink(missing_ok=True)
        words = (*words, *(word for value in settings for word in ("--set", value)))
        self.start(LAUNCHER, *words, restarts=False, **environment)
        what = "the start of replay"
        self.wait(lambda: self.address or (local and self.history.boots > boots), what, 2 * START_S)
        self.config = load(self.folder / "config.yaml", [])

    def start_small(self, variant: Variant, data: Path, total_steps: int) -> None:
        """Start a small run with rollout servers behind proxies, until its first step."""
        own = [setting.replace("MODEL", f"{data}/model") for setting in variant.settings]
        settings = ["placement.split=2:1", *SMALL.split(), *own, f"learner.total_steps={total_steps}"]
        if variant.keys:
            make("replay.keys", "--out", f"{self.work}/keys")
            settings.append(f"network.keys={self.work}/keys")
        self.launch([*self.settings(data), *settings])
        for name in SERVERS:
            self.links[name] = self.proxy.link(self.address)
            self.serve(name, self.links[name].address, restarts=True)
        self.wait(lambda: self.history.version > 0, "the first step", 2 * START_S)

    def serve(self, name: str, address: str, *command: str, restarts: bool = False) -> None:
        self.watch.probes[name] = Probe(self.work / "probes" / name)
        own = (sys.executable, "-m", "rollout_server.main", "--parent", str(os.getpid()), "--replay", address)
        words = [*(command or own), "--config", f"{self.folder}/config.yaml", "--server-name", name]
        self.start(name, *words, restarts=restarts, REPLAY=address)

    @property
    def address(self) -> str:
        """Where replay listens, as the launcher says."""
        text = self.output(LAUNCHER).read_text(errors="replace")
        found = re.search(r"replay listens at (tcp://\S+?):? start", text)
        return found[1] if found else ""

    def output(self, name: str) -> Path:
        return self.work / f"{name}.out"

    def last_words(self, name: str = LAUNCHER) -> str:
        return " | ".join(self.output(name).read_text(errors="replace").splitlines()[-3:])[-600:]

    @property
    def is_over(self) -> bool:
        return hasattr(self, "config") and self.history.version >= self.config.learner.total_steps

    def tick(self) -> None:
        """See how the run goes, between other things. Raises Ended where a process has ended that must not."""
        self.watch.poll()
        for name, process in list(self.started.items()):
            if process.poll() is None or name in self._may_end or self.is_over:
                continue
            if name not in self._again:
                raise Ended(f"{name!r} ended with exit code {process.returncode}: {self.last_words(name)}")
            self._again[name]()
        seconds, self._paced = self._paced, self._pace()
        if seconds != self._paced:
            replace_text(self.work / "pace", f"{self._paced:.6f}")
        time.sleep(TICK_S)

    def wait(self, condition: Callable[[], T | None], what: str, deadline_s: float) -> T:
        """Tick until the condition holds; what it is then. Raises Hung."""
        return wait_until(condition, what, deadline_s, look=self.tick, state=lambda: f"version {self.history.version}")

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()

    def go_on(self) -> None:
        """Wait until the run has gone on: two steps above all that were ever committed."""
        goal = min(self.history.high + 2, self.config.learner.total_steps)
        self.wait(lambda: self.history.version >= goal, f"step {goal}", recovery_s(self.config))

    def wait_for_peers(self, server: str) -> None:
        """Wait until replay knows a rollout server and all ranks, and the server has asked for leases."""

        def have_joined() -> bool:
            answer = ask_replay(self.address, self.config.network.keys, 0.5)
            peers: list[dict[str, Any]] = answer.state["peers"] if answer is not None else []
            ranks = sum(peer["role"] == "learner" for peer in peers)
            leased = any(peer["name"] == server and (peer["version"] or 0) > 0 for peer in peers)
            return leased and ranks == self.config.num_learner_ranks

        self.wait(have_joined, f"{server!r} and all ranks at replay", recovery_s(self.config))

    def finish(self) -> int:
        """Let the run come to its end; its exit code. Raises Hung."""
        left = self.config.learner.total_steps - self.history.version
        return self.end_of(LAUNCHER, recovery_s(self.config) + 2.0 * left)

    def end_of(self, name: str, deadline_s: float) -> int:
        """Wait until a process that may end by now has ended; its exit code."""
        self._may_end.add(name)
        self.wait(lambda: self.started[name].poll() is not None, f"the end of {name!r}", deadline_s)
        self.watch.poll()
        return int(self.started[name].returncode)

    def check(self) -> checker.Report:
        self.watch.poll()
        records = sorted(self.work.glob("probes/*/events.jsonl"))
        return checker.check(self.folder, journal=self.watch.archive, acks=records)

    def pids(self, role: str) -> list[int]:
        """Living processes of a role: replay, learner (its ranks), `rank 1`, or a started process's name."""
        if role in self.started:
            return [self.started[role].pid] if self.started[role].poll() is None else []
        if role == "rank 1":
            return self.pids("learner")[1:2]  # ranks start in their order
        return processes.of_role(self.started[LAUNCHER].pid, role)

    def kill(self, role: str) -> int | None:
        """SIGKILL the first process of a role; its pid."""
        pids = self.pids(role)
        return pids[0] if pids and processes.send(pids[0], SIGKILL) else None

    def skew(self, role: str, seconds: float) -> None:
        with self._clock.open("r+b") as file:
            file.seek(CLOCKS.index(role) * site_start.DOUBLE.size)
            file.write(site_start.DOUBLE.pack(seconds))
