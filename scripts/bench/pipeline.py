"""`python -m scripts.bench pipeline --configs 0.6B@1:1,0.6B@1:3`: how well rollouts, training and broadcast overlap.

Each case starts the processes of a run once (replay, rollout servers, learner ranks) on random weights of a shape,
with answers of forced lognormal lengths, and measures in that one run

    T_roll    a step with everything but the update: rollouts, admission and publications alone
    T_step    a step as it is, rollouts and training at the same time
    T_train   an update alone, on the batches of T_step, with the engines standing still

and eta = max(T_roll, T_train) / T_step: 1 means that the shorter side and the broadcast are hidden whole. After the
run, on the same devices, a bare broadcast of the same bytes is what the weight bus is held against.

Standard output gets a markdown table, and as its last line one object of JSON (of several cases: {"results": [...]}).
`--device cpu --quick` does all of it with a tiny model, the torch engine and gloo, in less than a minute.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from configs import loading
from configs.schema import Config
from examples.random_qwen3 import SHAPES, write_prompts
from scripts.bench import core
from scripts.bench.broadcast import raw_broadcast
from scripts.bench.core import say, write_json
from scripts.bench.numbers import result_of, with_raw
from scripts.bench.train import PLAN, RESULT, Finished, Plan
from scripts.chaos.report import conclude
from slipstream.launch.launcher import Launcher
from slipstream.launch.servers import RunFailed

FIGURES = "bench_result.json"
PROMPTS = "prompts.jsonl"
MODEL_LIMIT_S = 240.0
SIZES = {
    "shape": ("0.6B", "tiny", "of the only case"),
    "prompt": (256, 16, "tokens of every prompt"),
    "median": (512, 24, "median of the answers' lognormal lengths"),
    "sigma": (0.7, 0.5, "deviation of the logarithm of the lengths"),
    "cap": (2048, 64, "longer answers are cut here"),
    "groups": (32, 4, "groups in a step"),
    "group_size": (8, 4, "answers in a group"),
    "steps": (6, 4, "counted steps of each phase, rounded up to whole cycles of lag + 1 steps"),
    "idle_steps": (0, 0, "of those without updates; 0: as many as --steps"),
    "max_running": (512, 64, "answers that an engine decodes at once"),
    "microbatch": (16384, 1024, "tokens of a microbatch"),
    "bucket_mib": (512.0, 0.125, "size of one broadcast"),
    "lag": (1, 1, "bound of the lag"),
    "warmup": (2, 2, "whole steps before"),
    "limit_s": (300.0, 300.0, "of one run"),
    "quiet_s": (60.0, 60.0, "wait for the engines before T_train, at most"),
    "seed": (0, 0, "of weights, prompts and lengths"),
}


class Case(NamedTuple):
    """One line of the table: a shape, and devices for rollout servers and learner ranks."""

    shape: str
    rollout: int
    learner: int

    def __str__(self) -> str:
        return f"{self.shape}@{self.rollout}:{self.learner}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`0.6B@1:3`. Raises ValueError."""
        match = re.fullmatch(r"([\w.]+)@(\d+):(\d+)", text.strip())
        if match is None or match[1] not in SHAPES:
            known = ", ".join(SHAPES)
            raise ValueError(f"--configs {text!r}: expected SHAPE@R:L, such as 0.6B@1:3, with one of {known}")
        return cls(match[1], int(match[2]), int(match[3]))


@dataclass(slots=True)
class Watcher:
    """In the place of the live view: keeps the servers' gauges, and ends a run that takes too long."""

    limit_s: float
    started: float = field(default_factory=time.monotonic)
    gauges: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)  # of servers, by (name, updates)
    idle: list[tuple[int, float]] = field(default_factory=list)
    """(step in progress, share of the last beat without a request) of a rollout server, about twice a second."""
    step: int = 0
    _status: Mapping[str, Any] | None = None

    def update(self, status: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called by the launcher ten times a second. Raises RunFailed when the time is up."""
        self.step = max([self.step, *(row["step"] for row in rows if "step" in row)])
        if status is not None and status is not self._status:
            self._status = status
            for peer in status["peers"]:
                gauges = peer["gauges"]
                if peer["role"] == "rollout_server" and "weight_updates" in gauges:
                    self.gauges[peer["name"], int(gauges["weight_updates"])] = gauges
                    self.idle.append((self.step + 1, gauges["idle_ratio"]))
        if time.monotonic() - self.started > self.limit_s:
            raise RunFailed(f"not done within --limit-s {self.limit_s:g} s; the last whole step was {self.step}")

    def event(self, text: str) -> None:
        """Raises RunFailed when a child died: the numbers of a run without it would be of another case."""
        if "died" in text:
            raise RunFailed(text)


def config_of(options: argparse.Namespace, case: Case, *, name: str) -> Config:
    """The configuration of one run. Raises ConfigError when the options do not fit together."""
    rollout = {"group_size": options.group_size, "groups_per_step": options.groups, "max_new_tokens": options.cap}
    learner = {"total_steps": plan_of(options).total_steps, "batch_deadline_s": options.limit_s}
    learner |= {"max_tokens_per_microbatch": max(options.microbatch, options.prompt + options.cap)}
    bus = {"bucket_bytes": int(options.bucket_mib * 2**20), "deadline_s": 60.0, "collective_timeout_s": 30.0}
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(options.work / "runs"), "seed": options.seed},
        "model": {"path": str(options.work / "models" / case.shape)},
        "data": {"train": str(options.work / PROMPTS), "max_prompt_tokens": options.prompt, "shuffle": False},
        "reward": {"function": f"{core.__file__}:spread"},
        "rollout": rollout | {"max_running": options.max_running, "restarts": 0},
        "replay": {"async_lag": options.lag},
        "learner": learner | {"lr": 1e-6, "warmup_steps": 0},
        "evaluation": {"every_steps": 0},
        "weight_bus": bus,
        "network": {"silent_after_s": 60.0, "heartbeat_s": 0.5},
        "placement": {"device": options.device, "split": f"{case.rollout}:{case.learner}"},
        "tracking": {"live": "off", "plot": False},
        "limits": {"flat_reward_steps": 0},
    }
    return loading.parse(json.dumps(tree), f"the settings of {case}", options.set)


def plan_of(options: argparse.Namespace) -> Plan:
    """The phases, in whole cycles: of the lag + 1 batches that admission lets in at a time, one is waited for."""
    cycle = options.lag + 1
    idle, full = (-(-steps // cycle) * cycle for steps in (options.idle_steps or options.steps, options.steps))
    return Plan(warmup=options.warmup, idle=idle, full=full, quiet_s=options.quiet_s)


def make_inputs(options: argparse.Namespace, case: Case) -> None:
    """The model, once, and prompts for all steps and what is in flight at the end, none twice. Raises CaseFailed."""
    folder = options.work / "models" / case.shape
    if not (folder / "config.json").is_file():
        words = ["-m", "examples.random_qwen3", case.shape, str(folder)]
        core.output_of(f"the model of shape {case.shape}", words, MODEL_LIMIT_S)
    count = options.groups * (plan_of(options).total_steps + 2 + options.lag)
    vocab = SHAPES[case.shape]["vocab_size"]
    write_prompts(options.work / PROMPTS, vocab=vocab, count=count, num_tokens=options.prompt, seed=options.seed)


def run_case(options: argparse.Namespace, case: Case) -> Finished:
    """Start all processes, run all phases, end all processes. Raises CaseFailed, ConfigError."""
    make_inputs(options, case)
    name = f"{case.shape}-{case.rollout}-{case.learner}-{time.time_ns() // 1_000_000}-{os.getpid()}"
    config = config_of(options, case, name=name)
    servers = ("scripts.bench.server", "--median", str(options.median), "--sigma", str(options.sigma))
    watcher: Any = Watcher(options.limit_s)  # the launcher asks no more of a view
    launcher = Launcher(config, False, watcher, learner_module="scripts.bench.train", server_command=servers)
    plan = plan_of(options)
    result, logs = Path(config.run_dir) / RESULT, Path(config.run_dir) / "logs"
    write_json(result.with_name(PLAN), asdict(plan))
    try:
        launcher.start()
        launcher.watch()
        launcher.leave()
    except (RunFailed, OSError, ValueError) as error:
        raise core.failed(str(error), logs) from error
    finally:
        launcher.stop()
    measured = json.loads(result.read_text(encoding="utf-8"))
    return Finished(options, config, plan, watcher, measured, time.monotonic() - watcher.started)


def measure(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """All numbers of one case; what failed is in `error`, or in `raw_error` beside the rest."""
    steps = plan_of(options)
    say(f"{case}: {steps.total_steps} steps, then {steps.full} updates alone")
    result: dict[str, Any] = {"config": str(case)}
    with core.noted(result, "error"):
        run = run_case(options, case)
        result |= result_of(str(case), run)
        write_json(Path(run.config.run_dir) / FIGURES, result)  # survives an end of the time during what follows
        with core.noted(result, "raw_error"):
            if result["bus_bytes"]:
                result |= with_raw(result, raw_broadcast(run.config, int(result["bus_bytes"])))
    return result


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    parser = core.make_parser("pipeline", __doc__, SIZES, argv)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--configs", help="cases in order, such as 0.6B@1:1,1.7B@2:2 (SHAPE@ROLLOUT:LEARNER)")
    parser.add_argument("--split", default="1:1", help="R:L of the only case (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"), help="models, prompts and run folders")
    parser.add_argument("--out", type=Path, help="JSON file that every result is appended to")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    args = parser.parse_args(argv)
    args.work = args.work.absolute()
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps and --warmup: at least 1 each")
    try:
        return args, [Case.parse(text) for text in (args.configs or f"{args.shape}@{args.split}").split(",")]
    except ValueError as error:
        parser.error(str(error))


def command(argv: Sequence[str]) -> int:
    """1 when a case has no result."""
    options, cases = parse(argv)
    results = []
    for case in cases:
        results.append(measure(options, case))
        if options.out is not None:
            before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
            write_json(options.out, [*before, results[-1]])
    sys.stdout.write(core.table(results, "config") + "\n\n")
    good = not any("error" in result for result in results)
    return conclude(results[0] if len(results) == 1 else {"results": results}, (), in_order=good)
