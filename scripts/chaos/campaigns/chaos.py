"""`python -m scripts.chaos --faults 200 --seed 1`: faults against real runs, and one line of JSON about them.

Real launchers, replay processes, learner ranks and rollout servers train a tiny model while processes are killed and
stopped, links are cut, slowed and frozen, messages change on the way, a disk fills up and clocks jump
(scripts/chaos/faults.py). Afterwards a checker that shares no code with any of them reads what they left behind.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scripts.chaos import checker
from scripts.chaos.cluster import Cluster
from scripts.chaos.faults import BY_NAME, FAULTS, INSTANT, POINTS, Fault, as_markdown
from scripts.chaos.injection import Injector
from scripts.chaos.plan import Planned, PlannedRun, make_plan
from scripts.chaos.points import Aim
from scripts.chaos.polling import Ended, Hung
from scripts.chaos.report import Protocol, State, conclude, end_on_sigterm
from scripts.chaos.settings import SERVERS, START_S, make_data, naming_s, run_settings, variant_settings
from scripts.chaos.watch import Line

GAP_S = (0.2, 1.5)
"""Between a run that goes on and the next fault."""
STEPS_PER_FAULT = 12
SPARE_STEPS = 30
PACES_S = (0.01, 0.05, 0.5)
"""Seconds that the reward of one trajectory takes (four make a group) while the run is where its faults are, ahead of
them, and so far ahead that it would end before they do."""


@dataclass(slots=True)
class Result:
    """What came of one run; sums over all runs."""

    faults: int = 0
    hung: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)
    """By `fault at point`, where the fault has really met the run."""
    recovery_s: list[float] = field(default_factory=list)
    """From each fault's end until the run had gone on."""
    counts: Counter[str] = field(default_factory=Counter)
    """The checker's."""
    dropped: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def add(self, run: dict[str, Any]) -> None:
        """One more run, as JSON."""
        self.faults += run["faults"]
        for name in ("hung", "unnamed", "ended", "recovery_s", "lost", "trained_twice", "violations"):
            getattr(self, name).extend(run[name])
        for name in ("coverage", "counts", "dropped"):
            getattr(self, name).update(run[name])

    def take(self, report: checker.Report) -> None:
        """The report of the checker."""
        for name in ("acked", "trained", "buffered", "repeated_steps"):
            self.counts[name] += getattr(report, name)
        self.dropped += report.dropped
        self.lost, self.trained_twice, self.violations = report.lost, report.trained_twice, report.violations

    def as_part(self) -> dict[str, Any]:
        """As JSON, for `add`."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    @property
    def wrong(self) -> list[str]:
        """Everything that must not be."""
        groups = [*self.lost, *self.trained_twice, *self.violations]
        return [*self.hung, *self.ended, *self.unnamed, *groups[:20]]

    def as_json(self) -> dict[str, Any]:
        """The last line of the output."""
        return {
            "faults": self.faults,
            "acked": self.counts["acked"],
            "trained": self.counts["trained"],
            "dropped": dict(self.dropped),
            "lost": len(self.lost),
            "trained_twice": len(self.trained_twice),
            "hung": len(self.hung),
            "unnamed": len(self.unnamed),
            "ended_early": len(self.ended),
            "violations": len(self.violations),
            "buffered": self.counts["buffered"],
            "repeated_steps": self.counts["repeated_steps"],
            "pairs_hit": len(self.coverage),
            "max_recovery_s": round(max(self.recovery_s, default=0.0), 1),
        }


class Trial:
    """One run and its faults."""

    def __init__(self, planned: PlannedRun, work: Path, data: Path, rng: random.Random, protocol: Protocol) -> None:
        self.planned, self.work, self.data, self.rng, self.protocol = planned, work, data, rng, protocol
        self.result = Result()
        self.cluster = Cluster(work, pace=self._pace)

    def run(self) -> Result:
        """The run, its faults, its end, its check."""
        try:
            with self.cluster as cluster:
                self._start()
                before: frozenset[str] = frozenset()
                for fault in self.planned.faults:
                    cluster.wait_for_peers(fault.server)
                    cluster.rest(self.rng.uniform(*GAP_S))
                    self._fault(fault, before)
                    before = BY_NAME[fault.fault].classes
                code = cluster.finish()
                if code != 0:
                    raise Ended(f"exit code {code}: {cluster.last_words()}")
        except (Hung, Ended) as error:
            kind = "hung" if isinstance(error, Hung) else "ended"
            getattr(self.result, kind).append(f"{self.work}: {error}")
            self.protocol.say(f"{kind.upper()}: {error}")
        run = self.cluster.folder
        if (run / "config.yaml").exists():
            records = sorted(self.work.glob("probes/*/events.jsonl"))
            report = checker.check(run, journal=self.work / "journal", acks=records)
            self.result.take(report)
            self.protocol.say(f"check: {report.as_json()}")
        return self.result

    def _start(self) -> None:
        steps = STEPS_PER_FAULT * len(self.planned.faults) + SPARE_STEPS
        values = [*run_settings(self.work, self.data), *variant_settings(self.planned.variant, self.work)]
        self.cluster.launch([*values, f"learner.total_steps={steps}"])
        for name in SERVERS:
            self.cluster.serve(name)
        self.cluster.wait(lambda: self.cluster.watch.account.version > 0, "the first step", 2 * START_S)

    def _pace(self) -> float:
        """Steps must last as long as faults do: slow when the run is ahead of them."""
        if self.result.faults >= len(self.planned.faults):
            return 0.0
        ahead = self.cluster.watch.account.high // STEPS_PER_FAULT - self.result.faults
        return PACES_S[max(0, min(ahead, len(PACES_S) - 1))]

    def _fault(self, planned: Planned, before: frozenset[str]) -> None:
        """Aim, inject, look for the line that names it, and wait until the run has gone on."""
        fault, cluster, result = BY_NAME[planned.fault], self.cluster, self.result
        injector, mark = Injector(cluster, self.rng), cluster.logs.mark()
        aim = Aim(cluster, planned.point, planned.server, self.rng)
        try:
            aim.reach()
            point = aim.was_hit()
            injector.do(fault.name, planned.server)
            if fault.name.startswith(INSTANT):
                point = aim.was_hit()
        finally:
            aim.release()
        result.faults += 1
        result.coverage[f"{fault.name} at {point}"] += 1
        over = time.monotonic()
        line = self._named(fault, planned.server, mark)
        cluster.go_on()
        took = time.monotonic() - over
        result.recovery_s.append(took)
        wrong = next((line for line in cluster.logs.since(mark) if line.classes - fault.classes - before), None)
        said = line.text[:160] if line is not None else ("" if fault.changes_nothing else "UNNAMED")
        words = f"{fault.name} at {point!r} ({planned.server}, {injector.detail}): on after {took:.1f} s; {said}"
        self.protocol.say(words + (f"; WRONG CLASS: {wrong.log}: {wrong.text[:200]}" if wrong is not None else ""))
        if said == "UNNAMED" or wrong is not None:
            result.unnamed.append(f"{self.work}: {words}; {wrong}")

    def _named(self, fault: Fault, server: str, mark: dict[Path, int]) -> Line | None:
        if fault.changes_nothing:
            return None
        patterns, logs = [pattern.replace("{server}", server) for pattern in fault.says], self.cluster.logs
        found: list[Line | None] = [None]

        def look() -> bool:
            found[0] = logs.first(patterns, mark)
            return found[0] is not None

        try:
            self.cluster.wait(look, f"a line of {patterns}", naming_s(self.cluster.config))
        except Hung:
            return None
        return found[0]


def main(argv: Sequence[str]) -> int:
    """Command line; exit code 1 when anything was lost, doubled, hung or unnamed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="faults in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--per-run", type=int, default=20, help="faults in one run (default: %(default)s)")
    parser.add_argument("--only", default="", help="faults with one of these words in their name: kill,cut")
    parser.add_argument("--work", type=Path, default=None, help="folder for runs, also to go on in; default: a new one")
    parser.add_argument("--data", type=Path, default=Path("data/sort6"), help="of make_sort6 (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the runs there also when all is in order")
    parser.add_argument("--table", action="store_true", help="print the table of docs/faults.md and end")
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join(as_markdown()))
        return 0
    if args.faults < 1 or args.per_run < 1:
        parser.error("--faults and --per-run must be at least 1")
    try:
        plan = make_plan(args.seed, args.faults, args.per_run, args.only)
        what = {"faults": args.faults, "seed": args.seed, "per_run": args.per_run, "only": args.only}
        state = State(args.work, "chaos", what)
    except ValueError as error:
        parser.error(str(error))
    data, protocol = make_data(args.data), Protocol()
    end_on_sigterm()
    for number, planned in enumerate(plan, start=1):
        if number > len(state.done):
            work, rng = state.fresh(f"{number:02d}"), random.Random(f"{args.seed}/{number}")
            protocol.say(f"run {number}: {planned.variant.name}, {len(planned.faults)} faults, in {work}")
            state.add(Trial(planned, work, data, rng, protocol).run().as_part())
    total = Result()
    for run in state.done:
        total.add(run)
    print_coverage(total.coverage)
    code = conclude(total.as_json(), total.wrong, in_order=not total.wrong)
    if code == 0 and not args.keep:
        state.remove()
    return code


def print_coverage(coverage: Counter[str]) -> None:
    """How often each fault has met a run at each point."""
    width = max(len(fault.name) for fault in FAULTS)
    print(f"{'':{width}}  " + "  ".join(POINTS))
    for fault in FAULTS:
        cells = (f"{coverage[f'{fault.name} at {point}'] or '-':>{len(point)}}" for point in POINTS)
        print(f"{fault.name:{width}}  " + "  ".join(cells))
