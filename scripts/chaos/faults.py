"""The published table of faults and the symptom that each shows as; docs/faults.md prints it.

`says` are regular expressions of which one must be found in some log of the run before the fault's time is up. A fault
without any must change nothing. `classes` are the symptom classes that may appear while it lasts and until the run has
gone on; another one there is a wrong name, which counts as unnamed.
"""

from dataclasses import dataclass
from typing import Literal

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
INSTANT = ("kill", "torn")
"""Faults that are over at once begin with these words."""
EVERYWHERE = tuple(POINTS)
RUNNING = tuple(point for point in POINTS if point != "reading")
WIRE = ("any", "in flight", "formed", "broadcast")
GONE = frozenset({"closed", "silent", "slow"})
"""What a process that is away, or a connection, may look like to the others, one after the other."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row."""

    name: str
    what: str
    says: tuple[str, ...]
    points: tuple[str, ...]
    classes: frozenset[str] = GONE
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
LONG = "for longer than network.silent_after_s"
BRIEFLY = "for half of network.silent_after_s"

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
    """The rows of the table in docs/faults.md."""
    head = "| fault | what is done | what some log must say | classes that may appear | aimed at |"
    rows = [head, "|---|---|---|---|---|"]
    for fault in FAULTS:
        says = " or ".join(f"`{pattern}`".replace("|", "\\|") for pattern in fault.says) or "nothing changes"
        classes = ", ".join(sorted(fault.classes))
        rows.append(f"| {fault.name} | {fault.what} | {says} | {classes} | {', '.join(fault.points)} |")
    return rows
