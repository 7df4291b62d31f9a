"""timeline.jsonl of a run: what each peer of replay does, and when peers come and go.

Replay hears every peer, also those of other hosts, so one writer suffices. A line is one of

    {"time": 1760000000.1, "name": "rollout-0", "state": "rollout", "version": 12}   from now on
    {"time": 1760000000.1, "name": "rollout-0", "event": "joined", "role": "rollout_server", "host": "n1", "pid": 4711}
    {"time": 1760000000.1, "name": "rollout-0", "event": "lost", "why": "silent"}
    {"time": 1760000000.1, "name": "rollout-0", "event": "serves", "version": 13, "gauges": {"tokens_per_s": 870.0}}

    {"time": 1760000000.1, "name": "replay", "event": "ended", "why": "all steps are done", "failed": false}

States of a rollout server: `join` (no proven weights yet), `rollout` (holds leases), `evaluate`, `wait` (asks for
leases, and there are none), `quarantined`; of a learner rank: `wait` (asked for a batch that is not formed), `train`
(anything else). Readers pass over a torn last line.
"""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from replay.decisions.batching import BatchScheduler
from replay.spans import ReplaySpans
from replay.state.leases import SlotState
from replay.state.peers import Peer, Peers
from replay.state.run import RunState
from slipstream.runtime.lifeline import BoundedLog
from slipstream.runtime.trace import Recorder

log = logging.getLogger(__name__)

FILE = "timeline.jsonl"
ENDED = "the run has ended"
"""Why a peer left at the end."""
PERIOD_S = 0.01
"""Between two looks at the peers: shorter states are not seen, and a look costs some 0.1 ms."""
GAUGES = ("tokens_per_s", "idle_ratio", "pause_s", "quarantines", "memory_gb")
"""Of a heartbeat, written with each version that a server serves."""


class Timeline:
    """Compares the peers with what they were at the last look, and writes down what has changed."""

    def __init__(self, path: Path, run: RunState, peers: Peers, batching: BatchScheduler) -> None:
        self._path, self._run, self._peers, self._batching = path, run, peers, batching
        self._known: dict[str, tuple[str, str, int]] = {}
        """By identity: name, state, version."""
        self._looked_at = float("-inf")
        self._log = BoundedLog(log)
        self._disk = ThreadPoolExecutor(1, "timeline")  # to open and close a file of a shared folder takes its time
        versions = run.config.tracking.versions(behind=1 + run.config.replay.async_lag)
        recorder = Recorder(path.parent, "replay", "replay", versions)
        self._spans = ReplaySpans(recorder, run, batching, self._name)

    def _name(self, identity: str) -> str:
        peer = self._peers.get(identity)
        return peer.name if peer is not None else identity.rpartition(".")[0] or identity

    def observe(self, now: float, woken: float) -> None:
        """Append what has changed since the last look; of the timeline at most every PERIOD_S.

        `woken` is when this turn of the loop began. A file that cannot be written is logged, and no more.
        """
        self._spans.observe(woken)
        if now - self._looked_at < PERIOD_S:
            return
        self._looked_at = now
        self._write(self._changes())

    def end(self, why: str, *, failed: bool) -> None:
        """Append how the run ended."""
        self._write([*self._changes(), {"name": "replay", "event": "ended", "why": why, "failed": failed}])
        self._disk.shutdown()
        self._spans.recorder.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        stamp = round(time.time(), 3)
        if lines:
            self._disk.submit(self._append, [json.dumps({"time": stamp, **line}) + "\n" for line in lines])

    def _append(self, lines: list[str]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            self._log.warning("timeline", "replay: %s: %d lines are left out: %s", self._path, len(lines), error)

    def _changes(self) -> list[dict[str, Any]]:
        peers = {identity: peer for identity, peer in self._peers.by_identity.items() if peer.role != "launcher"}
        states = self._states(peers)
        lines: list[dict[str, Any]] = []
        for identity in [known for known in self._known if known not in peers]:
            name = self._known.pop(identity)[0]
            lines.append({"name": name, "event": "lost", "why": self._peers.gone.pop(identity, "replaced")})
        for identity, peer in peers.items():
            known, now = self._known.get(identity), (peer.name, states[identity], peer.version)
            if known == now:
                continue
            self._known[identity] = now
            if known is None:
                hello = peer.hello
                lines.append(
                    {"name": peer.name, "event": "joined", "role": peer.role, "host": hello.host, "pid": hello.pid}
                )
            if known is None or known[1] != now[1]:
                lines.append({"name": peer.name, "state": now[1], "version": peer.version})
            if known is not None and known[2] != now[2]:
                gauges = {name: round(peer.gauges[name], 4) for name in GAUGES if name in peer.gauges}
                lines.append({"name": peer.name, "event": "serves", "version": peer.version, "gauges": gauges})
        return lines

    def _states(self, peers: Mapping[str, Peer]) -> dict[str, str]:
        leased = {slot.server for slot in self._run.buffer.slots.values() if slot.state is SlotState.LEASED}
        evaluating = {evaluation.server for evaluation in self._run.board.open.values()}
        step = self._run.buffer.version + 1
        missing = self._batching.takes.get(step, set()) if step not in self._batching.batches else set()

        def state(identity: str, peer: Peer) -> str:
            if peer.role == "learner":
                return "wait" if peer.hello.rank in missing else "train"
            if peer.role == "teacher":
                return "wait"
            if peer.blocked == "quarantined":
                return "quarantined"
            if identity in evaluating:
                return "evaluate"
            if identity in leased:
                return "rollout"
            return "wait" if peer.capacity else "join"

        return {identity: state(identity, peer) for identity, peer in peers.items()}
