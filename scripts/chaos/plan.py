"""Which faults, at which points, in which order: drawn once from the seed, so that a campaign can be repeated."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.chaos.faults import FAULTS
from scripts.chaos.settings import SERVERS, VARIANTS, Variant


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come. Example: Planned("kill replay", "formed", "rollout-a")"""

    fault: str
    point: str
    server: str


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run and its faults."""

    variant: Variant
    faults: tuple[Planned, ...]


def make_plan(seed: int, num_faults: int, per_run: int, only: str = "") -> list[PlannedRun]:
    """`num_faults` faults, `per_run` of them in a run.

    Every pair of fault and point comes once before any comes a second time, as far as the variants of the runs allow.
    `only` has words between commas: faults with one of them in their name. Raises ValueError where there is none.
    """
    rng = random.Random(seed)
    decks = {variant: deck for variant in VARIANTS if (deck := list(pairs(variant, only)))}
    if not decks:
        raise ValueError(f"--only {only!r}: no fault of the table has such a name; see --table")
    for deck in decks.values():
        rng.shuffle(deck)
    used: Counter[tuple[str, str]] = Counter()
    runs: list[PlannedRun] = []
    for first in range(0, num_faults, per_run):
        variant = list(decks)[len(runs) % len(decks)]
        faults = []
        for _ in range(min(per_run, num_faults - first)):
            deck = decks[variant]
            pair = min(deck, key=used.__getitem__)  # the first of those that came least often
            deck.remove(pair)
            deck.append(pair)
            used[pair] += 1
            faults.append(Planned(*pair, server=rng.choice(SERVERS)))
        runs.append(PlannedRun(variant, tuple(faults)))
    return runs


def pairs(variant: Variant, only: str = "") -> Iterator[tuple[str, str]]:
    """(fault, point) that a run of this variant can have."""
    two_ranks = any(setting.endswith(":2") for setting in variant.settings)
    possible = {"": True, "open": not variant.keys, "keys": variant.keys, "two ranks": two_ranks}
    for fault in FAULTS:
        if possible[fault.needs] and any(word.strip() in fault.name for word in only.split(",")):
            for point in fault.points:
                # what is sealed cannot be held by its kind
                if not (variant.keys and point == "in flight"):
                    yield fault.name, point
