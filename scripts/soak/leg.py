"""One run of a soak: it is started or resumed, its processes are killed in turn, and it is ended and judged."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from learner.launch.children import Tail
from scripts.chaos import processes
from scripts.chaos.checker import check
from scripts.chaos.polling import JsonLines, replace_text

POLL_S = 2.0
SAVE_S = 30.0
STALLED_S = 600.0
"""Without a step for so long, the leg has failed: a restart takes half a minute on a busy machine."""
LEAVE_S = 120.0
LAST_STEPS = 3
"""Made by the run's regular end."""
PLENTY = 1_000_000_000
SERVER = r" rollout_server\.main "
VICTIMS = ("server", "learner", "replay")
OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|MemoryError|Cannot allocate memory", re.IGNORECASE)
LEAK = re.compile(r" (leak: .*)")
KILLED = re.compile(r"killed by SIGKILL")


@dataclass(slots=True)
class Leg:
    """One run. What is known of it stands in leg.json beside the run, so that another process goes on with it."""

    parent: Path
    name: str
    settings: Sequence[str]
    """`a.b=c`, over the preset."""
    restart_every_s: float
    say: Callable[[str], None]
    elapsed_s: float = 0.0
    planted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    failures: list[str] = field(default_factory=list)
    judged: dict[str, Any] = field(default_factory=dict)
    """Once it is over."""

    @classmethod
    def of(
        cls, parent: Path, number: int, settings: Sequence[str], restart_every_s: float, say: Callable[[str], None]
    ) -> "Leg":
        """A new leg, or one that was begun."""
        leg = cls(parent, f"leg-{number}", settings, restart_every_s, say)
        if leg._state.exists():
            known = json.loads(leg._state.read_text(encoding="utf-8"))
            leg.elapsed_s, leg.planted, leg.failures = known["elapsed_s"], known["planted"], known["failures"]
            leg.judged = known["judged"]
        return leg

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.parent / self.name

    @property
    def _state(self) -> Path:
        return self.parent / f"{self.name}.json"

    def save(self) -> None:
        """Write down what is known."""
        known = {"elapsed_s": self.elapsed_s, "planted": self.planted, "failures": self.failures}
        replace_text(self._state, json.dumps({**known, "judged": self.judged}) + "\n")

    def run(self, seconds: float, has_to_stop: Callable[[], bool]) -> None:
        """Go on until the leg has lasted this long, has failed, or `has_to_stop`; then end its processes."""
        with (self.parent / f"{self.name}.log").open("a", encoding="utf-8") as output:
            launcher = self._start(output)
            try:
                self._watch(launcher, seconds, has_to_stop)
            finally:
                end(launcher)
                self.save()

    def finish(self) -> None:
        """Resume it for its last steps, so that it ends in good order, and judge it."""
        done = max((row["step"] for row in self._rows() if "step" in row), default=0)
        if not self.failures:
            with (self.parent / f"{self.name}.log").open("a", encoding="utf-8") as output:
                launcher = self._start(output, f"learner.total_steps={done + LAST_STEPS}")
                try:
                    code = launcher.wait(STALLED_S)
                except subprocess.TimeoutExpired:
                    code = None
                    end(launcher)
            if code != 0:
                self.failures.append(f"its last {LAST_STEPS} steps ended with {code}: {self._last_words()}")
        self.judged = self._judge()
        self.save()

    def _start(self, output: TextIO, *more: str) -> "subprocess.Popen[bytes]":
        begun = (self.folder / "journal").exists()
        command = [sys.executable, "-m", "learner.main", "--parent", str(os.getpid())]
        command += ["--resume", str(self.folder)] if begun else ["--config", "calculator"]
        own = [f"run.dir={self.parent}", f"run.name={self.name}", f"learner.total_steps={PLENTY}", *self.settings]
        for setting in [*([] if begun else own), *more]:
            command += ["--set", setting]
        if begun and not more:
            command += ["--set", f"learner.total_steps={PLENTY}"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, start_new_session=True, **streams)  # type: ignore[call-overload,no-any-return]

    def _watch(self, launcher: "subprocess.Popen[bytes]", seconds: float, has_to_stop: Callable[[], bool]) -> None:
        rows = Tail(self.folder / "metrics.jsonl")  # which is written anew when the learner restarts
        looked = stepped = saved = time.monotonic()
        fault_at = looked + self.restart_every_s
        while self.elapsed_s < seconds and not has_to_stop():
            time.sleep(POLL_S)
            now = time.monotonic()
            self.elapsed_s, looked = self.elapsed_s + now - looked, now
            stepped = now if rows.new_lines() else stepped
            if launcher.poll() is not None:
                self.failures.append(f"the run ended with {launcher.returncode}: {self._last_words()}")
                return
            if now - stepped > STALLED_S:
                self.failures.append(f"no step for {STALLED_S:g} s")
                return
            if now > fault_at:
                fault_at = now + self.restart_every_s
                self._kill(launcher.pid)
            if now - saved > SAVE_S:
                saved = now
                self.save()

    def _kill(self, launcher: int) -> None:
        """The next victim in turn."""
        victim = VICTIMS[sum(self.planted.values()) % len(VICTIMS)]
        if victim == "server":
            pids = sorted(pid for pid, command in processes.below(launcher).items() if re.search(SERVER, command))
        else:
            pids = processes.of_role(launcher, victim)
        if pids and processes.send(pids[0], signal.SIGKILL):
            self.planted[victim] += 1
            self.say(f"{self.name}: SIGKILL of {victim} (pid {pids[0]}) after {self.elapsed_s / 60:.0f} min")

    def _rows(self) -> list[dict[str, Any]]:
        return JsonLines.read(self.folder / "metrics.jsonl")

    def _last_words(self) -> str:
        lines = (self.parent / f"{self.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "no output"

    def _judge(self) -> dict[str, Any]:
        report = check(self.folder)
        logs = [self.parent / f"{self.name}.log", *sorted((self.folder / "logs").glob("*.log"))]
        lines = [line for path in logs for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        said = logs[0].read_text(encoding="utf-8", errors="replace").splitlines()
        killed = sum(bool(KILLED.search(line)) for line in said)
        rows = [*self._rows(), *JsonLines.read(self.folder / "metrics.discarded.jsonl")]
        return {
            "steps": max((row["step"] for row in rows if "step" in row), default=0),
            "trained": report.trained,
            "lost": len(report.lost),
            "trained_twice": len(report.trained_twice),
            "violations": report.violations[:5],
            "non_finite": sum(int(row.get("metrics/nonfinite", 0)) for row in rows),
            "out_of_memory": sum(bool(OUT_OF_MEMORY.search(line)) for line in lines),
            "killed_unplanned": max(0, killed - sum(self.planted.values())),
            "leaks": sorted({found[1] for line in lines if (found := LEAK.search(line))})[:20],
        }


def end(launcher: "subprocess.Popen[bytes]") -> None:
    """SIGINT, so that the run can be gone on with; SIGKILL where that takes too long."""
    launcher.send_signal(signal.SIGINT)
    try:
        launcher.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
