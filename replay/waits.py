"""What a run waits for, one entry each: by a code for programs, in words for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from replay.decisions.batching import BatchScheduler
from replay.decisions.leasing import LeaseScheduler
from replay.decisions.teaching import TeacherDirectory
from replay.state.buffer import drops
from replay.state.leases import SlotState
from replay.state.peers import Peer, Peers
from replay.state.run import RunState

SLOW_REWARD_S = 5.0
"""Age of the oldest call of a reward from which on it is named."""


@dataclass(slots=True)
class Waits:
    """Reads the state of a run; changes nothing."""

    run: RunState
    peers: Peers
    leasing: LeaseScheduler
    batching: BatchScheduler
    teaching: TeacherDirectory
    disk: tuple[float, str] | None = None
    """Since when the journal cannot be written, and why, with its path."""
    refused: int = 0
    """Connections whose keys were refused so far."""

    def of(self, now: float, no_server_since: float) -> list[dict[str, Any]]:
        """Entries {code, who, for, since_s}; codes: disk, server, teacher, batch, ranks, room, silent, reward."""
        found = []
        if self.disk is not None:
            found.append(_wait("disk", "replay", f"its disk: {self.disk[1]}", now - self.disk[0]))
        servers = self.peers.role("rollout_server")
        if not servers and self.run.config.needs_servers:
            keys = f"; {self.refused} connections were refused for their keys (network.keys)" if self.refused else ""
            found.append(_wait("server", "replay", f"a rollout server{keys}", now - no_server_since))
        found += self._teachers(now)
        found += self._batch(now)
        found += self._ranks(now)
        buffer = self.run.buffer
        from_data = self.run.config.learner.facts.from_data
        if servers and not from_data and buffer.room == 0 and buffer.count(SlotState.BUFFERED) == len(buffer.slots):
            learner = next((f", which is {peer.activity}" for peer in self.peers.role("learner") if peer.activity), "")
            room = f"room: {buffer.max_groups} groups are in flight (the learner is slower{learner})"
            found.append(_wait("room", "rollout servers", room, 0.0))
        silent_s = 3 * self.run.config.network.heartbeat_s
        for peer in self.peers.by_identity.values():
            if now - peer.last_heard > silent_s:
                found.append(_wait("silent", "replay", f"a sign of {peer.name}", now - peer.last_heard))
        return [*found, *(wait for peer in servers if (wait := self._reward(peer)) is not None)]

    def _teachers(self, now: float) -> Iterator[dict[str, Any]]:
        """Teachers of which no process is here."""
        for name, since in self.teaching.missing.items():
            if not self.teaching.processes(name) and now > since:
                silent = [gone.name for gone in self.peers.silent.values() if gone.teacher == name]
                said = f" ({', '.join(silent)} fell silent)" if silent else ""
                yield _wait("teacher", "rollout servers", f"a process of teacher {name!r}{said}", now - since)

    def _batch(self, now: float) -> list[dict[str, Any]]:
        """The batch that the ranks ask for, and where its oldest missing group is."""
        batching, buffer = self.batching, self.run.buffer
        step = buffer.version + 1
        if not batching.takes.get(step) or step in batching.batches:
            return []
        what, missing = f"batch {step}", buffer.oldest_missing()
        if missing is not None:
            server = self.peers.get(missing.server) if missing.server else None
            where = f"at {server.name}{_engine(server.gauges)}" if server is not None else "at no server yet"
            where = "made of data.train" if self.run.config.learner.facts.from_data else where
            what += f" (group {missing.group_id[0]}/{missing.group_id[1]} {where})"
        obstacles = [*self._dropped(), *self._idle()]
        if obstacles:
            here = min(buffer.count(SlotState.BUFFERED), buffer.groups_per_step)
            what += "; ".join([f": it has {here} of {buffer.groups_per_step} groups", *obstacles])
        return [_wait("batch", "learner", what, now - batching.take_since)]

    def _dropped(self) -> Iterator[str]:
        if dropped := drops(self.run.counters):
            yield f"dropped so far: {', '.join(f'{count} {reason}' for reason, count in dropped.items())}"
            yield f"the last, {self.leasing.last_drop}"

    def _idle(self) -> Iterator[str]:
        """Rollout servers without a lease although there are prompts to lease, and why."""
        buffer = self.run.buffer
        queued = [slot for slot in buffer.slots.values() if slot.state is SlotState.QUEUED]
        busy = {slot.server for slot in buffer.slots.values() if slot.state is SlotState.LEASED}
        needed = min([slot.min_version for slot in queued], default=buffer.next_min_version())
        is_due = (queued or buffer.room > 0) and not self.run.config.learner.facts.from_data
        for peer in self.peers.role("rollout_server") if is_due else ():
            serves = f"it serves version {peer.version} of incarnation {peer.incarnation}"
            if peer.identity in busy:
                continue
            if not peer.capacity:
                yield f"{peer.name!r} has no lease: it asks for none"
            elif not self.leasing.is_on_line(peer):
                replaced = self.run.policies.incarnation
                yield f"{peer.name!r} has no lease: {serves}, which incarnation {replaced} has replaced"
            elif peer.version < needed:
                yield f"{peer.name!r} has no lease: {serves}, and the next prompt needs version {needed}"

    def _ranks(self, now: float) -> list[dict[str, Any]]:
        """Learner ranks that others wait for: before a batch is formed, and before any starts on it."""
        batching, step = self.batching, self.run.buffer.version + 1
        for done, what in ((batching.takes.get(step), "to ask for"), (batching.haves.get(step), "to hold")):
            missing = sorted(set(range(batching.num_ranks)) - done) if done else []
            if missing and (what == "to hold" or step not in batching.batches):
                who, whom = (", ".join(f"learner-{rank}" for rank in ranks) for ranks in (sorted(done or ()), missing))
                return [_wait("ranks", who, f"{whom} {what} batch {step}", now - batching.take_since)]
        return []

    def _reward(self, peer: Peer) -> dict[str, Any] | None:
        """A reward whose oldest call is old, as the server's gauges say."""
        oldest_s, waiting = peer.gauges.get("reward_oldest_s", 0.0), peer.gauges.get("rewards_waiting", 0.0)
        if oldest_s < SLOW_REWARD_S:
            return None
        workers = peer.gauges.get("reward_workers", 1.0)
        said = f"{waiting:.0f} answers, {workers:.0f} worker{'s' if workers > 1 else ''}"
        return _wait("reward", peer.name, f"reward {self.run.config.reward.shown!r}: {said}", oldest_s)


def _engine(gauges: Mapping[str, float]) -> str:
    """`, whose engine decodes 12 answers`, or nothing where the server has not said."""
    running, judged = gauges.get("running", 0.0), gauges.get("rewards_waiting", 0.0)
    if running:
        return f", whose engine decodes {running:.0f} answers"
    if judged:
        return f", where {judged:.0f} answers are judged"
    return f", where {taught:.0f} groups wait for teachers" if (taught := gauges.get("teachers/waiting", 0.0)) else ""


def _wait(code: str, who: str, what: str, since_s: float) -> dict[str, Any]:
    return {"code": code, "who": who, "for": what, "since_s": max(0.0, since_s)}
