"""The table of faults and the symptom that each shows as, which docs/faults.md prints; plans drawn from it."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scripts.chaos.cluster import SERVERS, VARIANTS, Variant

Needs = Literal["", "open", "keys", "two ranks"]
"""What a run must have for a fault: messages that the proxy can read, or CURVE keys, or a second learner rank."""

POINTS = {
    "any": "at any moment",
    "in flight": "a group, or its ack, is on its way",
    "formed": "a batch is formed and its step not committed",
    "committed": "a step is committed and its version at no engine",
    "broadcast": "a broadcast is in its middle",
    "checkpoint": "a checkpoint is being written",
    "reading": "replay was started again and reads its journal",
    "repeating": "the learner repeats journalled steps",
}
INSTANT = ("kill", "torn")  # faults that are over at once begin with these words
EVERYWHERE = tuple(POINTS)
RUNNING = tuple(point for point in POINTS if point != "reading")
WIRE = ("any", "in flight", "formed", "broadcast")
GONE = frozenset({"closed", "silent", "slow"})
"""What a process that is away, or a connection, may look like to the others, one after the other."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    what: str
    says: tuple[str, ...]  # regular expressions, one of which some log must have in time; none: it changes nothing
    points: tuple[str, ...]
    classes: frozenset[str] = GONE  # that may appear until the run has gone on; another one is a wrong name
    needs: Needs = ""


LOST_CLOSED = r"replay: lost '{server}'.*\[closed\]"
LOST_SILENT = r"replay: lost '{server}'.*\[silent\]"
CORRUPT_UP = r"message of {server}.* refused: .*\[corrupt\]"
CORRUPT_DOWN = r"a message of replay is refused: .*\[corrupt\]"
REPLAY_DIED = r"replay \(pid \d+\) died: killed by SIGKILL \[closed\].*restart \d+ of \d+"
LEARNER_DIED = r"the learner stopped: learner rank \d+ \(pid \d+\) was killed by SIGKILL \[closed\].*restart \d+ of \d+"

LEARNER_SILENT = r"waits for the publisher .*\[silent\]"
REPLAY_SILENT = r"(waited|waits).*replay.*\[silent\]"
SERVER_WAITED = r"'{server}' wait(s|ed) .*replay.*\[silent\]"
FULL = r"journal.*\[full\]"
ANY, IN_FLIGHT, WRITING = ("any",), ("any", "in flight"), ("any", "checkpoint")
CORRUPT, DUPLICATE = GONE | {"corrupt"}, GONE | {"duplicate", "corrupt"}
LONG, BRIEFLY = "for longer than network.silent_after_s", "for half of network.silent_after_s"

FAULTS = (
    Fault("kill server", "SIGKILL of a rollout server", (LOST_CLOSED,), RUNNING),
    Fault("kill learner", "SIGKILL of learner rank 0", (LEARNER_DIED,), EVERYWHERE),
    Fault("kill rank", "SIGKILL of the last learner rank", (LEARNER_DIED,), RUNNING, needs="two ranks"),
    Fault("kill replay", "SIGKILL of replay", (REPLAY_DIED,), EVERYWHERE),
    Fault("kill replay and learner", "SIGKILL of both at once", (REPLAY_DIED,), RUNNING),
    Fault("torn journal", "SIGKILL of replay; half a record stands at the end of its journal", (REPLAY_DIED,), ANY),
    Fault("stop server briefly", f"SIGSTOP {BRIEFLY}", (), ("any", "broadcast")),
    Fault("stop server", f"SIGSTOP {LONG}", (LOST_SILENT,), WIRE),
    Fault("stop learner briefly", f"SIGSTOP of rank 0 {BRIEFLY}", (), WRITING),
    Fault("stop learner", f"SIGSTOP of rank 0 {LONG}", (LEARNER_SILENT,), ("any", "formed", "committed")),
    Fault("stop replay briefly", f"SIGSTOP {BRIEFLY}", (), ("any", "in flight", "formed")),
    Fault("stop replay", f"SIGSTOP {LONG}", (REPLAY_SILENT,), ("any", "in flight", "formed", "repeating")),
    Fault("stop launcher", f"SIGSTOP {LONG}", (), ANY),
    Fault("cut", "the link of a rollout server is closed for three seconds", (LOST_CLOSED,), WIRE),
    Fault("blink", "the link is closed at both ends and comes back at once", (), WIRE),
    Fault("slow link", "every message of a link takes 0.1 s for three seconds", (), ("any", "broadcast")),
    Fault("freeze", f"nothing passes a link, which stays open, {LONG}", (LOST_SILENT,), WIRE),
    Fault("freeze up", "the same, from the rollout server to replay only", (LOST_SILENT,), IN_FLIGHT),
    Fault("freeze down", "the same, from replay to the rollout server only", (SERVER_WAITED,), IN_FLIGHT),
    Fault("vanish", "a rollout server and its host are gone, replay's end stays open", (LOST_SILENT,), ANY),
    Fault("flip up", "a bit of an array that goes to replay", (CORRUPT_UP,), ANY, CORRUPT, "open"),
    Fault("flip header up", "a bit of a header to replay", (CORRUPT_UP,), ANY, CORRUPT, "open"),
    Fault("flip lease request", "a bit of a lease request", (CORRUPT_UP,), ("any", "committed"), CORRUPT, "open"),
    Fault("flip hello", "a bit of the Hello of a server that is killed for it", (CORRUPT_UP,), ANY, CORRUPT, "open"),
    Fault("flip welcome", "a bit of the answer to it, the same", (CORRUPT_DOWN,), ANY, CORRUPT, "open"),
    Fault("flip down", "a bit of a message of replay", (CORRUPT_DOWN,), ANY, CORRUPT, "open"),
    Fault("tamper", "a bit of a sealed message, or it comes twice", (), ANY, CORRUPT, "keys"),
    Fault("duplicate up", "a message to replay comes twice", (), ANY, DUPLICATE, "open"),
    Fault("duplicate down", "a message of replay comes twice", (), ANY, DUPLICATE, "open"),
    Fault("reorder up", "a message to replay comes after the next one", (), ANY, GONE, "open"),
    Fault("reorder down", "a message of replay comes after the next one", (), ANY, GONE, "open"),
    Fault("full disk", "the journal's file cannot grow, until replay has met that", (FULL,), ANY, GONE | {"full"}),
    Fault("clock forward", "the wall clock of one role is an hour ahead for two seconds", (), WRITING),
    Fault("clock backward", "the wall clock of one role is an hour behind for two seconds", (), WRITING),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def as_markdown() -> list[str]:
    head = "| fault | what is done | what some log must say | classes that may appear | aimed at |"
    rows = [head, "|---|---|---|---|---|"]
    for fault in FAULTS:
        says = " or ".join(f"`{pattern}`".replace("|", "\\|") for pattern in fault.says) or "nothing changes"
        classes = ", ".join(sorted(fault.classes))
        rows.append(f"| {fault.name} | {fault.what} | {says} | {classes} | {', '.join(fault.points)} |")
    return rows


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come. Example: Planned("kill replay", "formed", "rollout-a")"""

    fault: str
    point: str
    server: str


PlannedRun = tuple[Variant, list[Planned]]


def make_plan(seed: int, num_faults: int, per_run: int, only: str = "") -> list[PlannedRun]:
    """`num_faults` faults, `per_run` of them in a run; every pair of fault and point comes before any comes again.

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
        runs.append((variant, faults))
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
