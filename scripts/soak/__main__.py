"""`python -m scripts.soak --hours 72 --out runs/soak`: does a run keep its promises for days?

A small run of every role on this machine's CPU (two learner ranks, replay, a rollout server with a tool environment and
a reward) trains for so many hours, in legs of --leg-hours, each a run of its own. Every --restart-minutes the rollout
server, the learner or replay is killed, in turn. At the end of a leg a second reader checks its journal, which is then
deleted with the checkpoints, unless something was wrong. The last line is JSON: how memory, descriptors and threads of
each role grew an hour, and what must be 0; the exit code is 0 where it is.

It is light: a step begins every --step-seconds, and all processes run at --nice. It goes on when the terminal is lost,
and the same command goes on with a soak that was stopped, in the same folder. soak.log says how it stands.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.chaos.polling import replace_text
from scripts.soak.leg import VICTIMS, Leg
from scripts.soak.slopes import slopes

ZERO = ("lost", "trained_twice", "non_finite", "out_of_memory", "killed_unplanned")
ROOT = Path(__file__).parents[2]
WINDOW_S = 900.0
"""limits.growth_window_s of the run: a leak is named half an hour after a process's start."""


class Soak:
    """All legs, in one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out.resolve()
        self.stopping = ""
        self.legs: list[Leg] = []

    def say(self, text: str) -> None:
        """A line of soak.log; the terminal may be gone."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        with (self.out / "soak.log").open("a", encoding="utf-8") as file:
            file.write(line)

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """A signal: end the run in order."""
        self.stopping = signal.Signals(number).name

    def run(self) -> dict[str, Any]:
        """All legs to their end, or as far as a signal allows; the summary."""
        self.out.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        os.nice(self.args.nice)
        self._make_input()
        total_s, leg_s = self.args.hours * 3600, self.args.leg_hours * 3600
        while not self.stopping and (left := total_s - sum(leg.elapsed_s for leg in self.legs)) > 0:
            leg = Leg.of(self.out, len(self.legs) + 1, self._settings(), self.args.restart_minutes * 60, self.say)
            self.legs.append(leg)
            if not leg.judged:
                self._run(leg, min(leg_s, left))
            if leg.failures:
                break
        return self.summary()

    def _run(self, leg: Leg, seconds: float) -> None:
        self.say(f"{leg.name}: goes on until {seconds / 3600:.2f} h, after {leg.elapsed_s / 3600:.2f} h")
        leg.run(seconds, lambda: bool(self.stopping))
        if not self.stopping:
            leg.finish()
            self.say(f"{leg.name}: {json.dumps(leg.judged)} {'; '.join(leg.failures)}")
            if not leg.failures and not wrong(leg.judged):
                for name in ("journal", "checkpoints"):
                    shutil.rmtree(leg.folder / name, ignore_errors=True)
        replace_text(self.out / "soak.json", json.dumps(self.summary()) + "\n")

    def summary(self) -> dict[str, Any]:
        """Of all legs so far."""
        judged = [leg.judged for leg in self.legs if leg.judged]
        elapsed = sum(leg.elapsed_s for leg in self.legs)
        failures = [f"{leg.name}: {failure}" for leg in self.legs for failure in leg.failures]
        counted = {name: sum(one[name] for one in judged) for name in ("steps", "trained", *ZERO)}
        violations = [text for one in judged for text in one["violations"]]
        complete = elapsed >= self.args.hours * 3600 and len(judged) == len(self.legs)
        return {
            "hours": round(elapsed / 3600, 3),
            "complete": complete,
            "ok": complete and not failures and not violations and not any(counted[name] for name in ZERO),
            **counted,
            "planted": {victim: sum(leg.planted[victim] for leg in self.legs) for victim in VICTIMS},
            "slopes": slopes([leg.folder for leg in self.legs], self.args.settle_minutes * 60),
            "leaks": [text for one in judged for text in one["leaks"]],
            "failures": failures + violations,
        }

    def _make_input(self) -> None:
        command = [sys.executable, "-m", "learner.examples.calculator", "--out", str(self.out / "data")]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def _settings(self) -> list[str]:
        data, here = self.out / "data", Path(__file__).parent
        return [
            f"model.path={data / 'model'}",
            f"data.train={data / 'train.jsonl'}",
            f"data.eval={data / 'eval.jsonl'}",
            f"environment.function={here / 'environment.py'}:rollout",
            # two batches are in flight, so a step begins twice in a pause
            f"environment.options={{pause_s: {2 * self.args.step_seconds}}}",
            "reward.workers=1",
            "rollout.group_size=4",
            "rollout.groups_per_step=8",
            "rollout.restarts=1000",
            "replay.restarts=1000",
            "replay.journal_keep=all",
            "learner.restarts=1000",
            "learner.lr=1e-6",
            "placement.split=1:2",
            "evaluation.every_steps=200",
            "evaluation.num_prompts=32",
            "checkpoint.every_steps=100",
            "tracking.live=plain",
            "tracking.plot=false",
            "limits.flat_reward_steps=0",
            "limits.zero_gradient_steps=0",
            f"limits.growth_window_s={WINDOW_S}",
            *self.args.set,
        ]


def wrong(judged: dict[str, Any]) -> bool:
    """Whether something is there that must not be."""
    return bool(judged["violations"] or any(judged[name] for name in ZERO))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, required=True, help="of training in all, such as 2 or 72")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder (default: %(default)s)")
    parser.add_argument("--leg-hours", type=float, default=6.0, help="after which a run of its own ends")
    parser.add_argument("--restart-minutes", type=float, default=20.0, help="between two planted restarts")
    parser.add_argument("--step-seconds", type=float, default=3.0, help="from step to step: longer is lighter")
    parser.add_argument("--settle-minutes", type=float, default=10.0, help="of a process, left out of its slopes")
    parser.add_argument("--nice", type=int, default=10, help="added to the niceness of every process")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    found = Soak(parser.parse_args()).run()
    try:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    except OSError:  # the terminal is gone; soak.json has it
        return 0 if found["ok"] else 1
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
