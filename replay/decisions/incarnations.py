"""The learner's starts: which one speaks, from which version it goes on, and whether it stays on the line.

A resumed learner takes the journalled batches again. At the first digest that is not the journalled one the line
diverges: what was sampled with lost policies is sampled anew. No socket, and time is an argument.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from replay import messages as m
from replay.decisions.batching import BatchScheduler
from replay.decisions.evaluating import EvaluationScheduler
from replay.decisions.leasing import LeaseScheduler
from replay.endings import Diverged, NoLearner
from replay.state.apply import record
from replay.state.leases import SlotState
from replay.state.peers import Peer, Peers
from replay.state.run import RunState
from replay.state.snapshot import snapshot_of

log = logging.getLogger(__name__)

Expired = Callable[[str, Sequence[str], float, str], str]
"""expired(what was waited for, from which processes, for how long, by which key): what to add to the message."""
BATCH_DEADLINE = "learner.batch_deadline_s"


class Incarnations:
    """Counts the learner's starts within the run, and watches over the present one."""

    def __init__(
        self,
        run: RunState,
        peers: Peers,
        leasing: LeaseScheduler,
        batching: BatchScheduler,
        evaluations: EvaluationScheduler,
        *,
        playback: bool,
        fail: Callable[[str], None],
        expired: Expired,
        now: float,
    ) -> None:
        """With `playback` the run goes on after a divergence, which changes nothing then."""
        self.run, self.peers, self.leasing = run, peers, leasing
        self.batching, self.evaluations, self.playback = batching, evaluations, playback
        self._fail, self._expired = fail, expired
        self._here_at = now

    @property
    def number(self) -> int:
        return self.run.policies.incarnation

    def hello(self, identity: str, hello: m.Hello) -> str | None:
        """A learner rank connects: at its start, or because replay was restarted. Or why it may not."""
        if hello.incarnation not in (0, self.number) or identity in self.run.started[:-1]:
            return f"it is of an earlier incarnation of the learner, and number {self.number} has taken its place"
        problem = None
        if hello.rank == 0:
            # A process starts once: it may say Hello again before the answer to its first one has come.
            if hello.incarnation == 0 and identity not in self.run.started:
                problem = self._starts(identity, hello)
            else:
                self.run.bus_address = hello.bus_address
                log.info("replay: incarnation %d of the learner is here again", self.number)
        if problem is None:
            for old in self._replaced_by(identity, hello):
                self.peers.remove(old.identity)
        return problem

    def watch(self, now: float, *, has_ended: bool) -> None:
        """Miss lost ranks; end the run when no other comes in their place."""
        config = self.run.config
        for peer in self.peers.role("learner"):
            gone = peer.unreachable_since is not None and now - peer.unreachable_since
            if gone and gone > config.network.silent_after_s:
                self._lost(peer, f"lost {peer.describe(now)}: its connection is gone [closed]")
            elif now - peer.last_heard > config.learner.batch_deadline_s:
                said = self._expired(f"a sign of {peer.name}", (peer.name,), now - peer.last_heard, BATCH_DEADLINE)
                self._lost(peer, f"lost {peer.describe(now)}{said} [silent]")
            elif now - peer.last_acted > config.learner.batch_deadline_s:
                said = self._expired(f"more than beats of {peer.name}", (peer.name,), now - peer.since, BATCH_DEADLINE)
                log.warning(
                    "replay: %s lives and has been %s for %.0f s; the run goes on%s [slow]",
                    peer.describe(now), peer.activity, now - peer.since, said,
                )  # fmt: skip
                peer.last_acted = now
        if self.number == 0 or self.peers.rank(0) is not None or has_ended:
            self._here_at = now
        elif now - self._here_at > (waited := config.wait_for_learner_s):
            said = self._expired("a learner", ("learner-0",), waited, key := "replay.wait_for_learner_s")
            self._fail(str(NoLearner(f"no learner for {waited:g} s ({key}){said} [silent]")))

    def settle(self) -> None:
        """Carry out the divergence that a record has shown, if any: the line ends there and goes on anew.

        Equal digests are those of a learner that rolls back. Its weights are what they were: policies after them are
        lost, and the groups of the steps that it takes back are dropped.
        """
        run = self.run
        if run.diverging is None:
            return
        (step, expected, found), run.diverging = run.diverging, None
        if expected == found:
            self._end_line(step, expected, found, f"the learner rolls back to version {step}")
            return
        why = "it is not deterministic (take learner.deterministic=true and the same number of ranks for exact resumes)"
        if run.changed:
            why = f"other settings made those: {', '.join(run.changed.values())}"
        what = f"step {step} made weights {found}, the journal has {expected} of an earlier incarnation; {why}"
        if self.playback:
            run.counters["diverged"] += 1
            log.error("replay: %s [corrupt]", what)
            return
        if run.config.replay.on_divergence == "stop":
            run.counters["diverged"] += 1
            self._fail(str(Diverged(f"{what}; replay.on_divergence is 'stop' [corrupt]")))
            return
        self._end_line(step, expected, found, what)

    def _end_line(self, step: int, expected: str, found: str, what: str) -> None:
        """Decide what becomes of the groups after `step`, and record it."""
        run, line, rolls_back = self.run, self.run.buffer.line, expected == found
        first_lost = step + rolls_back
        trained = [line.steps[later].groups for later in line.ahead(step) if rolls_back and line.digest(later)]
        dropped = [taken.group_id for groups in trained for taken in groups]
        ahead = [taken for taken in line.groups_ahead(step) if taken.group_id not in dropped]
        groups = [(taken.group_id, run.load_group(taken.location)) for taken in ahead]
        for slot in list(run.buffer.slots.values()):
            if slot.state is SlotState.LEASED:
                self.leasing.recall(slot)  # which policy goes on with it is not known
            elif slot.group is not None:
                groups.append((slot.group_id, slot.group))
        superseded = [group_id for group_id, group in groups if int(group.versions.max()) >= first_lost]
        self.evaluations.superseded(first_lost)
        log.warning(
            "replay: %s: %d groups of the policies that are gone are sampled anew, %d are dropped",
            what, len(superseded), len(dropped),
        )  # fmt: skip
        fields = {"step": step, "incarnation": self.number, "expected": expected, "found": found}
        fields |= {"first_lost": first_lost, "superseded": superseded, "dropped": dropped}
        record(run, "diverged", fields)
        self.batching.restart()

    def _replaced_by(self, identity: str, hello: m.Hello) -> list[Peer]:
        """Other connections of the same rank; when a new learner starts, all that took part in an earlier one."""
        replaced = [p for p in self.peers.role("learner") if p.hello.rank == hello.rank and p.identity != identity]
        if hello.rank == 0 and hello.incarnation == 0:
            others = self.peers.role("learner")
            replaced += [p for p in others if p.hello.rank and max(p.incarnation, p.hello.incarnation)]
        return replaced

    def _starts(self, identity: str, hello: m.Hello) -> str | None:
        """The line of policies goes on from the version that this learner holds. Or why it cannot."""
        run, buffer = self.run, self.run.buffer
        if hello.version > buffer.version and hello.version > buffer.line.last_committed:
            problem = self._start_from_checkpoint(hello)
            if problem is not None:
                return problem
        elif not buffer.line.reaches(hello.version) or (hello.version < buffer.version and not buffer.line.steps):
            return (
                f"it holds version {hello.version}, and the journal begins after step"
                f" {min(buffer.line.steps, default=buffer.version + 1) - 1}; resume from a checkpoint of that step or a"
                " later one, or start a new run"
            )
        self.evaluations.superseded(max(hello.version, buffer.line.last_committed) + 1)
        fields = {
            "incarnation": self.number + 1,
            "version": hello.version,
            "digest": hello.digest,
            "world_size": hello.world_size,
            "bus_address": hello.bus_address,
            "identity": identity,
        }
        record(run, "learner", fields | {"rolls_back": hello.rolls_back})
        self.batching.restart()
        servers = self.peers.role("rollout_server")
        for peer in servers if self.number > 1 else []:
            if not self.leasing.is_on_line(peer):
                self.leasing.off_line(peer)
        ahead = len(buffer.line.ahead(hello.version))
        log.info(
            "replay: incarnation %d starts at version %d%s", self.number, hello.version,
            f", {ahead} batches of the journal come again" if ahead else "",
        )  # fmt: skip
        self.settle()
        self.peers.to_servers(run.welcome())
        return None

    def _start_from_checkpoint(self, hello: m.Hello) -> str | None:
        """The journal is not there, or a power failure has left it behind the checkpoint."""
        run, cursor = self.run, hello.cursor
        if cursor is None:
            return (
                f"it holds version {hello.version}, and the journal ends at version {run.buffer.version}; only"
                " rank 0 of a learner that was resumed from a checkpoint may be ahead"
            )
        try:
            number = int(cursor["incarnation"])
            again = deque((int(p), int(i)) for p, i in cursor["untrained"])
            counters = {str(name): int(count) for name, count in cursor["counters"].items()}
            run.source.restore(cursor["source"])
        except (KeyError, TypeError, ValueError) as error:
            return f"the checkpoint's cursor cannot be used: {error!r}"
        run.policies.incarnation = max(self.number, number)
        run.counters.clear()  # its totals, not on top of what this process has counted
        run.counters.update(counters)
        run.counters["resume_without_journal"] += len(again)
        log.warning(
            "replay: the journal has nothing of version %d: the prompts of %d lost groups are sampled again",
            hello.version, len(again),
        )  # fmt: skip
        run.forget_groups(hello.version, again)
        run.journal.begin_segment()
        run.journal.append("snapshot", snapshot_of(run))
        return None

    def _lost(self, peer: Peer, reason: str) -> None:
        self.peers.remove(peer.identity)
        self.peers.silent[peer.name] = peer.hello
        self.run.counters["learner_ranks_lost"] += 1
        log.warning("replay: %s; the run waits %g s for it (replay.wait_for_learner_s)",
                    reason, self.run.config.wait_for_learner_s)  # fmt: skip
