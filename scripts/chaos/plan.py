"""Which faults, at which points, in which order: drawn once from the seed, so that a campaign can be repeated."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.chaos.faults import FAULTS, possible
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
    """`num_faults` faults over as many runs as that takes.

    Every pair of fault and point comes once before any comes a second time, as far as the variants of the runs allow.

    Args:
        seed: of the order and of everything else that is drawn.
        num_faults: in all.
        per_run: faults of one run.
        only: words between commas; faults with one of them in their name. Empty takes all.
    """
    rng = random.Random(seed)
    decks = {variant: _deck(rng, variant, only) for variant in VARIANTS if any(pairs(variant, only))}
    if not decks:
        raise ValueError(f"--only {only!r}: no fault of the table has such a name; see --table")
    used: dict[tuple[str, str], int] = {}
    runs: list[PlannedRun] = []
    while num_faults > 0:
        variant = list(decks)[len(runs) % len(decks)]
        faults = []
        for _ in range(min(per_run, num_faults)):
            deck = decks[variant]
            pair = min(deck, key=lambda p: used.get(p, 0))  # the first of those that came least often
            deck.remove(pair)
            deck.append(pair)
            used[pair] = used.get(pair, 0) + 1
            faults.append(Planned(*pair, server=rng.choice(SERVERS)))
        num_faults -= len(faults)
        runs.append(PlannedRun(variant, tuple(faults)))
    return runs


def _deck(rng: random.Random, variant: Variant, only: str) -> list[tuple[str, str]]:
    deck = list(pairs(variant, only))
    rng.shuffle(deck)
    return deck


def pairs(variant: Variant, only: str = "") -> Iterator[tuple[str, str]]:
    """(fault, point) that a run of this variant can have."""
    ranks = 2 if any(setting.endswith(":2") for setting in variant.settings) else 1
    for fault in FAULTS:
        wanted = any(word.strip() in fault.name for word in only.split(","))
        if wanted and possible(fault.needs, keys=variant.keys, num_ranks=ranks):
            for point in fault.points:
                # what is sealed cannot be held by its kind
                if not (variant.keys and point == "in flight"):
                    yield fault.name, point
