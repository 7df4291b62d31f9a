"""The points of an update at which a fault meets it, and what one case came to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """Where an update stands. Example: Point("Staged", "Staged", "all has come and is proven, the publisher knows")"""

    name: str
    moment: str
    """Of gates.py, at which a receiver is held; empty where it need not be."""
    what: str


POINTS = (
    Point("before Join", "before Join", "a receiver is about to say Join"),
    Point("joining", "joining", "it has said Join and has no answer"),
    Point("late join", "middle bucket", "it is being filled with the last version, the others serve that"),
    Point("gathering", "", "the next version is being put together on rank 0"),
    Point("Epoch", "Epoch", "it is invited into the next epoch and has not answered"),
    Point("EpochReady", "EpochReady", "it has answered, others may not have"),
    Point("Begin", "Begin", "Begin has come, no group is there"),
    Point("forming", "forming", "it has told the others its address, and connects to nobody"),
    Point("first bucket", "first bucket", "the group is there, nothing has been sent"),
    Point("middle bucket", "middle bucket", "half of the buckets have come"),
    Point("last bucket", "last bucket", "all but one have come"),
    Point("verifying", "verifying", "all have come and are to be digested"),
    Point("Staged", "Staged", "it has said that its bytes are proven"),
    Point("Commit", "Commit", "Commit has come, the engine is untouched"),
    Point("applying", "applying", "half of the tensors are in the engine"),
    Point("proving", "proving", "all are in the engine, which does not serve them yet"),
    Point("Applied", "Applied", "it has said what the engine holds"),
    Point("between updates", "", "everybody serves the last version, nothing is under way"),
    Point("overtaken", "middle bucket", "the next version is published while this one is half sent"),
    Point("refill", "middle bucket", "bytes were corrupt, the version is being sent again"),
)
JOINING = ("before Join", "joining", "late join")
"""Points that a receiver passes once in its life."""


HOLD_S = 1.0
"""Longest that a gate holds a receiver by itself: less than the collective timeout, so that holding breaks nothing."""


def chosen(number: int, among: Sequence[Point], rng: random.Random) -> list[Point]:
    """So many of the points, drawn, in their order."""
    return [among[i] for i in sorted(rng.sample(range(len(among)), min(number, len(among))))]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One case."""

    role: str
    fault: str
    point: str
    seconds: float = 0.0
    """From the fault until the next version was live at all who were not hit by it."""
    culprit: str = ""
    """The line of a log that names who was hit; "changes nothing" where no peer may say a word."""
    digests_equal: bool = False
    """Afterwards, at everybody."""
    hung: str = ""
    """Which wait was not over at its deadline."""
    wrong: list[str] = field(default_factory=list)
    """No line names who was hit, or somebody who was not hit was named or removed."""

    def row(self) -> str:
        """A line of the table."""
        state = "HUNG: " + self.hung if self.hung else "equal" if self.digests_equal else "DIFFERENT"
        words = "; ".join(f"WRONG: {wrong}" for wrong in self.wrong) or self.culprit
        return f"{self.role:8}  {self.fault:5}  {self.point:15}  {self.seconds:6.2f}  {state:9}  {words}"


HEADER = f"{'role':8}  {'fault':5}  {'point':15}  {'s':>6}  {'digests':9}  who says what"


def totals(outcomes: Sequence[Outcome], deadlines_s: dict[str, float], skipped: int) -> dict[str, Any]:
    """The last line of the output."""
    return {
        "cases": len(outcomes),
        "hung": sum(bool(o.hung) for o in outcomes),
        "digests_equal": all(o.digests_equal for o in outcomes),
        "unnamed": sum(bool(o.wrong) for o in outcomes),
        "longest_s": _longest(outcomes),
        "deadline_s": max(deadlines_s.values()),
        "roles": {
            role: {
                "cases": len(mine := [o for o in outcomes if o.role == role]),
                "longest_s": _longest(mine),
                "deadline_s": limit,
            }
            for role, limit in deadlines_s.items()
        },
        "skipped": skipped,
    }


def _longest(outcomes: Sequence[Outcome]) -> float:
    return round(max((o.seconds for o in outcomes), default=0.0), 2)
