"""`python -m scripts.chaos --faults 200 --seed 1`: faults against real runs, and one line of JSON about them.

Real launchers, replay processes, learner ranks and rollout servers train a tiny model while processes are killed and
stopped, links are cut, slowed and frozen, messages change on the way, a disk fills up and clocks jump
(scripts/chaos/faults.py). Afterwards a checker that shares no code with any of them reads what they left behind.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.chaos import checker, on_ray
from scripts.chaos.cluster import SERVERS, VARIANTS, Cluster, Variant, make_data
from scripts.chaos.faults import BY_NAME, FAULTS, INSTANT, Injector, Planned, as_markdown
from scripts.chaos.polling import Ended, Hung
from scripts.chaos.report import State, say

OPTIONS = {
    "faults": (20, "faults in all"),
    "per_run": (20, "faults in one run"),
    "only": ("", "faults with one of these words in their name: kill,cut"),
    "variant": ("", "runs of variants with this in their name alone: teachers"),
    "ray": (False, "launch every run through Ray, on raylets of this host (extra ray)"),
    "data": (Path("data/sort6"), "of make_sort6"),
    "table": (tuple(as_markdown()), "print the table of docs/faults.md and end"),
}
GAP_S = (0.2, 1.5)  # between a run that goes on and the next fault
STEPS_PER_FAULT, SPARE_STEPS = 12, 30
PACES_S = (0.01, 0.05, 0.5)
"""Seconds that the reward of one trajectory takes (four make a group) while the run is where its faults are, ahead of
them, and so far ahead that it would end before they do."""

KEYS = (
    *("faults", "acked", "trained", "dropped", "lost", "trained_twice", "hung", "unnamed", "ended_early"),
    *("violations", "buffered", "repeated_steps"),
)
PlannedRun = tuple[Variant, list[Planned]]
Part = dict[str, Any]
"""What came of one run, or the sums over all. `coverage` counts by `fault at point`, where the fault has met the run;
`recovery_s` are the times from a fault's end until the run had gone on."""


def plan(args: argparse.Namespace) -> list[PlannedRun]:
    servers = on_ray.SERVERS if args.ray else SERVERS
    return make_plan(args.seed, args.faults, args.per_run, args.only, servers, variant=args.variant)


def make_plan(
    seed: int, num_faults: int, per_run: int, only: str = "", servers: Sequence[str] = SERVERS, *, variant: str = ""
) -> list[PlannedRun]:
    """`num_faults` faults, `per_run` of them in a run; every pair of fault and point comes before any comes again.

    `only` has words between commas: faults with one of them in their name. Raises ValueError where there is none.
    """
    rng = random.Random(seed)
    decks = {one: deck for one in VARIANTS if variant in one.name and (deck := list(pairs(one, only)))}
    if not decks:
        raise ValueError(f"--only {only!r}, --variant {variant!r}: no fault of the table has such a name; see --table")
    for deck in decks.values():
        rng.shuffle(deck)
    used: Counter[tuple[str, str]] = Counter()
    runs: list[PlannedRun] = []
    for first in range(0, num_faults, per_run):
        chosen = list(decks)[len(runs) % len(decks)]
        faults = []
        for _ in range(min(per_run, num_faults - first)):
            pair = min(decks[chosen], key=used.__getitem__)  # the first of those that came least often
            used[pair] += 1
            faults.append(Planned(*pair, server=rng.choice(servers)))
        runs.append((chosen, faults))
    return runs


def pairs(variant: Variant, only: str = "") -> Iterator[tuple[str, str]]:
    """(fault, point) that a run of this variant can have."""
    two_ranks = any(setting.endswith(":2") for setting in variant.settings)
    taught = any(setting.startswith("teachers=") for setting in variant.settings)
    possible = {"": True, "open": not variant.keys, "keys": variant.keys, "two ranks": two_ranks, "teachers": taught}
    for fault in FAULTS:
        if possible[fault.needs] and any(word.strip() in fault.name for word in only.split(",")):
            for point in fault.points:
                # what is sealed cannot be held by its kind
                if not (variant.keys and point == "in flight"):
                    yield fault.name, point


def run(planned: list[PlannedRun], state: State, args: argparse.Namespace) -> None:
    for number, (variant, faults) in list(enumerate(planned, start=1))[len(state.done) :]:
        work, rng = state.fresh(f"{number:02d}"), random.Random(f"{args.seed}/{number}")
        say(f"run {number}: {variant.name}, {len(faults)} faults, in {work}")
        state.add((RayTrial if args.ray else Trial)(work, faults, rng).run(variant, make_data(args.data)))


def verdict(state: State, _hung: str, _args: argparse.Namespace) -> tuple[Part, list[str]]:
    found = total(state.done)
    groups = [*found["lost"], *found["trained_twice"], *found["violations"]]
    return as_json(found), [*found["hung"], *found["ended_early"], *found["unnamed"], *groups[:20]]


def new_part() -> Part:
    lists: Part = {name: [] for name in ("hung", "unnamed", "ended_early", "recovery_s")}
    return {"faults": 0, "coverage": Counter(), **lists, **vars(checker.Report())}


def total(parts: Iterable[Part]) -> Part:
    sums = new_part()
    for part in parts:
        for name, value in part.items():
            sums[name] += Counter(value) if isinstance(value, dict) else value
    return sums


def as_json(part: Part) -> Part:
    shown = {key: len(part[key]) if isinstance(part[key], list) else part[key] for key in KEYS}
    longest = round(max(part["recovery_s"], default=0.0), 1)
    return {**shown, "pairs_hit": len(part["coverage"]), "max_recovery_s": longest}


class Trial(Cluster):
    def __init__(self, work: Path, faults: list[Planned], rng: random.Random) -> None:
        super().__init__(work, pace=self._seconds_per_reward)
        self.faults, self.rng, self.result = faults, rng, new_part()

    def run(self, variant: Variant, data: Path) -> Part:
        try:
            with self:
                self.start_small(variant, data, STEPS_PER_FAULT * len(self.faults) + SPARE_STEPS)
                before: frozenset[str] = frozenset()
                for fault in self.faults:
                    self.wait_for_peers(fault.server)
                    self.rest(self.rng.uniform(*GAP_S))
                    self._fault(fault, before)
                    before = BY_NAME[fault.fault].classes
                code = self.finish()
                if code != 0:
                    raise Ended(f"exit code {code}: {self.last_words()}")
        except (Hung, Ended) as error:
            kind = "hung" if isinstance(error, Hung) else "ended_early"
            self.result[kind].append(f"{self.work}: {error}")
            say(f"{kind.upper()}: {error}")
        if (self.folder / "config.yaml").exists():
            report = self.check()
            self.result |= vars(report)
            say(f"check: {report.as_json()}")
        return self.result

    def _seconds_per_reward(self) -> float:
        """Steps must last as long as faults do: slow when the run is ahead of them."""
        if self.result["faults"] >= len(self.faults):
            return 0.0
        ahead = self.history.high // STEPS_PER_FAULT - self.result["faults"]
        return PACES_S[max(0, min(ahead, len(PACES_S) - 1))]

    def _fault(self, planned: Planned, before: frozenset[str]) -> None:
        """Aim, inject, look for the line that names it, and wait until the run has gone on."""
        fault, result, mark = BY_NAME[planned.fault], self.result, self.logs.mark()
        injector = Injector(self, planned, self.rng)
        try:
            injector.reach()
            point = injector.was_hit()
            injector.do()
            if fault.name.startswith(INSTANT):
                point = injector.was_hit()
        finally:
            injector.release()
        result["faults"] += 1
        result["coverage"][f"{fault.name} at {point}"] += 1
        over, says = time.monotonic(), [pattern.replace("{server}", planned.server) for pattern in fault.says]
        config, said = self.config, "UNNAMED" if says else ""
        if says:
            limit = config.network.silent_after_s + config.replay.lease_s + config.weight_bus.deadline_s
            with suppress(Hung):
                said = self.wait(lambda: self.logs.first(says, mark), f"a line of {says}", limit).text[:160]
        self.go_on()
        took = time.monotonic() - over
        result["recovery_s"].append(took)
        wrong = next((line for line in self.logs.since(mark) if line.classes - fault.classes - before), None)
        words = f"{fault.name} at {point!r} ({planned.server}, {injector.detail}): on after {took:.1f} s; {said}"
        say(words + (f"; WRONG CLASS: {wrong.log}: {wrong.text[:200]}" if wrong is not None else ""))
        if said == "UNNAMED" or wrong is not None:
            result["unnamed"].append(f"{self.work}: {words}; {wrong}")


class RayTrial(on_ray.OnRay, Trial):
    """The same, through Ray."""
