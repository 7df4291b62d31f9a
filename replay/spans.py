"""Replay's part of a trace: turns of its loop, batches from the first Take to the last Proceed, leases by server."""

from collections.abc import Callable

from replay.decisions.batching import BatchScheduler
from replay.state.leases import GroupId, SlotState
from replay.state.run import RunState
from slipstream.runtime.trace import Recorder, now_ns, to_ns

MIN_TURN_NS = 100_000
"""Shorter turns of the loop are not worth a span."""
LEASES = "leases of "
"""Begins the name of a lane whose spans overlap: a server holds several leases."""

Lease = tuple[GroupId, int, str]


class ReplaySpans:
    """Compares the run with what it was at the last turn of the loop, as replay/timeline.py does."""

    def __init__(
        self, recorder: Recorder, run: RunState, batching: BatchScheduler, name_of: Callable[[str], str]
    ) -> None:
        self.recorder, self._run, self._batching, self._name_of = recorder, run, batching, name_of
        self._leased: dict[Lease, int] = {}
        """Since when."""
        self._formed: dict[int, int] = {}
        """Batches that ranks are fetching, by step."""
        self._asked: dict[int, int] = {}

    def observe(self, woken: float) -> None:
        """After a turn of the loop that began at `woken`, in monotonic seconds."""
        self.recorder.at(self._run.buffer.version)
        if not self.recorder.on:
            return
        now, began = now_ns(), to_ns(woken)
        if now - began >= MIN_TURN_NS:
            self.recorder.add("loop", "turn", began, now)
        self._batches(now)
        self._leases(now)

    def _batches(self, now: int) -> None:
        """Of one step at a time: ranks ask for it, it is formed, all ranks hold their part."""
        step = self._run.buffer.version + 1
        if self._batching.takes.get(step) and self._run.proceeding < step:
            self._asked.setdefault(step, to_ns(self._batching.take_since))
        if step in self._asked and step in self._batching.batches and step not in self._formed:
            self._formed[step] = now
            self.recorder.add("batches", f"batch {step} waits for groups", self._asked[step], now)
        for known in [known for known in self._formed if self._run.proceeding >= known]:
            self.recorder.add("batches", f"batch {known} goes out", self._formed.pop(known), now)
            self._asked.pop(known, None)

    def _leases(self, now: int) -> None:
        held: dict[Lease, int] = {}
        for slot in self._run.buffer.slots.values():
            if slot.state is SlotState.LEASED and slot.server is not None:
                held[slot.group_id, slot.attempt, slot.server] = to_ns(slot.leased_at)
        for lease in self._leased.keys() - held.keys():
            (pass_, index), attempt, server = lease
            lane = LEASES + self._name_of(server)
            self.recorder.add(lane, f"group {pass_}/{index}", self._leased[lease], now, at_once=True, attempt=attempt)
        self._leased = held
