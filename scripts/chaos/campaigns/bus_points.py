"""The points of a weight update at which a fault meets it, the faults, and the course of every case."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from scripts.chaos import processes
from scripts.chaos.injection import HOLD_S as HOLD_S
from scripts.chaos.polling import Ended, Hung


@dataclass(frozen=True, slots=True)
class Point:
    """Where an update stands. Example: Point("Staged", "Staged", "all has come and is proven, the publisher knows")"""

    name: str
    moment: str  # of scripts/chaos/probe.py, at which a receiver is held; empty where it need not be
    what: str


POINTS = (
    Point("before Join", "before Join", "a receiver is about to send Join"),
    Point("joining", "joining", "it has sent Join and has no answer"),
    Point("late join", "middle bucket", "it is being filled with the last version, the others serve that"),
    Point("gathering", "", "the next version is being put together on rank 0"),
    Point("Epoch", "Epoch", "it is invited into the next epoch and has not answered"),
    Point("EpochReady", "EpochReady", "it has answered, others may not have"),
    Point("Begin", "Begin", "Begin has come, no group is there"),
    Point("forming", "forming", "its address is with the others, and it connects to none of them"),
    Point("first bucket", "first bucket", "the group is there, nothing has been sent"),
    Point("middle bucket", "middle bucket", "half of the buckets have come"),
    Point("last bucket", "last bucket", "all but one have come"),
    Point("verifying", "verifying", "all have come and are to be digested"),
    Point("Staged", "Staged", "it has sent that its bytes are proven"),
    Point("Commit", "Commit", "Commit has come, the engine is untouched"),
    Point("applying", "applying", "half of the tensors are in the engine"),
    Point("proving", "proving", "all are in the engine, which does not serve them yet"),
    Point("Applied", "Applied", "it has sent what the engine holds"),
    Point("between updates", "", "the last version is served everywhere, nothing is under way"),
    Point("overtaken", "middle bucket", "the next version is published while this one is half sent"),
    Point("refill", "middle bucket", "bytes were corrupt, the version is being sent again"),
)
NAMED = {point.name: point for point in POINTS}
JOINING = ("before Join", "joining", "late join")  # points that a receiver passes once in its life

FAULTS: dict[str, tuple[str, Callable[[int], AbstractContextManager[None]]]] = {
    "kill": ("SIGKILL", processes.killed),
    "stop": ("SIGSTOP for longer than every deadline of the others, then SIGCONT", processes.stopped),
    "cut": ("its TCP connections are closed, new ones at once, for longer than the bus's silence", processes.cut_off),
    "slow": ("SIGSTOP and SIGCONT in turns, two thirds of the time stopped", processes.slowed),
    "stuck": ("its receiving thread waits for longer than weight_bus.deadline_s, heartbeats go on", nullcontext),
}
"""By name: in words, and a context for as long as the fault lasts. `slow` must change nothing: no peer may take it for
a failure. After `kill` the process is gone. `stuck` is done by a gate."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One case."""

    role: str
    fault: str
    point: str
    seconds: float = 0.0  # from the fault until the next version was live wherever the fault did not hit
    culprit: str = ""  # the line of a log that names the hit process; "changes nothing" where none may
    digests_equal: bool = False  # afterwards, everywhere
    hung: str = ""  # which wait was not over at its deadline
    wrong: list[str] = field(default_factory=list)  # no line names the hit process, or another one was named or removed
    deadline_s: float = 0.0

    def row(self) -> str:
        state = "HUNG: " + self.hung if self.hung else "equal" if self.digests_equal else "DIFFERENT"
        words = "; ".join(f"WRONG: {wrong}" for wrong in self.wrong) or self.culprit
        return f"{self.role:8}  {self.fault:5}  {self.point:15}  {self.seconds:6.2f}  {state:9}  {words}"


class Bench:
    """Processes that meet one case after the other; a context manager. A subclass has

    deadline_s          from a fault to the next version
    duration_s(fault)   how long a fault lasts: beyond each deadline that could notice it
    gate(point)         what holds the processes at a point
    approach(point, hold_s, strike)  see that all is well, hold the processes at the point, and strike there
    pid                 the process that is hit, asked then
    outlast(outcome, until)  what happens while the fault lasts, which is until then
    recover(outcome)    wait until all have come back, with one more version
    judge(outcome)      whether all hold the same, and the hit process is named and no other
    """

    role: str
    began = 0.0  # monotonic time at which the fault met the process; 0 before

    def case(self, fault: str, point: Point) -> Outcome:
        """A fault at a point, until everything is as it was before."""
        outcome = Outcome(role=self.role, fault=fault, point=point.name, deadline_s=self.deadline_s)
        gate, self.began = self.gate(point), 0.0
        lasts = self.duration_s(fault)
        try:
            with ExitStack() as during:

                def strike() -> None:
                    during.enter_context(FAULTS[fault][1](self.pid))
                    self.began = time.monotonic()

                # what is stuck is held by its gate for as long as the fault lasts
                self.approach(point, lasts if fault == "stuck" else HOLD_S, strike)
                if fault != "stuck":
                    gate.release()
                self.outlast(outcome, self.began + lasts)
            gate.release()
            self.recover(outcome)
            self.judge(outcome)
        except (Hung, Ended) as hung:
            outcome.hung, outcome.seconds = str(hung), time.monotonic() - self.began if self.began else 0.0
        finally:
            gate.release()
        return outcome


def totals(outcomes: Sequence[Outcome], skipped: int, violations: int) -> dict[str, Any]:
    def longest(of: Sequence[Outcome]) -> dict[str, Any]:
        seconds = round(max((o.seconds for o in of), default=0.0), 2)
        return {"cases": len(of), "longest_s": seconds, "deadline_s": max((o.deadline_s for o in of), default=0.0)}

    roles = dict.fromkeys(outcome.role for outcome in outcomes)
    everything = longest(outcomes)
    return {
        "cases": everything.pop("cases"),
        "hung": sum(bool(o.hung) for o in outcomes),
        "digests_equal": all(o.digests_equal for o in outcomes),
        "unnamed": sum(bool(o.wrong) for o in outcomes),
        **everything,
        "roles": {role: longest([o for o in outcomes if o.role == role]) for role in roles},
        "skipped": skipped,
        "violations": violations,
    }
