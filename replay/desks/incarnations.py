"""The learner's starts: which one speaks, from which version it goes on, and whether it stays on the line.

A policy is (incarnation, version, digest). A resumed learner takes the journalled batches again, and while its
digests are the journalled ones, what the policies before it have sampled is as good as ever. At the first digest that
differs the line diverges: what was sampled with the policies that are gone is sampled anew. No socket, and time is an
argument.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING

from replay import messages as m
from replay.peers import Peer

if TYPE_CHECKING:
    from replay.service import Service

log = logging.getLogger(__name__)


class Incarnations:
    """Counts the learner's starts within the run, and watches over the present one."""

    def __init__(self, service: "Service", now: float) -> None:
        self._service = service
        self.number = 0
        self.bus_address: str | None = None
        self.started: list[str] = []
        """Rank 0's socket of each, whose name is of that one process."""
        self.unfinished: tuple[int, str, str] | None = None
        """(step, expected, found) of a divergence of which the journal has the beginning only."""
        self._here_at = now

    @property
    def learner_is_here(self) -> bool:
        """Whether rank 0 is connected."""
        return self._service.peers.rank(0) is not None

    def hello(self, identity: str, hello: m.Hello, now: float) -> str | None:
        """A learner rank connects: at its start, or because replay was restarted. Or why it may not."""
        if hello.incarnation not in (0, self.number) or identity in self.started[:-1]:
            return f"it is of an earlier incarnation of the learner, and number {self.number} has taken its place"
        problem = None
        if hello.rank == 0:
            # A process starts once: it may say Hello again before the answer to its first one has come.
            starts = hello.incarnation == 0 and identity not in self.started
            problem = self._starts(identity, hello) if starts else self._comes_back(hello)
        if problem is None:
            for old in self._replaced_by(identity, hello):
                self._service.peers.remove(old.identity)
        return problem

    def _replaced_by(self, identity: str, hello: m.Hello) -> list[Peer]:
        """Other connections of the same rank; when a new learner starts, all that took part in an earlier one."""
        peers = self._service.peers
        replaced = peers.others_of_rank(hello.rank, identity)
        if hello.rank == 0 and hello.incarnation == 0:
            replaced += [p for p in peers.role("learner") if p.hello.rank and max(p.incarnation, p.hello.incarnation)]
        return replaced

    def watch(self, now: float) -> None:
        """Miss ranks that are gone; end the run when nobody comes in their place."""
        service, network = self._service, self._service.config.network
        for peer in service.peers.role("learner"):
            gone = peer.unreachable_since is not None and now - peer.unreachable_since
            if gone and gone > network.silent_after_s:
                self._lost(peer, f"lost {peer.describe(now)}: its connection is gone [closed]")
            elif now - peer.last_heard > service.config.learner.batch_deadline_s:
                self._lost(peer, f"lost {peer.describe(now)} [silent]")
        if self.number == 0 or self.learner_is_here or service.ended is not None:
            self._here_at = now
        elif now - self._here_at > (waited := service.config.replay.wait_for_learner_s):
            service.end(f"no learner for {waited:g} s (replay.wait_for_learner_s) [silent]", failed=True)

    def diverged(self, step: int, expected: str, found: str) -> None:
        """The weights of `step` are not those that the journal has: the line ends before it and goes on anew."""
        service = self._service
        service.counters["diverged"] += 1
        what = (
            f"step {step} made weights {found}, the journal has {expected} of an earlier incarnation; it is not"
            " deterministic (take learner.attention=sdpa, float32 and the same number of ranks for exact resumes)"
        )
        if service.playback:
            log.error("replay: %s [corrupt]", what)
            return
        if service.config.replay.on_divergence == "stop":
            service.end(f"{what}; replay.on_divergence is 'stop' [corrupt]", failed=True)
            return
        self.unfinished = None
        service.buffer.line.correct(step, found)
        service.buffer.dissolve(step, lambda group_id: service.source.row(group_id[1]))
        service.batch_desk.restart(self.number)
        service.desk.published = step
        superseded = service.desk.void(step, self.number)
        service.buffer.order_anew()
        service.evaluations.supersede(step)
        log.warning("replay: %s: %d groups of the policies that are gone are sampled anew", what, len(superseded))
        service.journal.append(
            "diverged",
            {
                "step": step,
                "incarnation": self.number,
                "expected": expected,
                "found": found,
                "superseded": [list(group_id) for group_id in superseded],
            },
        )

    def _comes_back(self, hello: m.Hello) -> str | None:
        self.bus_address = hello.bus_address
        log.info("replay: incarnation %d of the learner is here again", self.number)
        return None

    def _starts(self, identity: str, hello: m.Hello) -> str | None:
        """The line of policies goes on from the version that this learner holds. Or why it cannot."""
        service, buffer = self._service, self._service.buffer
        known = buffer.line.digest(hello.version)
        if hello.version > buffer.version and hello.version > buffer.line.last_committed:
            problem = self._start_from_checkpoint(hello)
        elif not buffer.line.reaches(hello.version) or (hello.version < buffer.version and not buffer.line.steps):
            problem = (
                f"it holds version {hello.version}, and the journal begins after step"
                f" {min(buffer.line.steps, default=buffer.version + 1) - 1}; resume from a checkpoint of that step or a"
                " later one, or start a new run"
            )
        else:
            problem = None
        if problem is not None:
            return problem
        progress = buffer.version
        buffer.rewind(hello.version)
        self.number += 1
        self.bus_address = hello.bus_address
        self.started.append(identity)
        service.desk.published = max(hello.version, buffer.line.last_committed)
        service.batch_desk.restart(self.number)
        if not buffer.line.steps or buffer.line.initial is None:
            buffer.line.initial = (hello.version, hello.digest)
        service.journal.append(
            "learner",
            {
                "incarnation": self.number,
                "version": hello.version,
                "digest": hello.digest,
                "world_size": hello.world_size,
                "bus_address": hello.bus_address,
                "identity": identity,
            },
        )
        service.desk.restart(progress, self.number)
        service.evaluations.supersede(max(hello.version, buffer.line.last_committed) + 1)
        ahead = len(buffer.line.ahead(hello.version))
        log.info(
            "replay: incarnation %d starts at version %d%s", self.number, hello.version,
            f", {ahead} batches of the journal come again" if ahead else "",
        )  # fmt: skip
        if known and hello.digest and known != hello.digest:
            self.diverged(hello.version, known, hello.digest)
        for peer in service.peers.role("rollout_server"):
            service.outbox.append((peer.identity, service.welcome()))
        return None

    def _start_from_checkpoint(self, hello: m.Hello) -> str | None:
        """The journal is not there, or a power failure has left it behind the checkpoint."""
        service, cursor = self._service, hello.cursor
        if cursor is None:
            return (
                f"it holds version {hello.version}, and the journal ends at version {service.buffer.version}; only"
                " rank 0 of a learner that was resumed from a checkpoint may be ahead"
            )
        try:
            self.number = max(self.number, int(cursor["incarnation"]))
            service.source.restore(cursor["source"])
            again = deque((int(p), int(i)) for p, i in cursor["untrained"])
            counters = {str(name): int(count) for name, count in cursor["counters"].items()}
        except (KeyError, TypeError, ValueError) as error:
            return f"the checkpoint's cursor cannot be used: {error!r}"
        service.counters.clear()  # its totals, not on top of what this process has counted
        service.counters.update(counters)
        service.counters["resume_without_journal"] += len(again)
        log.warning(
            "replay: the journal has nothing of version %d: the prompts of %d lost groups are sampled again",
            hello.version, len(again),
        )  # fmt: skip
        service.restart_at(hello.version, again)
        return None

    def _lost(self, peer: Peer, reason: str) -> None:
        self._service.peers.remove(peer.identity)
        self._service.counters["learner_ranks_lost"] += 1
        log.warning("replay: %s; the run waits %g s for it (replay.wait_for_learner_s)",
                    reason, self._service.config.replay.wait_for_learner_s)  # fmt: skip
