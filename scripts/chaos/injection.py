"""What each fault of the table does to a run; an injection lasts as long as its fault."""

import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit
from signal import SIGKILL

from scripts.chaos import processes
from scripts.chaos.checker.journal import HEAD, MAGIC, segments
from scripts.chaos.cluster import LAUNCHER, Cluster
from scripts.chaos.polling import Hung
from scripts.chaos.proxy import Direction, Intercept
from scripts.chaos.settings import START_S
from scripts.chaos.zmtp import ZmtpMessage, largest_array

HOUR_S = 3600.0
CUT_S = 3.0
SLOW_FOR_S, SLOW_BY_S = 3.0, 0.1
SKEW_FOR_S = 2.0
FULL_FOR_S = 2.0
MESSAGE_S = 20.0
"""How long an intercept waits for the message that it changes."""
FILLING_S = 20.0
"""How long a journal may take to reach the end of its disk."""
LOG_ROOM_BYTES = 4 * 1024
KINDS: dict[Direction, tuple[str, ...]] = {
    "up": ("Group", "LeaseRequest", "Renew", "Heartbeat"),
    "down": ("Lease", "Ack", "Heartbeat"),
}
"""Messages that come often enough to wait for one."""


class Injector:
    """Faults into one run. `server` is the rollout server that is meant."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.detail = ""
        """What was done in particular, for the protocol of the run."""
        silent = cluster.config.network.silent_after_s
        self._briefly, self._long = silent / 2, silent + 2.0
        stop, change, kinds = self._stop, self._change, KINDS
        flip = self._flip_header
        self._actions: dict[str, Callable[[str], None]] = {
            "kill server": self._kill,
            "kill learner": lambda _: self._kill("learner"),
            "kill rank": self._kill_last_rank,
            "kill replay": lambda _: self._kill("replay"),
            "kill replay and learner": self._kill_both,
            "torn journal": self._torn_journal,
            "stop server briefly": lambda server: stop(server, self._briefly),
            "stop server": lambda server: stop(server, self._long),
            "stop learner briefly": lambda _: stop("learner", self._briefly),
            "stop learner": lambda _: stop("learner", self._long),
            "stop replay briefly": lambda _: stop("replay", self._briefly),
            "stop replay": lambda _: stop("replay", self._long),
            "stop launcher": lambda _: stop(LAUNCHER, self._long),
            "cut": lambda server: self._cut(server, CUT_S),
            "blink": lambda server: self._cut(server, 0.0),
            "slow link": self._slow,
            "freeze": lambda server: self._freeze(server, "up", "down"),
            "freeze up": lambda server: self._freeze(server, "up"),
            "freeze down": lambda server: self._freeze(server, "down"),
            "vanish": self._vanish,
            "flip up": lambda server: change(server, "up", self._flip_array, ("Group",)),
            "flip header up": lambda server: change(server, "up", flip, kinds["up"]),
            "flip lease request": lambda server: change(server, "up", flip, ("LeaseRequest",)),
            "flip hello": lambda server: self._at_joining(server, "up", "Hello"),
            "flip welcome": lambda server: self._at_joining(server, "down", "Welcome"),
            "flip down": lambda server: change(server, "down", flip, kinds["down"]),
            "tamper": self._tamper,
            "duplicate up": lambda server: change(server, "up", _twice, kinds["up"]),
            "duplicate down": lambda server: change(server, "down", _twice, kinds["down"]),
            "reorder up": lambda server: change(server, "up", _same, kinds["up"], late=True),
            "reorder down": lambda server: change(server, "down", _same, kinds["down"], late=True),
            "full disk": self._full_disk,
            "clock forward": lambda _: self._skew(HOUR_S),
            "clock backward": lambda _: self._skew(-HOUR_S),
        }

    @property
    def names(self) -> set[str]:
        """Faults that this knows how to do."""
        return set(self._actions)

    def do(self, name: str, server: str) -> None:
        """Do it, to its end."""
        self.detail = ""
        self._actions[name](server)

    # ---- processes -------------------------------------------------------------------------------------

    def _kill(self, role: str) -> None:
        self.detail = f"pid {self.cluster.kill(role)}"

    def _kill_last_rank(self, _: str) -> None:
        pid = self.cluster.pids("learner")[-1]
        processes.send(pid, SIGKILL)
        self.detail = f"pid {pid}"

    def _kill_both(self, _: str) -> None:
        both = [*self.cluster.pids("replay"), *self.cluster.pids("learner")[:1]]
        for pid in both:
            processes.send(pid, SIGKILL)
        self.detail = f"pids {both}"

    def _stop(self, role: str, seconds: float) -> None:
        self.detail = f"{seconds:g} s"
        with ExitStack() as stack:
            for pid in self.cluster.pids(role)[:1]:
                stack.enter_context(processes.stopped(pid))
            self.cluster.rest(seconds)

    def _torn_journal(self, _: str) -> None:
        """The launcher stands still, so that the dead replay's journal can be written to before the next one starts."""
        with processes.stopped(self.cluster.pids(LAUNCHER)[0]):
            replay = self.cluster.kill("replay")
            assert replay is not None
            self.cluster.wait(lambda: not processes.is_alive(replay), "the end of replay", 10.0)
            torn = self._half_a_record()
            path = segments(self.cluster.folder / "journal")[-1]
            with path.open("ab") as file:
                file.write(torn)
            self.detail = f"{len(torn)} bytes behind {path.name}"

    def _half_a_record(self) -> bytes:
        """What a write that was cut off leaves: a whole head, and less meta than it says; or not even a head."""
        head = HEAD.pack(MAGIC, 200, self.rng.randrange(1 << 32))
        return (head + self.rng.randbytes(150))[: self.rng.randrange(1, len(head) + 150)]

    def _full_disk(self, _: str) -> None:
        """No file of replay may grow past what the largest has and what its log may need."""
        (replay,) = self.cluster.pids("replay")
        files = [*segments(self.cluster.folder / "journal")[-1:], self.cluster.folder / "logs" / "replay.log"]
        log = files[-1].stat().st_size
        limit = max(files[0].stat().st_size, log + LOG_ROOM_BYTES)
        self.detail = f"{limit} bytes"
        mark = self.cluster.logs.mark()
        prlimit(replay, RLIMIT_FSIZE, (limit, RLIM_INFINITY))
        try:
            with suppress(Hung):  # then no log has named it, which is for the caller to see
                self.cluster.wait(lambda: self.cluster.logs.first([r"\[full\]"], mark) is not None, "[full]", FILLING_S)
            self.cluster.rest(FULL_FOR_S)
        finally:
            if processes.is_alive(replay):
                prlimit(replay, RLIMIT_FSIZE, (RLIM_INFINITY, RLIM_INFINITY))

    def _skew(self, seconds: float) -> None:
        role = self.rng.choice(["replay", "learner", "server", "launcher"])
        self.detail = role
        self.cluster.skew(role, seconds)
        self.cluster.rest(SKEW_FOR_S)
        self.cluster.skew(role, 0.0)

    # ---- links -----------------------------------------------------------------------------------------

    def _cut(self, server: str, seconds: float) -> None:
        self.cluster.proxy.cut(self.cluster.links[server], closed_for_s=seconds)
        self.cluster.rest(seconds)

    def _slow(self, server: str) -> None:
        link = self.cluster.links[server]
        link.delay_s = SLOW_BY_S
        self.cluster.rest(SLOW_FOR_S)
        link.delay_s = 0.0

    def _freeze(self, server: str, *directions: Direction) -> None:
        link = self.cluster.links[server]
        link.frozen.update(directions)
        self.cluster.rest(self._long)
        link.frozen.clear()

    def _vanish(self, server: str) -> None:
        link = self.cluster.links[server]
        link.orphans = True
        self._kill(server)
        self.cluster.rest(self._long)
        link.orphans = False

    def _at_joining(self, server: str, direction: Direction, kind: str) -> None:
        self._kill(server)
        self._change(server, direction, self._flip_header, (kind,), deadline_s=START_S)

    def _tamper(self, server: str) -> None:
        change = self.rng.choice([self._flip_header, _twice])
        self._change(server, self.rng.choice(["up", "down"]), change, ("sealed",))

    def _change(
        self,
        server: str,
        direction: Direction,
        change: Callable[[ZmtpMessage], list[bytes]],
        kinds: tuple[str, ...],
        *,
        late: bool = False,
        deadline_s: float = MESSAGE_S,
    ) -> None:
        kind = self.rng.choice(kinds)
        intercept = Intercept(lambda message: message.kind == kind, change, hold_for_next=late)
        intercepts = self.cluster.links[server].intercepts[direction]
        intercepts.append(intercept)
        try:
            self.cluster.wait(intercept.done.is_set, f"a {kind} to change", deadline_s)
        except Hung:
            if deadline_s > MESSAGE_S:
                intercepts.clear()
                raise
            intercept.wanted = _any_message  # this kind does not come now; heartbeats always do
            self.cluster.wait(intercept.done.is_set, "any message to change", deadline_s)
        self.detail = intercept.kind

    def _flip_array(self, message: ZmtpMessage) -> list[bytes]:
        return [message.flipped(largest_array(message), self.rng.random()).wire()]

    def _flip_header(self, message: ZmtpMessage) -> list[bytes]:
        return [message.flipped(0, self.rng.random()).wire()]


def _any_message(_: ZmtpMessage) -> bool:
    return True


def _twice(message: ZmtpMessage) -> list[bytes]:
    return [message.wire()] * 2


def _same(message: ZmtpMessage) -> list[bytes]:
    return [message.wire()]
