"""From the journal back to the state that wrote it: what `apply` does with a record is what the service did then.

`restore` starts from the newest snapshot; `whole_line` reads everything there is, for `--replay`. Leases of servers
that were there are kept, so that their running answers count when they come back. No socket; time is an argument.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from configs.schema import Config
from replay.desks.leases import GroupId, Slot, SlotState
from replay.desks.line import LineStep, Taken
from replay.journal.format import JournalError, Location, Record
from replay.journal.snapshot import group_id_of, line_from, take_over, taken_of

if TYPE_CHECKING:
    from replay.service import Service

log = logging.getLogger(__name__)


def boot_fields(config: Config, source: dict[str, Any], pid: int) -> dict[str, Any]:
    """The `boot` record: what a run must keep for its journal to go on."""
    run = {
        "groups_per_step": config.rollout.groups_per_step,
        "group_size": config.rollout.group_size,
        "async_lag": config.replay.async_lag,
        "on_stale": config.replay.on_stale,
        "seed": config.run.seed,
    }
    return {"pid": pid, "run": run, "source": source}


def restore(service: "Service", records: Iterable[Record], now: float) -> int:
    """Bring a new service to where the journal ends; how many records there were.

    Raises:
        JournalError: the journal is of a run with other settings or another dataset.
    """
    count = 0
    for record in records:
        apply(service, record, now)
        count += 1
    _load_groups(service)
    _await_servers(service, now)
    if service.incarnations.unfinished is not None:
        service.incarnations.diverged(*service.incarnations.unfinished)
    return count


def whole_line(service: "Service", records: Iterable[Record]) -> None:
    """The line of policies from the first file on, for a service that only plays it back."""
    line, found = service.buffer.line, _Seen()
    for record in records:
        found.note(record)
        if record.kind == "boot":
            _check_boot(service, record)
        elif record.kind == "snapshot" and not line.steps and line.initial is None:
            line_from(service, record.fields)
        elif record.kind == "learner":
            if line.initial is None:
                line.initial = (record.fields["version"], record.fields["digest"])
        elif record.kind == "take":
            taken = [found.taken(group) for group in record.fields["groups"]]
            step = record.fields["step"]
            if all(entry is not None for entry in taken):
                line.steps[step] = LineStep([entry for entry in taken if entry is not None])
        elif record.kind == "diverged":
            line.correct(record.fields["step"], record.fields["found"])
            for step in line.ahead(record.fields["step"]):
                del line.steps[step]
        elif record.kind == "commit" and record.fields["step"] in line.steps:
            line.steps[record.fields["step"]].digest = record.fields["digest"]
    for step in [step for step, made in line.steps.items() if not made.digest]:
        del line.steps[step]


def apply(service: "Service", record: Record, now: float) -> None:
    """What this record did to the state."""
    handler = _HANDLERS.get(record.kind)
    if handler is not None:
        handler(service, record, now)


# ---- records -------------------------------------------------------------------------------------------


def _check_boot(service: "Service", record: Record, _: float = 0.0) -> None:
    mine = boot_fields(service.config, service.source.state(), 0)
    keys = {"groups_per_step": "rollout.groups_per_step", "group_size": "rollout.group_size", "seed": "run.seed"}
    for name, key in keys.items():
        if record.fields["run"][name] != mine["run"][name]:
            raise JournalError(
                f"{key}: the run's journal was written with {record.fields['run'][name]!r}, now it is"
                f" {mine['run'][name]!r}; go back to what it was, or start a new run"
            )
    for name in ("rows", "fingerprint", "shuffle"):
        theirs = record.fields["source"].get(name)
        if theirs != mine["source"][name]:
            raise JournalError(
                f"data.train: the run's journal was written with a dataset of {name} {theirs!r}, now it is"
                f" {mine['source'][name]!r}; go back to what it was, or start a new run"
            )


def _snapshot(service: "Service", record: Record, now: float) -> None:
    take_over(service, record.fields, now)


def _learner(service: "Service", record: Record, _: float) -> None:
    fields, buffer = record.fields, service.buffer
    version, digest, known = fields["version"], fields["digest"], buffer.line.digest(fields["version"])
    service.incarnations.number = fields["incarnation"]
    service.incarnations.bus_address = fields["bus_address"]
    service.incarnations.started.append(fields["identity"])
    service.batch_desk.restart(fields["incarnation"])
    service.desk.restart(buffer.version, fields["incarnation"])
    buffer.rewind(version)
    made = service.desk.published = max(version, buffer.line.last_committed)
    if not buffer.line.steps or buffer.line.initial is None:
        buffer.line.initial = (version, digest)
    service.evaluations.supersede(made + 1)
    if known and digest and known != digest:
        service.incarnations.unfinished = (version, known, digest)


def _lease(service: "Service", record: Record, now: float) -> None:
    group_id, buffer, desk = group_id_of(record.fields["group"]), service.buffer, service.desk
    slot = buffer.slots.get(group_id)
    if slot is None:
        expected, row = desk.next_prompt()
        if expected != group_id:
            raise JournalError(
                f"record {record.number} of the journal leases prompt {group_id}, and the dataset's next is {expected}"
            )
        slot = Slot(group_id, row, record.fields["min_version"])
        buffer.slots[group_id] = slot
    slot.attempt, slot.min_version = record.fields["attempt"] - 1, record.fields["min_version"]
    slot.state = SlotState.QUEUED
    desk.leases.grant(slot, record.fields["server"], now)


def _release(service: "Service", record: Record, _: float) -> None:
    slot, counters = service.buffer.slots[group_id_of(record.fields["group"])], service.counters
    if record.fields["reason"] == "diverged":
        slot.recall()
    else:
        service.desk.leases.release(slot, record.fields["reason"])
    counters[f"leases_released/{record.fields['reason']}"] += 1


def _group(service: "Service", record: Record, _: float) -> None:
    slot = service.buffer.slots[group_id_of(record.fields["group"])]
    slot.state, slot.server, slot.location = SlotState.BUFFERED, None, record.location
    service.counters["groups_accepted"] += 1
    service.buffer.fruitless = 0


def _drop(service: "Service", record: Record, _: float) -> None:
    service.buffer.drop(service.buffer.slots[group_id_of(record.fields["group"])], record.fields["reason"])
    if record.fields["reason"] == "flat_rewards":
        service.desk.flat_drops += 1


def _stale(service: "Service", record: Record, _: float) -> None:
    slot = service.buffer.slots[group_id_of(record.fields["group"])]
    service.buffer.lease_again(slot)
    slot.min_version = record.fields["min_version"]


def _take(service: "Service", record: Record, _: float) -> None:
    buffer, step = service.buffer, record.fields["step"]
    buffer.formed = None
    service.desk.newest(step)
    service.desk.flat_drops = 0
    if step in buffer.line.steps:
        return
    slots = [buffer.slots.pop(group_id_of(group)) for group in record.fields["groups"]]
    taken = [Taken(s.group_id, s.attempt, s.min_version, s.location) for s in slots if s.location is not None]
    buffer.line.steps[step] = LineStep(taken)


def _proceed(service: "Service", record: Record, _: float) -> None:
    service.batch_desk.proceeding = record.fields["step"]


def _commit(service: "Service", record: Record, _: float) -> None:
    step, digest = record.fields["step"], record.fields["digest"]
    known = service.buffer.line.digest(step)
    service.buffer.commit(step, digest)
    if known and known != digest:
        service.incarnations.unfinished = (step, known, digest)


def _diverged(service: "Service", record: Record, _: float) -> None:
    """The releases that belong to it stand before it; the groups that it made void are listed."""
    fields, buffer, desk = record.fields, service.buffer, service.desk
    service.incarnations.unfinished = None
    _load_groups(service)
    buffer.line.correct(fields["step"], fields["found"])
    buffer.dissolve(fields["step"], lambda group_id: service.source.row(group_id[1]))
    service.batch_desk.restart(fields["incarnation"])
    desk.lose(fields["step"], last=fields["incarnation"] - 1)
    desk.published = fields["step"]
    superseded = {group_id_of(group) for group in fields["superseded"]}
    for slot in buffer.slots.values():
        if slot.state is SlotState.QUEUED or slot.group_id in superseded:
            slot.recall()
    buffer.order_anew()
    service.evaluations.supersede(fields["step"])
    service.counters["superseded"] += len(fields["superseded"])
    service.counters["diverged"] += 1


def _evaluate(service: "Service", record: Record, now: float) -> None:
    service.evaluations.board.request(record.fields["version"], now)


def _evaluating(service: "Service", record: Record, _: float) -> None:
    evaluation = service.evaluations.board.open.get(record.fields["version"])
    if evaluation is not None:
        evaluation.server = record.fields["server"]
        evaluation.tried.append(record.fields["server"])


def _evaluated(service: "Service", record: Record, _: float) -> None:
    version, greedy = record.fields["version"], record.fields["greedy"]
    evaluation = service.evaluations.board.open.get(version)
    if evaluation is not None and greedy in evaluation.open_modes:
        evaluation.open_modes.remove(greedy)
    service.evaluations.results.setdefault(version, {})[greedy] = record.location


def _evaluation_closed(service: "Service", record: Record, _: float) -> None:
    board, version = service.evaluations.board, record.fields["version"]
    if version in board.open:
        board.close(version, record.fields["reason"])


def _checkpoint(service: "Service", record: Record, _: float) -> None:
    oldest = min(record.fields["kept"], default=record.fields["step"])
    service.buffer.line.forget(oldest)
    service.evaluations.forget(oldest)


_HANDLERS: dict[str, Callable[["Service", Record, float], None]] = {
    "boot": _check_boot,
    "snapshot": _snapshot,
    "learner": _learner,
    "lease": _lease,
    "release": _release,
    "group": _group,
    "drop": _drop,
    "stale": _stale,
    "take": _take,
    "proceed": _proceed,
    "commit": _commit,
    "diverged": _diverged,
    "evaluate": _evaluate,
    "evaluating": _evaluating,
    "evaluated": _evaluated,
    "evaluation_closed": _evaluation_closed,
    "checkpoint": _checkpoint,
}


# ---- pieces --------------------------------------------------------------------------------------------


class _Seen:
    """Groups of the journal by id: the last accepted answer of a prompt is the one that a batch takes."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, Taken] = {}

    def note(self, record: Record) -> None:
        if record.kind == "group":
            group_id = group_id_of(record.fields["group"])
            self._groups[group_id] = Taken(group_id, record.fields["attempt"], 0, record.location)
        elif record.kind == "snapshot":
            for plain in record.fields["slots"]:
                if plain["location"] is not None:
                    group_id = group_id_of(plain["group"])
                    self._groups[group_id] = Taken(group_id, plain["attempt"], 0, Location.of(plain["location"]))
            for _, _, taken in record.fields["line"]:
                for plain in taken:
                    entry = taken_of(plain)
                    self._groups[entry.group_id] = entry

    def taken(self, group: list[int]) -> Taken | None:
        return self._groups.get(group_id_of(group))


def _load_groups(service: "Service") -> None:
    for slot in service.buffer.slots.values():
        if slot.state is SlotState.BUFFERED and slot.group is None:
            assert slot.location is not None
            slot.group = service.load_group(slot.location)


def _await_servers(service: "Service", now: float) -> None:
    """What servers were working on stays theirs, if they come back in time."""
    leased = [slot for slot in service.buffer.slots.values() if slot.state is SlotState.LEASED]
    for slot in leased:
        # Soon: replay may have died before the server heard of this lease. Its next Renew sets the usual deadline.
        slot.deadline, slot.progress_at = now + service.config.network.silent_after_s, now
    servers = [slot.server for slot in leased] + [e.server for e in service.evaluations.board.open.values()]
    service.missing = {s: now + service.config.network.silent_after_s for s in servers if s is not None}
