"""One case of the benchmark: its model, its run with real processes, and the raw broadcast after it. No torch."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.placement import PlacementError
from configs.plan import NCCL_DEFAULTS
from configs.schema import Config
from learner.launch.launcher import Launcher
from learner.launch.machine import visible_devices
from learner.launch.servers import RunFailed
from scripts.bench.plan import RESULT, Phase, Plan
from scripts.bench.random_model import SHAPES, write_prompts
from scripts.bench.settings import Case, Options, config_of

MODEL_LIMIT_S = 240.0
RAW_LIMIT_S = 90.0
MEMORY_EVERY_S = 2.0
LOG_LINES = 8
LOG_WIDTH = 240


class CaseFailed(RuntimeError):
    """This case has no result; the message is its root cause, `logs` the last lines of every process."""

    def __init__(self, message: str, logs: str = "") -> None:
        super().__init__(message)
        self.logs = logs


class TimeUp(RunFailed):
    """The run did not end within --limit-s."""


@dataclass(slots=True)
class Watcher:
    """Stands where the live view stands: keeps what servers say of themselves, and ends a run that takes too long."""

    limit_s: float
    started: float = field(default_factory=time.monotonic)
    gauges: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    """Of each rollout server after each of its weight updates, by (name, updates)."""
    idle: list[tuple[int, float]] = field(default_factory=list)
    """(step that was going on, share of the last beat without a request) of a rollout server, about twice a second."""
    used_mib: dict[int, int] = field(default_factory=dict)
    """Peak of each GPU."""
    step: int = 0
    death: str = ""
    _memory_at: float = 0.0
    _status: Mapping[str, Any] | None = None

    def update(self, status: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called by the launcher ten times a second.

        Raises:
            RunFailed: a rollout server has died, or the time is up.
        """
        self.step = max([self.step, *(row["step"] for row in rows if "step" in row)])
        if status is not self._status:
            self._status = status
            self._keep(status or {})
        now = time.monotonic()
        if now - self._memory_at > MEMORY_EVERY_S:
            self._memory_at = now
            for index, used in gpu_memory().items():
                self.used_mib[index] = max(used, self.used_mib.get(index, 0))
        if self.death:
            raise RunFailed(self.death)
        if now - self.started > self.limit_s:
            raise TimeUp(f"not done within --limit-s {self.limit_s:g} s; the last whole step was {self.step}")

    def _keep(self, status: Mapping[str, Any]) -> None:
        for peer in status.get("peers", []):
            gauges = peer["gauges"]
            if peer["role"] == "rollout_server" and "weight_updates" in gauges:
                self.gauges[peer["name"], int(gauges["weight_updates"])] = gauges
                self.idle.append((self.step + 1, gauges["idle_ratio"]))

    def event(self, text: str) -> None:
        """A child died: numbers of what is left would be of another case."""
        if "died" in text:
            self.death = text


def make_model(options: Options, case: Case) -> Path:
    """The folder of the case's shape, made on first use. Raises CaseFailed."""
    folder = (options.work / "models" / case.shape).absolute()
    if (folder / "config.json").is_file():
        return folder
    command = [sys.executable, "-m", "scripts.bench.random_model", "--shape", case.shape, "--out", str(folder)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MODEL_LIMIT_S)
    except subprocess.TimeoutExpired as expired:
        raise CaseFailed(f"the model of shape {case.shape} was not written within {MODEL_LIMIT_S:g} s") from expired
    if done.returncode:
        raise CaseFailed(f"the model of shape {case.shape} cannot be written: {tail(done.stderr)}")
    say(f"model of shape {case.shape}: {time.monotonic() - started:.1f} s")
    return folder


def make_data(options: Options, case: Case, steps: int) -> Path:
    """Prompts for that many steps and what is in flight at the end, none of them twice."""
    count = options.groups * (steps + 2 + max(options.lag, 8 if options.stream else 0))
    path = (options.work / f"prompts-{case.shape}-{options.prompt}-{count}.jsonl").absolute()
    if not path.is_file():
        beside = path.with_suffix(f".{os.getpid()}.new")
        beside.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(beside, vocab=SHAPES[case.shape].vocab, count=count, num_tokens=options.prompt, seed=options.seed)
        beside.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that made all its steps."""

    options: Options
    config: Config
    plan: Plan
    learner: dict[str, Any]
    """What the learner ranks wrote."""
    watcher: Watcher
    seconds: float
    cut_short: str = ""
    """Why the run did not end by itself; empty when it did."""

    def measured(self, phase: Phase) -> list[int]:
        """Steps of a phase that count and were made; of a run that was cut short an even number, for they are pairs."""
        made = [step for step in self.plan.measured(phase) if str(step) in self.learner["committed_at"]]
        return made[: len(made) // 2 * 2] if self.cut_short else made


def run_case(options: Options, case: Case, *, stream: bool = False) -> Finished:
    """Start all processes, run all phases, end all processes. Raises CaseFailed, ConfigError."""
    plan = options.stream_plan if stream else options.plan
    model = make_model(options, case)
    data = make_data(options, case, options.plan.total_steps)
    suffix = "-stream" if stream else ""
    name = f"{case.shape}-{case.rollout}-{case.learner}{suffix}-{time.time_ns() // 1_000_000}-{os.getpid()}"
    config = config_of(options, case, model=model, data=data, name=name, stream=stream)
    watcher = Watcher(options.limit_s)
    try:  # the launcher asks of its view what the watcher has
        servers = ("scripts.bench.server", "--median", str(options.median), "--sigma", str(options.sigma))
        modules: dict[str, Any] = {"learner_module": "scripts.bench.train", "server_command": servers}
        launcher = Launcher(config, False, watcher, **modules)  # type: ignore[arg-type]
    except PlacementError as error:
        raise CaseFailed(str(error)) from error
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    plan.write(run_dir)
    try:
        launcher.start()
        launcher.watch()
        launcher.leave()
        learner = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
        return Finished(options, config, plan, learner, watcher, time.monotonic() - watcher.started)
    except TimeUp as late:
        cut_short = Finished(options, config, plan, {}, watcher, options.limit_s, cut_short=str(late))
        return what_there_is(cut_short, CaseFailed(str(late), log_tails(run_dir)))
    except (RunFailed, PlacementError, OSError, ValueError) as error:
        raise CaseFailed(str(error), log_tails(run_dir)) from error
    finally:
        launcher.stop()


def what_there_is(run: Finished, error: CaseFailed) -> Finished:
    """What a run had measured when its time was over. Raises the error where that is not enough for the table."""
    result = Path(run.config.run_dir) / RESULT
    if not result.is_file():
        raise error
    run = replace(run, learner=json.loads(result.read_text(encoding="utf-8")))
    if len(run.measured("idle")) < 2 or len(run.measured("full")) < 2:
        raise error
    return run


def raw_broadcast(config: Config, num_bytes: int) -> dict[str, Any]:
    """The same bytes to as many receivers on the same devices. Raises CaseFailed."""
    share = config.shares[0]
    receivers = [engine[0] for engine in share.engines(config.placement.tensor_parallel)]
    environment = {**os.environ, **NCCL_DEFAULTS, **config.network.env, "OMP_NUM_THREADS": "1"}
    if config.weight_bus.backend != "gloo":
        visible = visible_devices(os.environ)
        chosen = [share.learner[0], *receivers]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in chosen)
    command = [sys.executable, "-m", "learner.launch.torchrun", "--standalone"]
    command += [f"--nproc-per-node={len(receivers) + 1}", "-m", "scripts.bench.raw_broadcast"]
    command += ["--bytes", str(num_bytes), "--bucket", str(config.weight_bus.bucket_bytes)]
    command += ["--backend", config.weight_bus.backend, "--host", config.network.host]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=RAW_LIMIT_S
        )
    except subprocess.TimeoutExpired as expired:
        raise CaseFailed(f"the raw broadcast did not end within {RAW_LIMIT_S:g} s") from expired
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise CaseFailed(f"the raw broadcast failed (exit code {done.returncode}): {tail(done.stderr)}")
    return dict(json.loads(lines[-1]))


def gpu_memory() -> dict[int, int]:
    """MiB in use on each GPU of this machine; empty where nvidia-smi is missing or does not answer."""
    lines = ask_gpus("index,memory.used")
    return {int(index): int(used) for index, used in (line.split(",") for line in lines) if used.strip().isdigit()}


def ask_gpus(fields: str) -> list[str]:
    """Lines of `nvidia-smi --query-gpu`; none where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
        return done.stdout.splitlines() if done.returncode == 0 else []
    return []


def log_tails(run_dir: Path) -> str:
    """The last lines of every process's log."""
    parts = []
    for path in sorted((run_dir / "logs").glob("*.log")):
        parts.append(f"--- {path}\n{tail(path.read_text(encoding='utf-8', errors='replace'))}")
    return "\n".join(parts)


def tail(text: str) -> str:
    """The last lines, each cut to one that can be read."""
    return "\n".join(line[:LOG_WIDTH] for line in text.splitlines()[-LOG_LINES:])


def say(text: str) -> None:
    """One line for the person at the terminal; results go to standard output."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
