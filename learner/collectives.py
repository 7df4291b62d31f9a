"""A watch over this rank's collectives: one that stands still is named, with torch's flight recorder.

NCCL does not say which rank is missing: its own watchdog aborts the process some time later. So a thread reads the
flight recorder each second. After learner.collective_deadline_s it asks the other ranks of the group, through the store
of the process group, how far they are, and ends the process with the name of the rank that keeps the others waiting.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from configs.errors import SlipstreamError
from slipstream.runtime.hang import expired

log = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_S = 5.0
"""The other ranks find out within so many seconds of each other."""
AFTER_S = 60.0
"""NCCL's own watchdog, which names nothing, comes this much later."""
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of a torch with NCCL, and of one without."""
LINES = 12
"""Of each rank, in the hang report."""
ASKED, KNOWN = "slipstream/collectives/asked", "slipstream/collectives/known"
"""Keys of the store: the group that a rank waits in, and how far each rank is there."""


class CollectiveFailed(SlipstreamError, RuntimeError, code="SLIP-LEARN-06"):
    """A collective of the learner ranks failed or did not end in time."""


class CollectiveTimedOut(CollectiveFailed):
    """A collective of the learner ranks did not end in time."""

    symptom = "silent"


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of the flight recorder. Example: Collective("0", "all_gather", 812, "started", 41.5, False)."""

    group: str
    name: str
    number: int
    """Counts the collectives of the group on this rank."""
    state: str
    """scheduled, started or completed."""
    age_s: float
    is_over: bool

    def __str__(self) -> str:
        state = "over" if self.is_over else self.state
        return f"{self.name} no. {self.number} of group {self.group!r}, {state}, {self.age_s:.1f} s ago"


def recorded() -> str | bytes:
    """The flight recorder of this process as JSON, the oldest entry first."""
    name = next(name for name in DUMPS if hasattr(_distributed_c10d, name))
    return getattr(_distributed_c10d, name)()  # type: ignore[no-any-return]


def collectives(trace: str | bytes, groups: Sequence[str], unix_s: float) -> list[Collective]:
    """Those of these groups; the weight bus watches its own."""
    return [
        Collective(
            entry["process_group"][0],
            entry["profiling_name"].partition(":")[2],
            entry["collective_seq_id"],
            entry["state"],
            unix_s - entry["time_created_ns"] / 1e9,
            bool(entry["retired"]),
        )
        for entry in json.loads(trace)["entries"]
        if entry["process_group"][0] in groups
    ]


def blame(stuck: Collective, rank: int, left: Mapping[int, Any]) -> tuple[str, tuple[int, ...]]:
    """What keeps a collective from its end, for a person, and the ranks to blame.

    Args:
        stuck: the oldest of this rank that is not over.
        rank: this one.
        left: of each other rank of the group what it left: `reached`, the number of its newest collective there, and
            `over`, of its newest that is over; None of one that left nothing.
    """
    if silent := tuple(sorted(other for other, its in left.items() if its is None)):
        return f"{_ranks(silent)} gave no answer within {ANSWER_S:g} s, stopped or gone", silent
    if late := tuple(sorted(other for other, its in left.items() if its["reached"] < stuck.number)):
        newest = max(left[other]["reached"] for other in late)
        return f"{_ranks(late)} has not begun it, and stands behind no. {newest}", late
    if ahead := tuple(sorted(other for other, its in left.items() if its["over"] >= stuck.number)):
        return f"{_ranks(ahead)} is through it: the link to rank {rank} is cut", (rank,)
    return "all its ranks have begun it: a link between them stands still", tuple(sorted(left))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class CollectiveWatch(threading.Thread):
    """Ends this process when a collective of its groups has not ended in time."""

    def __init__(
        self,
        groups: Mapping[str, Sequence[int]],
        deadline_s: float,
        leave: Callable[[CollectiveFailed], object],
        *,
        read: Callable[[], str | bytes] = recorded,
    ) -> None:
        """
        Args:
            groups: ranks by the name of their group, as the flight recorder has it.
            deadline_s: learner.collective_deadline_s.
            leave: ends this process.
        """
        super().__init__(name="collectives", daemon=True)
        self._groups, self._deadline_s, self._leave, self._read = groups, deadline_s, leave, read
        self._is_over = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._answer, name="collectives asked", daemon=True).start()
        try:
            failure = self._watch()
        except Exception as error:  # whatever torch's recorder gives: unwatched, a hang would have no name
            text = f"torch's flight recorder cannot be read: {type(error).__name__}: {error}"
            log.exception("the watch over the collectives of rank %s ends: %s", os.environ.get("RANK", "0"), text)
            failure = CollectiveFailed(f"the learner's collectives cannot be watched: {text}")
        if failure is not None:
            self._leave(failure)

    def _watch(self) -> CollectiveFailed | None:
        """What to end with; None at the end of a good run."""
        while not self._is_over.wait(min(LOOK_S, self._deadline_s / 4)):
            seen = self._seen(self._groups)
            stuck = max((one for one in seen if not one.is_over), key=lambda one: one.age_s, default=None)
            if stuck is not None and stuck.age_s > self._deadline_s:
                return self._failure(stuck)
        return None

    def stop(self) -> None:
        self._is_over.set()

    def _seen(self, groups: Iterable[str]) -> list[Collective]:
        return collectives(self._read(), [*groups], time.time())

    def _known(self, group: str) -> dict[str, Any]:
        """How far this rank is, for the others."""
        its = self._seen([group])
        over = max((one.number for one in its if one.is_over), default=0)
        reached = max((one.number for one in its), default=0)
        return {"reached": reached, "over": over, "lines": [str(one) for one in its[-LINES:]]}

    def _answer(self) -> None:
        """Leave what this rank knows as soon as another one asks, whatever the main thread does."""
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # gone with the process that holds it
            while not self._is_over.wait(LOOK_S):
                if store.check([ASKED]):
                    known = self._known(store.get(ASKED).decode())
                    store.set(f"{KNOWN}/{dist.get_rank()}", json.dumps(known))
                    return

    def _failure(self, stuck: Collective) -> CollectiveTimedOut:
        """What to say, with a hang report that has the last collectives of all ranks that answer."""
        rank, mine = dist.get_rank(), self._known(stuck.group)
        left: dict[int, Any] = {other: None for other in self._groups[stuck.group] if other != rank}
        asking = threading.Thread(target=self._ask, args=(stuck.group, left), daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)  # the store may stand still as well
        why, culprits = blame(stuck, rank, dict(left))
        lines = ["flight recorder, by rank, the newest last:"]
        for one, known in sorted({**left, rank: mine}.items()):
            lines += [f"rank {one}: {line}" for line in (known["lines"] if known else ["no answer"])]
        said = expired(
            f"{stuck.name} no. {stuck.number} of the learner ranks; {why}",
            owed_by=tuple(f"learner-{one}" for one in culprits if one != rank),
            waited_s=stuck.age_s,
            key="learner.collective_deadline_s",
            more=lines,
        )
        return CollectiveTimedOut(f"{stuck} (learner.collective_deadline_s {self._deadline_s:g}): {why}{said} [silent]")

    def _ask(self, group: str, left: dict[int, Any]) -> None:
        """Fill in what the other ranks of a group leave within ANSWER_S."""
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + ANSWER_S
        with suppress(RuntimeError):
            store.set(ASKED, group)
        for other in left:
            with suppress(RuntimeError):
                store.wait([f"{KNOWN}/{other}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
                left[other] = json.loads(store.get(f"{KNOWN}/{other}"))


def groups_of(mesh: Any) -> dict[str, list[int]]:
    """Ranks by name of the groups of a mesh (learner/policy/meshes.py) and of the default one."""
    found = [dist.group.WORLD, mesh.get_group()]
    data, tensor = getattr(mesh, "data", None), getattr(mesh, "tensor", None)
    if data is not None:
        found += [mesh.replica, *(data.get_group(dim) for dim in range(data.ndim))]
    found += [tensor.get_group()] if tensor is not None else []
    return {group.group_name: dist.get_process_group_ranks(group) for group in found if group is not None}


@contextmanager
def watched(
    mesh: Any, device: torch.device, deadline_s: float, leave: Callable[[CollectiveFailed], object]
) -> Iterator[None]:
    """Watch the collectives over NCCL; gloo raises by itself where one takes too long."""
    if device.type != "cuda":
        yield
        return
    watch = CollectiveWatch(groups_of(mesh), deadline_s, leave)
    watch.start()
    yield
    watch.stop()
