"""Run each node's part on its host, show what the nodes say, and end all of it with this process.

A node that is lost (its process killed, its host or the way to it gone) is started again, a learner node so that it
resumes the run. A node that ends by intent is not: its exit code says so.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import coded
from configs.schema import Config
from slipstream.launch.host_file import Host
from slipstream.launch.node_spec import NodeSpec
from slipstream.launch.reach import Reach, Remote
from slipstream.launch.servers import Restarts, RunFailed
from slipstream.launch.terminal import Interrupted, catch_signals, ignore_signals, say
from slipstream.runtime import hang
from slipstream.runtime.lifeline import CANNOT_GO_ON, RUN_FAILED, TRY_AGAIN

POLL_S = 0.1
FAREWELL_S = 30.0
"""How long nodes have to end by themselves after the run has ended or another node has failed."""
CHECKPOINT_S = 20.0
"""How long learner nodes may take for a last checkpoint before rollout nodes are ended as well."""
STOP_S = 40.0
"""How long nodes have to end after their stdin was closed."""
RETRY_S = 5.0
"""Between two attempts to start a node whose last one did not come up."""
BACK_S = 15.0
"""A node that has been up for so long is back."""
BY_INTENT = (0, CANNOT_GO_ON, RUN_FAILED)
"""Exit codes of a node that another start would not change."""


def words_of(spec: NodeSpec) -> list[str]:
    """What runs on the node, with the interpreter of this process; the node spec comes on stdin."""
    return [sys.executable, "-m", "slipstream.launch.node", "--stdin", "--role", spec.role, "--node", spec.node]


@dataclass(slots=True)
class Member:
    """One node's part, through all its starts."""

    spec: NodeSpec
    host: Host
    name: str
    """The node's, and where it is."""
    remote: Remote
    restarts: Restarts
    """After starts that came up; attempts that did not are repeated every RETRY_S."""
    was_up: bool = False
    up_at: float | None = None
    """Monotonic second since when its present process has its spec."""
    lost_at: float | None = None
    """The same since when the run is without this node; None while it is there."""
    retry_at: float = math.inf
    last: str = ""
    """How its last process ended."""
    is_missed: bool = False
    """It was said that it is away for too long."""
    code: int | None = None
    """Exit code of its last process, once no other follows."""

    @property
    def is_learner(self) -> bool:
        """Whether the run needs it."""
        return self.spec.role == "learner"

    @property
    def waits(self) -> bool:
        """Whether another start is planned."""
        return self.restarts.due is not None or self.retry_at < math.inf

    def is_due(self) -> bool:
        """Whether to start it now; once."""
        if self.retry_at < time.monotonic():
            self.retry_at = math.inf
            return True
        return self.restarts.is_due()


def run(reach: Reach, specs: Sequence[tuple[NodeSpec, Host]], config: Config) -> int:
    """Run all specs to their end.

    A learner node that fails ends them all; the run goes on without a rollout node that failed.

    Returns:
        0 when all learner nodes, or where there is none all nodes, ended well; 130 or 140 after a signal; 75 where
        another start may help, on other hosts; or else 1.
    """
    fleet = Fleet(reach, config)
    catch_signals()
    try:
        for spec, host in specs:
            fleet.add(spec, host)
        return fleet.watch()
    except Interrupted as interruption:
        say(f"{interruption}: ending {', '.join(member.spec.node for member in fleet.members)}")
        return interruption.code
    finally:
        ignore_signals()
        fleet.stop()
        reach.close()


class Fleet:
    """The nodes of a run, or of one side of it."""

    def __init__(self, reach: Reach, config: Config) -> None:
        self.members: list[Member] = []
        self._reach, self._config = reach, config
        self._ends_at = math.inf
        """Until when those that are left may end by themselves."""

    def add(self, spec: NodeSpec, host: Host) -> None:
        """Start one more node."""
        limit = (self._config.learner if spec.role == "learner" else self._config.rollout).restarts
        has_other_side = any(spec.node == other.spec.node for other in self.members)
        name = f"{spec.node}{f', {spec.role} side' if has_other_side else ''} ({host.address})"
        self.members.append(Member(spec, host, name, self._start(spec, host), Restarts(limit)))

    def watch(self) -> int:
        """Start again what is lost, until the run has ended; the exit code.

        The first learner node ends last: ranks of others are done before it has written picture and trace.
        """
        while True:
            for member in self.members:
                if member.code is None:
                    self._look(member)
            running = [member for member in self.members if member.code is None]
            if not running or time.monotonic() > self._ends_at:
                break
            time.sleep(POLL_S)
        if running:
            hang.begin("launch", self._config.run_dir)
            names = [member.spec.node for member in running]
            said = hang.expired("the end of the nodes", owed_by=names, waited_s=FAREWELL_S, key="a fixed deadline")
            say(f"{', '.join(names)} still run {FAREWELL_S:g} s after another node has ended{said} [slow]")
        learners = [member for member in self.members if member.is_learner]
        codes = {member.code for member in learners or self.members}
        return 0 if codes == {0} else TRY_AGAIN if TRY_AGAIN in codes else 1

    def stop(self) -> None:
        """Close every node's stdin, which ends it; then end what is left of the ways to them.

        Learner nodes come first: their last checkpoint is of one more step, for which rollout servers may be needed.
        """
        began, learners = time.monotonic(), [member for member in self.members if member.is_learner]
        for members, patience_s in ((learners, CHECKPOINT_S), (self.members, STOP_S)):
            for member in members:
                member.remote.close_stdin()
            while time.monotonic() < began + patience_s and any(one.remote.exit_code() is None for one in members):
                time.sleep(POLL_S)
        for member in self.members:
            is_late = member.remote.exit_code() is None
            member.remote.kill()
            if is_late:
                say(f"{member.spec.node} did not end within {STOP_S:g} s [silent]; the way to it was cut")

    def _start(self, spec: NodeSpec, host: Host) -> Remote:
        return self._reach.start(spec.node, host, words_of(spec), spec.line())

    # ---- one node ---------------------------------------------------------------------------------------

    def _look(self, member: Member) -> None:
        code, now = member.remote.exit_code(), time.monotonic()
        if code is None:
            if member.remote.output.is_up:
                member.up_at = member.up_at or now
            if member.lost_at is not None and member.up_at is not None and now - member.up_at > BACK_S:
                say(f"{member.name} is back after {member.up_at - member.lost_at:.0f} s")
                member.lost_at, member.is_missed = None, False
        elif not member.waits:
            self._ended(member, code)
        elif self._is_ending:
            member.code = code
        elif member.is_due():
            member.remote, member.up_at = self._start(member.spec, member.host), None
        if member.code is None and member.lost_at is not None and member.up_at is None and not member.is_missed:
            self._look_at_absence(member, now - member.lost_at)

    def _ended(self, member: Member, code: int) -> None:
        """Its process has ended: decide whether another one follows."""
        member.last = member.remote.how_it_ended()
        cause = f"{member.name} failed: {member.last}" if code else ""
        member.was_up, member.up_at = member.was_up or member.remote.output.is_up, None
        ended_with_run = code == RUN_FAILED and self._may_come_later(member) and not self._is_ending
        if ended_with_run:  # the learner may have been ended, and come back: what ends the fleet is its own code
            member.retry_at = time.monotonic() + RETRY_S
        elif code in BY_INTENT or self._is_ending or not (member.was_up or self._may_come_later(member)):
            self._finish(member, code, cause)
        elif member.remote.output.is_up and code != TRY_AGAIN:
            try:
                say(member.restarts.begin(cause, f"{member.spec.role}.restarts"))
            except RunFailed as failure:
                self._finish(member, code, str(failure))
        else:
            if member.lost_at is None:
                say(f"{coded(cause, RunFailed.code)}; it is started again every {RETRY_S:g} s")
            member.retry_at = time.monotonic() + RETRY_S
        member.lost_at = member.lost_at or time.monotonic()

    def _finish(self, member: Member, code: int, cause: str) -> None:
        """No other process of this node follows."""
        away = [
            other for other in self.members if other.is_learner and other.code is None and other.lost_at is not None
        ]
        member.code = TRY_AGAIN if code and member.is_learner and away else code  # for want of that host
        if cause:
            others = any(other.code is None for other in self.members)
            goes_on = others and not member.is_learner and not self._is_ending
            say(coded(cause, RunFailed.code) + ("; the run goes on with the servers of other nodes" if goes_on else ""))
        if member is self._first_learner or (member.is_learner and code != 0):
            self._ends_at = min(self._ends_at, time.monotonic() + FAREWELL_S)

    def _look_at_absence(self, member: Member, lost_s: float) -> None:
        limit = self._config.placement.give_up_after_s
        if lost_s < limit:
            return
        member.is_missed = True
        what = f"{member.name} has been lost for {limit:g} s (placement.give_up_after_s)"
        if self._may_come_later(member):
            say(f"{what}: the run goes on without it, and starts it again when it can be reached")
            return
        todo = "mend its host, or give the node another one in the host file, then go on with --resume RUN_DIR"
        self._finish(member, TRY_AGAIN, f"{what}: {member.last}; {todo if member.is_learner else 'it is given up'}")

    def _may_come_later(self, member: Member) -> bool:
        """Whether the run can go on without this node while it is away."""
        return not member.is_learner and self._first_learner is not None

    @property
    def _is_ending(self) -> bool:
        return self._ends_at < math.inf

    @property
    def _first_learner(self) -> Member | None:
        return next((member for member in self.members if member.is_learner), None)
