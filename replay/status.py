"""Replay's view of the run as plain data, for the live view, for tests and for people."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from replay.decisions.batching import BatchScheduler
from replay.decisions.intake import GroupIntake
from replay.decisions.leasing import LeaseScheduler
from replay.decisions.teaching import TeacherDirectory
from replay.state import answers
from replay.state.buffer import drops
from replay.state.leases import SlotState
from replay.state.peers import Peers
from replay.state.run import RunState
from replay.waits import Waits
from slipstream.runtime.lifeline import Cores
from slipstream.runtime.vitals.latency import UpdateLatency
from slipstream.runtime.vitals.merging import merged
from slipstream.runtime.vitals.watch import Vitals

LEFT_OUT = (*answers.PROMPT_ERRORS, "broken_row")
"""Reasons of drops that lie in the data."""


class StatusReport:
    """Reads the state of a run; changes nothing."""

    def __init__(
        self,
        run: RunState,
        peers: Peers,
        leasing: LeaseScheduler,
        intake: GroupIntake,
        batching: BatchScheduler,
        teaching: TeacherDirectory,
    ) -> None:
        self.run, self.peers, self.intake = run, peers, intake
        self.waits = Waits(run, peers, leasing, batching, teaching)
        self._cores = Cores()
        self._idle = deque([[0.0, 0]], maxlen=run.config.replay.async_lag + 1)
        """Sum and number of beats of servers, by batch, over a whole cycle: of the batches that may be made at once one
        is waited for."""
        self.latency = UpdateLatency()
        self.vitals: Vitals | None = None
        """The watch of this process, while it serves (replay/main.py)."""

    def of(self, now: float, *, ended: str | None, no_server_since: float) -> dict[str, Any]:
        """The state that a Status message carries (schema: docs/protocol.md)."""
        buffer = self.run.buffer
        leases = Counter(slot.server for slot in buffer.slots.values())
        return {
            "unix_s": time.time(),
            "version": buffer.version,
            "incarnation": self.run.policies.incarnation,
            "async_lag": buffer.async_lag,
            "groups": {
                "leased": buffer.count(SlotState.LEASED),
                "buffered": buffer.count(SlotState.BUFFERED),
                "taken": buffer.taken,
                "max": buffer.max_groups,
            },
            "waits": self.waits.of(now, no_server_since),
            "peers": [
                {
                    "name": peer.name,
                    "pid": peer.hello.pid,
                    "role": peer.role,
                    "version": peer.holds,
                    "activity": peer.activity,
                    "since_s": max(0.0, now - peer.since),
                    "silent_s": now - peer.last_heard,
                    "leases": leases[peer.identity],
                    "groups_accepted": peer.groups_accepted,
                    "gauges": peer.gauges,
                }
                for peer in self.peers.by_identity.values()
            ],
            "silent": [{"name": gone.name, "pid": gone.pid, "host": gone.host} for gone in self.peers.silent.values()],
            "counters": dict(self.run.counters),
            "journal_bytes": self.run.journal.size_bytes,
            "repeats_until": buffer.line.last_committed if buffer.line.last_committed > buffer.version else None,
            "ended": ended,
        }

    def look_for_updates(self, now: float) -> None:
        """Note which version every rollout server serves by now."""
        if self.latency.waits and (serving := [p for p in self.peers.role("rollout_server") if p.incarnation]):
            newest = self.run.policies.incarnation
            self.latency.serve(min(p.version if p.incarnation == newest else -1 for p in serving), now)

    def note_beat(self, gauges: Mapping[str, float]) -> None:
        """A beat of a rollout server, each as long as the others."""
        if "idle_ratio" in gauges:
            total, count = self._idle[-1]
            self._idle[-1] = [total + gauges["idle_ratio"], count + 1]

    def of_batch(self) -> dict[str, float]:
        """Numbers that go with a batch, once for each."""
        stats = self.batch_stats()
        self._idle.append([0.0, 0])
        return stats

    def measured(self) -> dict[str, float]:
        """What the watches of all connected processes say, and how long weights travel."""
        gauges = [peer.gauges for peer in self.peers.by_identity.values()]
        own = [self.vitals.gauges()] if self.vitals is not None else []
        return merged([*gauges, *own]) | self.latency.metrics()

    def show(self) -> None:
        """Serve the numbers of now at this process's endpoint, where there is one."""
        if self.vitals is not None and self.vitals.is_served:
            self.vitals.show(self.batch_stats())

    def batch_stats(self) -> dict[str, float]:
        """Numbers about buffer and servers that go with every batch to metrics.jsonl."""
        servers, rates = self.peers.role("rollout_server"), self.intake.error_rates
        buffer, counters = self.run.buffer, self.run.counters
        idle, beats = map(sum, zip(*self._idle, strict=True))
        counted = ("buffer/superseded", "buffer/stale_leased_again", "buffer/tokens_masked")
        stats = {
            "buffer/size": float(buffer.count(SlotState.BUFFERED)),
            "buffer/leased": float(buffer.count(SlotState.LEASED)),
            "buffer/taken": float(buffer.taken),
            "buffer/dropped": float(sum(drops(counters).values())),
            **{name: float(counters[name.removeprefix("buffer/")]) for name in counted},
            "buffer/partial_tokens_used": float(counters["partial_tokens_used"]),
            "buffer/journal_bytes": float(self.run.journal.size_bytes),
            "prompts/data_loading_s": self.run.source.seconds,
            **self.run.source.measured(),
            **{f"prompts/left_out/{name}": float(counters[f"dropped/{name}"]) for name in LEFT_OUT},
            "rollout/servers": float(len(servers)),
            "rollout/tokens_per_s": sum(p.gauges.get("tokens_per_s", 0.0) for p in servers),
            "replay/cores": self._cores.take(),
            "reward/error_rate": rates["reward_error"].share,
            **{f"buffer/dropped/{reason}": float(number) for reason, number in drops(counters).items()},
            **answers.measured(counters),
        }
        if self.run.config.environment.function is not None:
            stats["episode/error_rate"] = rates["environment_error"].share
        if beats:
            stats["rollout/idle_ratio"] = idle / beats
            stats["rollout/cores"] = sum(p.gauges.get("cores", 0.0) for p in servers)
        return stats | {f"rollout/groups/{p.name}": float(p.groups_accepted) for p in servers} | self.measured()
