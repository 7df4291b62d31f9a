"""What each fault of the table does to a run. An injection lasts as long as its fault does."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit
from signal import SIGCONT, SIGKILL, SIGSTOP

from scripts.chaos import processes
from scripts.chaos.journal import HEAD, MAGIC, segments
from scripts.chaos.proxy import Direction, Hand
from scripts.chaos.settings import START_S
from scripts.chaos.trial import Hung, Trial
from scripts.chaos.zmtp import Parcel, largest_array

HOUR_S = 3600.0
CUT_S = 3.0
SLOW_FOR_S, SLOW_BY_S = 3.0, 0.1
SKEW_FOR_S = 2.0
FULL_FOR_S = 2.0
MESSAGE_S = 20.0
"""How long a hand waits for the message that it changes."""
FILLING_S = 20.0
"""How long a journal may take to reach the end of its disk."""
LOG_ROOM_BYTES = 4 * 1024
KINDS: dict[Direction, tuple[str, ...]] = {
    "up": ("Group", "LeaseRequest", "Renew", "Heartbeat"),
    "down": ("Lease", "Ack", "Heartbeat"),
}
"""Messages that come often enough to wait for one."""


INSTANT = ("kill", "torn")
"""Faults that are over at once begin with these words."""


class Injector:
    """Faults into one run. `server` is the rollout server that is meant."""

    def __init__(self, trial: Trial, rng: random.Random) -> None:
        self.trial, self.rng = trial, rng
        self.detail = ""
        """What was done in particular, for the protocol of the run."""
        silent = trial.config.network.silent_after_s
        self._briefly, self._long = silent / 2, silent + 2.0
        self._actions: dict[str, Callable[[str], None]] = {
            "kill server": self._kill,
            "kill learner": lambda _: self._kill("learner"),
            "kill rank": lambda _: self._kill("learner", last=True),
            "kill replay": lambda _: self._kill("replay"),
            "kill replay and learner": lambda _: self._kill_both(),
            "torn journal": lambda _: self._torn_journal(),
            "stop server briefly": lambda server: self._stop(server, self._briefly),
            "stop server": lambda server: self._stop(server, self._long),
            "stop learner briefly": lambda _: self._stop("learner", self._briefly),
            "stop learner": lambda _: self._stop("learner", self._long),
            "stop replay briefly": lambda _: self._stop("replay", self._briefly),
            "stop replay": lambda _: self._stop("replay", self._long),
            "stop launcher": lambda _: self._stop("launcher", self._long),
            "cut": lambda server: self._cut(server, CUT_S),
            "blink": lambda server: self._cut(server, 0.0),
            "slow link": self._slow,
            "freeze": lambda server: self._freeze(server, "up", "down"),
            "freeze up": lambda server: self._freeze(server, "up"),
            "freeze down": lambda server: self._freeze(server, "down"),
            "vanish": self._vanish,
            "flip up": lambda server: self._hand(server, "up", self._flip_array, ("Group",)),
            "flip header up": lambda server: self._hand(server, "up", self._flip_header, KINDS["up"]),
            "flip lease request": lambda server: self._hand(server, "up", self._flip_header, ("LeaseRequest",)),
            "flip hello": lambda server: self._at_joining(server, "up", "Hello"),
            "flip welcome": lambda server: self._at_joining(server, "down", "Welcome"),
            "flip down": lambda server: self._hand(server, "down", self._flip_header, KINDS["down"]),
            "tamper": self._tamper,
            "duplicate up": lambda server: self._hand(server, "up", _twice, KINDS["up"]),
            "duplicate down": lambda server: self._hand(server, "down", _twice, KINDS["down"]),
            "reorder up": lambda server: self._hand(server, "up", _same, KINDS["up"], late=True),
            "reorder down": lambda server: self._hand(server, "down", _same, KINDS["down"], late=True),
            "full disk": lambda _: self._full_disk(),
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

    def _kill(self, role: str, *, last: bool = False) -> None:
        pids = self.trial.pids(role)
        if pids:
            processes.send(pids[-1 if last else 0], SIGKILL)
            self.detail = f"pid {pids[-1 if last else 0]}"

    def _kill_both(self) -> None:
        both = [*self.trial.pids("replay"), *self.trial.pids("learner")[:1]]
        for pid in both:
            processes.send(pid, SIGKILL)
        self.detail = f"pids {both}"

    @contextmanager
    def _stopped(self, role: str) -> Iterator[None]:
        pids = self.trial.pids(role)[:1]
        for pid in pids:
            processes.send(pid, SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                processes.send(pid, SIGCONT)

    def _stop(self, role: str, seconds: float) -> None:
        self.detail = f"{seconds:g} s"
        with self._stopped(role):
            self.trial.rest(seconds)

    def _torn_journal(self) -> None:
        """The launcher stands still meanwhile, so that the dead replay's journal can be written to before the next."""
        with self._stopped("launcher"):
            (replay,) = self.trial.pids("replay")
            processes.send(replay, SIGKILL)
            self.trial.wait(lambda: not processes.is_alive(replay), "the end of replay", 10.0)
            torn = self._half_a_record()
            path = segments(self.trial.folder / "journal")[-1]
            with path.open("ab") as file:
                file.write(torn)
            self.detail = f"{len(torn)} bytes behind {path.name}"

    def _half_a_record(self) -> bytes:
        """What a write that was cut off leaves: a whole head, and less meta than it says; or not even a head."""
        head = HEAD.pack(MAGIC, 200, self.rng.randrange(1 << 32))
        return (head + self.rng.randbytes(150))[: self.rng.randrange(1, len(head) + 150)]

    def _full_disk(self) -> None:
        """No file of replay may grow past what the largest has and what its log may need."""
        (replay,) = self.trial.pids("replay")
        files = [*segments(self.trial.folder / "journal")[-1:], self.trial.folder / "logs" / "replay.log"]
        log = files[-1].stat().st_size
        limit = max(files[0].stat().st_size, log + LOG_ROOM_BYTES)
        self.detail = f"{limit} bytes"
        mark = self.trial.logs.mark()
        prlimit(replay, RLIMIT_FSIZE, (limit, RLIM_INFINITY))
        try:
            with suppress(Hung):  # then no log has named it, which is for the caller to see
                self.trial.wait(lambda: self.trial.logs.first([r"\[full\]"], mark) is not None, "[full]", FILLING_S)
            self.trial.rest(FULL_FOR_S)
        finally:
            if processes.is_alive(replay):
                prlimit(replay, RLIMIT_FSIZE, (RLIM_INFINITY, RLIM_INFINITY))

    def _skew(self, seconds: float) -> None:
        role = self.rng.choice(["replay", "learner", "server", "launcher"])
        self.detail = role
        self.trial.skew(role, seconds)
        self.trial.rest(SKEW_FOR_S)
        self.trial.skew(role, 0.0)

    # ---- links -----------------------------------------------------------------------------------------

    def _cut(self, server: str, seconds: float) -> None:
        self.trial.proxy.cut(self.trial.links[server], closed_for_s=seconds)
        self.trial.rest(seconds)

    def _slow(self, server: str) -> None:
        link = self.trial.links[server]
        link.delay_s = SLOW_BY_S
        self.trial.rest(SLOW_FOR_S)
        link.delay_s = 0.0

    def _freeze(self, server: str, *directions: Direction) -> None:
        link = self.trial.links[server]
        link.frozen.update(directions)
        self.trial.rest(self._long)
        link.frozen.clear()

    def _vanish(self, server: str) -> None:
        link = self.trial.links[server]
        link.orphans = True
        self._kill(server)
        self.trial.rest(self._long)
        link.orphans = False

    def _at_joining(self, server: str, direction: Direction, kind: str) -> None:
        self._kill(server)
        self._hand(server, direction, self._flip_header, (kind,), deadline_s=START_S)

    def _tamper(self, server: str) -> None:
        change = self.rng.choice([self._flip_header, _twice])
        self._hand(server, self.rng.choice(["up", "down"]), change, ("sealed",))

    def _hand(
        self,
        server: str,
        direction: Direction,
        change: Callable[[Parcel], list[bytes]],
        kinds: tuple[str, ...],
        *,
        late: bool = False,
        deadline_s: float = MESSAGE_S,
    ) -> None:
        kind = self.rng.choice(kinds)
        hand = Hand(lambda parcel: parcel.kind == kind, change, hold_for_next=late)
        hands = self.trial.links[server].hands[direction]
        hands.append(hand)
        try:
            self.trial.wait(hand.done.is_set, f"a {kind} to change", deadline_s)
        except Hung:
            if deadline_s > MESSAGE_S:
                hands.clear()
                raise
            hand.wanted = _any_message  # this kind does not come now; heartbeats always do
            self.trial.wait(hand.done.is_set, "any message to change", deadline_s)
        self.detail = hand.kind

    def _flip_array(self, parcel: Parcel) -> list[bytes]:
        return [parcel.flipped(largest_array(parcel), self.rng.random()).wire()]

    def _flip_header(self, parcel: Parcel) -> list[bytes]:
        return [parcel.flipped(0, self.rng.random()).wire()]


def _any_message(_: Parcel) -> bool:
    return True


def _twice(parcel: Parcel) -> list[bytes]:
    return [parcel.wire()] * 2


def _same(parcel: Parcel) -> list[bytes]:
    return [parcel.wire()]
