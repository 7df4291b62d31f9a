"""Runs under faults, one after the other, and what the checker says of each."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaos.checker import Report, check
from scripts.chaos.injection import INSTANT, Injector
from scripts.chaos.logs import Line
from scripts.chaos.plan import Planned, PlannedRun
from scripts.chaos.points import Aim
from scripts.chaos.settings import naming_s
from scripts.chaos.table import BY_NAME, Fault
from scripts.chaos.trial import Ended, Hung, Trial

GAP_S = (0.2, 1.5)
"""Between a run that goes on and the next fault."""


@dataclass(slots=True)
class Totals:
    """Sums over all runs."""

    faults: int = 0
    hung: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    """From each fault's end until the run had gone on."""

    def add(self, report: Report) -> None:
        """What the checker said of one more run."""
        mine = self.report
        for name in ("acked", "trained", "buffered", "leased_again", "repeated_steps"):
            setattr(mine, name, getattr(mine, name) + getattr(report, name))
        mine.dropped += report.dropped
        mine.lost += report.lost
        mine.trained_twice += report.trained_twice
        mine.violations += report.violations

    def as_json(self) -> dict[str, Any]:
        """The last line of the output."""
        found = self.report.as_json()
        return {
            "faults": self.faults,
            **{name: found[name] for name in ("acked", "trained", "dropped", "lost", "trained_twice")},
            "hung": len(self.hung),
            "unnamed": len(self.unnamed),
            "ended_early": len(self.ended),
            "violations": found["violations"],
            "buffered": found["buffered"],
            "repeated_steps": found["repeated_steps"],
            "pairs_hit": len(self.coverage),
            "max_recovery_s": round(max(self.recovery_s, default=0.0), 1),
        }

    @property
    def in_order(self) -> bool:
        """Whether nothing was lost, doubled, hung or unnamed."""
        return self.report.in_order and not (self.hung or self.unnamed or self.ended)


class Campaign:
    """All planned runs."""

    def __init__(self, work: Path, data: Path, seed: int) -> None:
        self.work, self.data = work, data
        self.rng = random.Random(seed + 1)
        self.totals = Totals()
        self.started = time.monotonic()

    def run(self, number: int, planned: PlannedRun) -> None:
        """One run: its faults, its end, its check."""
        work = self.work / f"{number:02d}"
        self._say(f"run {number}: {planned.variant.name}, {len(planned.faults)} faults, in {work}")
        try:
            with Trial(planned.variant, work, self.data, len(planned.faults)) as trial:
                self._faults(trial, planned)
                code = trial.finish()
                if code != 0:
                    raise Ended(f"exit code {code}: {trial.last_words()}")
        except Hung as hung:
            self.totals.hung.append(f"{work}: {hung}")
            self._say(f"HUNG: {hung}")
        except Ended as ended:
            self.totals.ended.append(f"{work}: {ended}")
            self._say(f"ENDED: {ended}")
        if (work / "run" / "config.yaml").exists():
            report = check(work / "run", journal=work / "journal", acks=sorted(work.glob("acks-*.jsonl")))
            self.totals.add(report)
            self._say(f"check: {report.as_json()}")

    def _faults(self, trial: Trial, planned: PlannedRun) -> None:
        injector = Injector(trial, self.rng)
        before: frozenset[str] = frozenset()
        for fault in planned.faults:
            trial.wait_for_peers(fault.server)
            trial.rest(self.rng.uniform(*GAP_S))
            self._fault(trial, injector, fault, before)
            before = BY_NAME[fault.fault].classes
            trial.faults_done += 1

    def _fault(self, trial: Trial, injector: Injector, planned: Planned, before: frozenset[str]) -> None:
        """Aim, inject, look for the line that names it, and wait until the run has gone on."""
        fault = BY_NAME[planned.fault]
        instant = fault.name.startswith(INSTANT)
        mark = trial.logs.mark()
        aim = Aim(trial, planned.point, planned.server, self.rng)
        try:
            aim.reach()
            point = aim.was_hit()
            injector.do(fault.name, planned.server)
            if instant:
                point = aim.was_hit()
        finally:
            aim.release()
        self.totals.faults += 1
        self.totals.coverage[fault.name, point] += 1
        over = time.monotonic()
        line = self._named(trial, fault, planned.server, mark)
        trial.go_on()
        took = time.monotonic() - over
        self.totals.recovery_s.append(took)
        wrong = self._misnamed(trial, fault.classes | before, mark)
        said = line.text[:160] if line is not None else ("" if fault.changes_nothing else "UNNAMED")
        words = f"{fault.name} at {point!r} ({planned.server}, {injector.detail}): on after {took:.1f} s; {said}"
        self._say(words + (f"; WRONG CLASS: {wrong.log}: {wrong.text[:200]}" if wrong is not None else ""))
        if said == "UNNAMED" or wrong is not None:
            self.totals.unnamed.append(f"{trial.work}: {words}; {wrong}")

    def _named(self, trial: Trial, fault: Fault, server: str, mark: dict[Path, int]) -> Line | None:
        if fault.changes_nothing:
            return None
        patterns = [pattern.replace("{server}", server) for pattern in fault.says]
        try:
            trial.wait(
                lambda: trial.logs.first(patterns, mark) is not None, f"a line of {patterns}", naming_s(trial.config)
            )
        except Hung:
            return None
        return trial.logs.first(patterns, mark)

    def _misnamed(self, trial: Trial, allowed: frozenset[str], mark: dict[Path, int]) -> Line | None:
        return next((line for line in trial.logs.since(mark) if line.classes - allowed), None)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:7.1f} s  {text}", flush=True)
