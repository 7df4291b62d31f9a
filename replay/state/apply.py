"""Decisions become state here, and nowhere else: live, when they are recorded, and after a crash, when they are read.

`record` writes a decision to the journal and applies it; `restore` applies what a journal holds, from its newest
snapshot on. No socket; time is an argument.
"""

from collections.abc import Callable, Iterable
from typing import Any

from configs.schema import Config
from replay.data.source import SETTINGS
from replay.journal.format import Frames, JournalError, Location, Record
from replay.state.answers import count
from replay.state.evaluation_parts import EvaluationPart
from replay.state.evaluations import PartResult
from replay.state.leases import INTERRUPTIONS, Slot, SlotState
from replay.state.line import LineStep, TakenGroup
from replay.state.run import RunState
from replay.state.snapshot import group_id_of, settings_of, take_over


def record(run: RunState, kind: str, fields: dict[str, Any], frames: Frames = (), *, now: float = 0.0) -> Location:
    """Write a decision down and carry it out; where the journal has its frames."""
    location = run.journal.append(kind, fields, frames)
    apply(run, Record(kind, 0, fields, location), now)
    return location


def restore(run: RunState, records: Iterable[Record], now: float) -> int:
    """Bring a new run to where its journal ends; how many records. Raises JournalError."""
    count = 0
    for each in records:
        apply(run, each, now)
        count += 1
    run.load_groups()
    return count


def apply(run: RunState, decision: Record, now: float) -> None:
    """What this decision changes; kinds that change nothing are passed over."""
    if decision.kind in _HANDLERS:
        _HANDLERS[decision.kind](run, decision, now)


def boot_fields(config: Config, source: dict[str, Any], pid: int) -> dict[str, Any]:
    """The `boot` record: what a run must keep for its journal to go on."""
    return {"pid": pid, "run": settings_of(config), "source": source}


KEPT = (
    ("run", "groups_per_step", "rollout.groups_per_step"),
    ("run", "group_size", "rollout.group_size"),
    ("run", "temperature", "rollout.temperature"),
    ("run", "scores", "teachers that rollout servers ask"),
    *(("source", name, key) for name, key in SETTINGS.items()),
)
"""What of a `boot` record or a snapshot must not change, and how the user calls it. The trainer takes logprobs at the
present temperature; those of the groups that are here, and teachers', were taken at the one that sampled them."""


def check_boot(run: RunState, decision: Record, _: float = 0.0) -> None:
    """Raises JournalError when the journal was written with other settings, or for another dataset."""
    mine = boot_fields(run.config, run.source.state(), 0)
    for part, name, key in KEPT:
        theirs, own = decision.fields[part].get(name), mine[part].get(name)
        if theirs != own:
            raise JournalError(
                f"{key}: the run's journal was written with {theirs!r}, now it is {own!r}; go back to what"
                " it was, or start a new run"
            )
    theirs, own = decision.fields["run"].get("deciding", {}), mine["run"]["deciding"]
    for key in sorted(key for key in theirs.keys() & own.keys() if theirs[key] != own[key]):
        run.changed.setdefault(key, f"{key} {theirs[key]} -> {own[key]}")


def _snapshot(run: RunState, decision: Record, now: float) -> None:
    """Recovery begins here: no `boot` record before it is read."""
    check_boot(run, decision)
    take_over(run, decision.fields, now)


def _slot(run: RunState, decision: Record) -> Slot:
    return run.buffer.slots[group_id_of(decision.fields["group"])]


def _lease(run: RunState, decision: Record, now: float) -> None:
    group_id, fields = group_id_of(decision.fields["group"]), decision.fields
    slot = run.buffer.slots.get(group_id)
    if slot is None:
        expected, row = run.next_prompt()
        if expected != group_id:
            raise JournalError(
                f"record {decision.number} of the journal leases prompt {group_id}, and the dataset's next is"
                f" {expected}"
            )
        slot = run.buffer.slots[group_id] = Slot(group_id, row, fields["min_version"], async_lag=run.buffer.async_lag)
    slot.attempt, slot.min_version = fields["attempt"] - 1, fields["min_version"]
    slot.async_lag, slot.state = fields["async_lag"], SlotState.QUEUED
    run.leases.grant(slot, fields["server"], now)


def _release(run: RunState, decision: Record, _: float) -> None:
    slot, reason = _slot(run, decision), decision.fields["reason"]
    if reason == "diverged":
        slot.recall()
    else:
        run.leases.release(slot, reason)
        if reason not in INTERRUPTIONS:  # its answers may be why
            run.partials.forget(slot.group_id)
    run.counters[f"leases_released/{reason}"] += 1
    count(run.counters, decision.fields.get("answers", {}))


def _group(run: RunState, decision: Record, _: float) -> None:
    slot = _slot(run, decision)
    slot.state, slot.server, slot.location = SlotState.BUFFERED, None, decision.location
    run.counters["groups_accepted"] += 1
    count(run.counters, decision.fields.get("answers", {}))
    if "solved" in decision.fields:
        run.source.scored(slot.group_id[1], decision.fields["solved"])
    run.buffer.fruitless = 0
    run.partials.forget(slot.group_id)


FILTERED = ("flat_rewards", "filtered")
"""Reasons of algorithm.dynamic_sampling, whose drops have a bound for each step."""


def _drop(run: RunState, decision: Record, _: float) -> None:
    slot, reason = _slot(run, decision), decision.fields["reason"]
    run.buffer.drop(slot, reason)
    if reason in FILTERED:
        run.flat_drops += 1
    run.partials.forget(slot.group_id)


def _take(run: RunState, decision: Record, _: float) -> None:
    buffer, step = run.buffer, decision.fields["step"]
    run.policies.possible(step)
    run.flat_drops = 0
    if step not in buffer.line.steps:
        slots = [buffer.slots.pop(group_id_of(group)) for group in decision.fields["groups"]]
        taken = [TakenGroup(s.group_id, s.attempt, s.min_version, s.location) for s in slots if s.location is not None]
        buffer.line.steps[step] = LineStep(taken, decision.fields["async_lag"], decision.fields["masked"])


def _proceed(run: RunState, decision: Record, _: float) -> None:
    run.proceeding = decision.fields["step"]


def _commit(run: RunState, decision: Record, _: float) -> None:
    step, digest = decision.fields["step"], decision.fields["digest"]
    known = run.buffer.line.digest(step)
    run.buffer.commit(step, digest)
    if known and known != digest:
        run.diverging = (step, known, digest)


def _learner(run: RunState, decision: Record, _: float) -> None:
    """A learner starts. Its predecessor may have made and published versions above its last known commit, if replay and
    learner died together: the new one makes them anew, perhaps with other weights."""
    fields, buffer, number = decision.fields, run.buffer, decision.fields["incarnation"]
    version, digest, known = fields["version"], fields["digest"], buffer.line.digest(fields["version"])
    run.bus_address = fields["bus_address"]
    run.started.append(fields["identity"])
    run.proceeding = 0
    run.policies.incarnation = number
    if number > 1:
        run.lose(buffer.version + 1, first=number - 1, last=number - 1)
    buffer.version = version
    run.policies.published = max(version, buffer.line.last_committed)
    if not buffer.line.steps or buffer.line.initial is None:
        buffer.line.initial = (version, digest)
    run.board.supersede(run.policies.published + 1)
    if known and digest and known != digest:
        run.diverging = (version, known, digest)
    elif fields["rolls_back"]:
        run.diverging = (version, digest, digest)


def _diverged(run: RunState, decision: Record, _: float) -> None:
    """The releases that belong to it stand before it; the groups that it takes off the line are listed.

    `first_lost` is the version of the first lost policy: that of the step itself, or the one after it where the learner
    rolls back. What was trained since is dropped then: it would break the same rule again.
    """
    fields, buffer = decision.fields, run.buffer
    first_lost = fields["first_lost"]
    run.diverging = None
    run.changed.clear()
    buffer.line.correct(fields["step"], fields["found"])
    buffer.dissolve(fields["step"], lambda group_id: run.source.row(group_id[1]))
    for group in fields["dropped"]:
        del buffer.slots[group_id_of(group)]
        run.counters["dropped/rolled_back"] += 1
    run.load_groups()
    run.proceeding = 0
    run.lose(first_lost, last=fields["incarnation"] - 1)
    run.policies.published = fields["step"]
    superseded = {group_id_of(group) for group in fields["superseded"]}
    for slot in buffer.slots.values():
        if slot.state is SlotState.QUEUED or slot.group_id in superseded:
            slot.recall()  # attempts that have expired may still send their groups
    buffer.order_anew()
    run.board.supersede(first_lost)
    run.counters["superseded"] += len(fields["superseded"])
    run.counters["diverged" if first_lost == fields["step"] else "rolled_back"] += 1


def _lag(run: RunState, decision: Record, _: float) -> None:
    """A guard has lowered the bound; resumed with another replay.async_lag, a run begins with that."""
    if decision.fields["configured"] == run.buffer.configured_lag:
        run.buffer.async_lag = decision.fields["async_lag"]
    run.counters["lag_lowered"] += 1


def _checkpoint(run: RunState, decision: Record, _: float) -> None:
    """What no kept checkpoint needs is not kept either."""
    oldest = min(decision.fields["kept"], default=decision.fields["step"])
    run.buffer.line.forget(oldest)
    run.board.forget(oldest)
    run.counters["checkpoints"] += 1


def _evaluated(run: RunState, decision: Record, _: float) -> None:
    fields = decision.fields
    part = EvaluationPart(fields["set"], fields["greedy"], fields["first"])
    run.board.done(fields["version"], part, PartResult(decision.location, fields["asked"]))


_HANDLERS: dict[str, Callable[[RunState, Record, float], None]] = {
    "boot": check_boot,
    "snapshot": _snapshot,
    "learner": _learner,
    "lease": _lease,
    "release": _release,
    "group": _group,
    "drop": _drop,
    "stale": lambda run, decision, _: run.buffer.lease_again(_slot(run, decision), decision.fields["min_version"]),
    "take": _take,
    "proceed": _proceed,
    "commit": _commit,
    "diverged": _diverged,
    "checkpoint": _checkpoint,
    "lag": _lag,
    "evaluate": lambda run, decision, now: run.board.request(decision.fields["version"], now),
    "evaluating": lambda run, decision, _: run.board.begin(**decision.fields),
    "evaluated": _evaluated,
    "evaluation_forgotten": lambda run, decision, _: run.board.forget_one(**decision.fields),
    "evaluation_closed": lambda run, decision, _: run.board.close(**decision.fields),
}
