"""The table of faults, which docs/faults.md prints, and how each is injected at its point."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit
from signal import SIGKILL
from typing import Literal

from scripts.chaos import processes
from scripts.chaos.checker.journal import HEAD, MAGIC, segments
from scripts.chaos.cluster import CLOCKS, LAUNCHER, START_S, Cluster
from scripts.chaos.polling import Hung
from scripts.chaos.proxy import Change, Direction, Intercept, ZmtpMessage, times

Needs = Literal["", "open", "keys", "two ranks", "teachers"]
"""What a run must have for a fault: messages that the proxy can read, CURVE keys, a second rank, or teachers."""

POINTS = ("any", "in flight", "formed", "committed", "broadcast", "checkpoint", "reading", "repeating")
"""Of the protocol, at which a fault is aimed; docs/faults.md says what is going on at each."""
INSTANT = ("kill", "torn")  # faults that are over at once begin with these words
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
TEACHER_DIED = r"teacher-\w+ \(pid \d+\) died: killed by SIGKILL \[closed\].*restart \d+ of \d+"
TEACHER_SILENT = r"replay: lost teacher 'teacher-\w+'.*\[silent\]"
ANY, IN_FLIGHT, WRITING = ("any",), ("any", "in flight"), ("any", "checkpoint")
CORRUPT, DUPLICATE = GONE | {"corrupt"}, GONE | {"duplicate", "corrupt"}
LONG, BRIEFLY = "for longer than network.silent_after_s", "for half of network.silent_after_s"

FAULTS = (
    Fault("kill server", "SIGKILL of a rollout server", (LOST_CLOSED,), RUNNING),
    Fault("kill learner", "SIGKILL of learner rank 0", (LEARNER_DIED,), POINTS),
    Fault("kill rank", "SIGKILL of the last learner rank", (LEARNER_DIED,), RUNNING, needs="two ranks"),
    Fault("kill replay", "SIGKILL of replay", (REPLAY_DIED,), POINTS),
    Fault("kill replay and learner", "SIGKILL of both at once", (REPLAY_DIED,), RUNNING),
    Fault("torn journal", "SIGKILL of replay; half a record is at the end of its journal", (REPLAY_DIED,), ANY),
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
    Fault("kill teacher", "SIGKILL of one of two teachers", (TEACHER_DIED,), WIRE, needs="teachers"),
    Fault("kill teacher and server", "SIGKILL of both at once", (TEACHER_DIED,), IN_FLIGHT, needs="teachers"),
    Fault("stop teacher briefly", f"SIGSTOP {BRIEFLY}", (), ANY, needs="teachers"),
    Fault("stop teacher", f"SIGSTOP {LONG}", (TEACHER_SILENT,), IN_FLIGHT, needs="teachers"),
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


AIM_S = 15.0  # how long to wait for a point before the fault happens at any moment
HOLD_S = 1.0
"""Longest that a gate holds a process: less than the collective timeout, so that holding alone breaks nothing."""
MIN_REPEATED = 3  # steps that must be there to repeat before the learner is killed for it
CLOCK_S = {"forward": 3600.0, "backward": -3600.0}
CUT_S, SLOW_FOR_S, SLOW_BY_S, SKEW_FOR_S, FULL_FOR_S = 3.0, 3.0, 0.1, 2.0, 2.0
MESSAGE_S = 20.0  # how long an intercept waits for the message that it changes
FILLING_S = 20.0  # how long a journal may take to reach the end of its disk
LOG_ROOM_BYTES = 4 * 1024
KINDS: dict[str, tuple[str, ...]] = {
    "up": ("Group", "LeaseRequest", "Renew", "Heartbeat"),
    "down": ("Lease", "Ack", "Heartbeat"),
}
"""Messages that come often enough to wait for one."""
FLIPS: dict[str, tuple[Direction, tuple[str, ...]]] = {
    "up": ("up", ("Group",)),
    "header up": ("up", KINDS["up"]),
    "lease request": ("up", ("LeaseRequest",)),
    "hello": ("up", ("Hello",)),
    "welcome": ("down", ("Welcome",)),
    "down": ("down", KINDS["down"]),
}
STARTING = ("hello", "welcome")  # which come once in a process's life


class Injector:
    """One fault of one run: `reach` its point, `do` it, see what `was_hit`, `release`.

    The first word of a fault's name is a method here, which takes the others.
    """

    def __init__(self, cluster: Cluster, planned: Planned, rng: random.Random) -> None:
        self.cluster, self.planned, self.rng = cluster, planned, rng
        self.detail = ""  # what was done in particular, for the protocol of the run
        silent_s = cluster.config.network.silent_after_s
        self._briefly_s, self._long_s = silent_s / 2, silent_s + 2.0
        self._link, self._gate = cluster.links[planned.server], cluster.watch.probes[planned.server].gate
        self._direction: Direction = rng.choice(["up", "down"])  # of the message that is held in flight
        self._mark, self._reached = cluster.logs.mark(), False
        watch, history = cluster.watch, cluster.history
        self._is_there: Callable[[], bool] = {
            "any": lambda: True,
            "in flight": self._link.held[self._direction].is_set,
            "formed": lambda: history.newest_take == history.version + 1,
            "committed": lambda: max(probe.live for probe in watch.probes.values()) < history.version,
            "broadcast": lambda: self._gate.arrived,
            "checkpoint": lambda: watch.writes_checkpoint,
            "reading": lambda: cluster.logs.first([r"replay ready at"], self._mark) is None,
            "repeating": lambda: history.version < history.high,
        }[planned.point]

    def reach(self) -> None:
        """Wait for the point; one that does not come in time is given up, and `was_hit` says so."""
        with suppress(Hung):
            self._bring_about(self.cluster)
            if self.planned.point != "reading":  # which may be over already
                self._until(self._is_there)
            self._reached = True

    def _bring_about(self, cluster: Cluster) -> None:
        match self.planned.point:
            case "any":
                cluster.rest(self.rng.uniform(0.0, 0.5))
            case "in flight":
                self._link.held[self._direction].clear()
                self._link.holding[self._direction] = "Group" if self._direction == "up" else "Ack"
            case "broadcast":
                self._gate.aim("middle bucket", HOLD_S)
            case "reading":
                old = cluster.kill("replay")
                self._until(lambda: bool(set(cluster.pids("replay")) - {old}), START_S)
                self._mark = cluster.logs.mark()
                time.sleep(self.rng.uniform(0.0, 1.0))
            case "repeating":
                watch, history = cluster.watch, cluster.history
                self._until(lambda: history.version - max(watch.checkpoints(complete=True), default=0) >= MIN_REPEATED)
                before = history.incarnations
                cluster.kill("learner")
                self._until(lambda: history.incarnations > before, START_S)

    def _until(self, condition: Callable[[], bool], deadline_s: float = AIM_S) -> None:
        self.cluster.wait(condition, f"the point {self.planned.point!r}", deadline_s)

    def was_hit(self) -> str:
        """The point at which the fault has really met the run: asked right before or after it."""
        self.cluster.watch.poll()
        return self.planned.point if self._reached and self._is_there() else "any"

    def release(self) -> None:
        self._link.holding.pop(self._direction, None)
        self._link.frozen.discard(self._direction)
        self._gate.release()

    def do(self) -> None:
        verb, _, rest = self.planned.fault.partition(" ")
        getattr(self, f"do_{verb}")(rest)

    def _pids(self, role: str) -> list[int]:
        """The process of a role, if it is there: any teacher; of ranks the first, where it is not `rank`."""
        pids = self.cluster.pids({"server": self.planned.server, "rank": "rank 1"}.get(role, role))
        return self.rng.sample(pids, 1) if role == "teacher" and pids else pids[:1]

    def do_kill(self, roles: str) -> None:
        pids = [pid for role in roles.split(" and ") for pid in self._pids(role)]
        for pid in pids:
            processes.send(pid, SIGKILL)
        self.detail = f"pids {pids}"

    def do_stop(self, role: str) -> None:
        role, _, briefly = role.partition(" ")
        seconds = self._briefly_s if briefly else self._long_s
        self.detail = f"{seconds:g} s"
        with ExitStack() as stack:
            for pid in self._pids(role):
                stack.enter_context(processes.stopped(pid))
            self.cluster.rest(seconds)

    def do_torn(self, _: str) -> None:
        """The launcher stands still, so that the dead replay's journal can be written to before the next one starts."""
        with processes.stopped(self.cluster.pids(LAUNCHER)[0]):
            replay = self.cluster.kill("replay")
            assert replay is not None
            self.cluster.wait(lambda: processes.state(replay) in ("", "Z"), "the end of replay", 10.0)
            # what a write that was cut off leaves: a whole head, and less meta than it says; or not even a head
            head = HEAD.pack(MAGIC, 200, self.rng.randrange(1 << 32))
            torn = (head + self.rng.randbytes(150))[: self.rng.randrange(1, len(head) + 150)]
            path = segments(self.cluster.folder / "journal")[-1]
            with path.open("ab") as file:
                file.write(torn)
            self.detail = f"{len(torn)} bytes behind {path.name}"

    def do_full(self, _: str) -> None:
        """No file of replay may grow past what the largest has and what its log may need."""
        (replay,) = self.cluster.pids("replay")
        log = self.cluster.folder / "logs" / "replay.log"
        newest = segments(self.cluster.folder / "journal")[-1]
        limit = max(newest.stat().st_size, log.stat().st_size + LOG_ROOM_BYTES)
        self.detail = f"{limit} bytes"
        logs, mark = self.cluster.logs, self.cluster.logs.mark()
        prlimit(replay, RLIMIT_FSIZE, (limit, RLIM_INFINITY))
        try:
            with suppress(Hung):  # then no log has named it, which is for the caller to see
                self.cluster.wait(lambda: logs.first([r"\[full\]"], mark) is not None, "[full]", FILLING_S)
            self.cluster.rest(FULL_FOR_S)
        finally:
            with suppress(ProcessLookupError):
                prlimit(replay, RLIMIT_FSIZE, (RLIM_INFINITY, RLIM_INFINITY))

    def do_clock(self, direction: str) -> None:
        self.detail = self.rng.choice(CLOCKS)
        self.cluster.skew(self.detail, CLOCK_S[direction])
        self.cluster.rest(SKEW_FOR_S)
        self.cluster.skew(self.detail, 0.0)

    def do_cut(self, _: str, seconds: float = CUT_S) -> None:
        self.cluster.proxy.cut(self._link, closed_for_s=seconds)
        self.cluster.rest(seconds)

    def do_blink(self, _: str) -> None:
        self.do_cut("", 0.0)

    def do_slow(self, _: str) -> None:
        self._link.delay_s = SLOW_BY_S
        self.cluster.rest(SLOW_FOR_S)
        self._link.delay_s = 0.0

    def do_freeze(self, direction: Literal["up", "down", ""]) -> None:
        self._link.frozen.update([direction] if direction else ["up", "down"])
        self.cluster.rest(self._long_s)
        self._link.frozen.clear()

    def do_vanish(self, _: str) -> None:
        self._link.orphans = True
        self.do_kill("server")
        self.cluster.rest(self._long_s)
        self._link.orphans = False

    def do_flip(self, what: str) -> None:
        direction, kinds = FLIPS[what]
        if what in STARTING:
            self.do_kill("server")
        self._change(direction, kinds, partial(self._flip, of_array=what == "up"))

    def do_tamper(self, _: str) -> None:
        self._change(self.rng.choice(["up", "down"]), ("sealed",), self.rng.choice([self._flip, times(2)]))

    def do_duplicate(self, direction: Direction) -> None:
        self._change(direction, KINDS[direction], times(2))

    def do_reorder(self, direction: Direction) -> None:
        self._change(direction, KINDS[direction], times(1), late=True)

    def _change(self, direction: Direction, kinds: tuple[str, ...], change: Change, *, late: bool = False) -> None:
        """Change the next message of one of these kinds; where none comes, and many may, any message."""
        kind = self.rng.choice(kinds)
        intercept = Intercept(lambda message: message.kind == kind, change, hold_for_next=late)
        intercepts = self._link.intercepts[direction]
        intercepts.append(intercept)
        is_start = kind.lower() in STARTING
        try:
            self.cluster.wait(intercept.done.is_set, f"a {kind} to change", START_S if is_start else MESSAGE_S)
        except Hung:
            if is_start:
                intercepts.clear()
                raise
            intercept.wanted = lambda _: True  # this kind does not come now; heartbeats always do
            self.cluster.wait(intercept.done.is_set, "any message to change", MESSAGE_S)
        self.detail = intercept.kind

    def _flip(self, message: ZmtpMessage, *, of_array: bool = False) -> list[bytes]:
        return [message.flipped(message.largest_array if of_array else 0, self.rng.random()).wire()]
