"""Playback (`--replay`): the batches of another run's journal, in their order, without engines."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from replay.journal import Journal, JournalError, JournalReader, Location, Record
from replay.journal.apart import read_apart
from replay.messages import EvaluationResult, Group
from replay.state.apply import check_boot
from replay.state.leases import GroupId
from replay.state.line import LineStep, PolicyLine, TakenGroup
from replay.state.run import RunState
from replay.state.snapshot import group_id_of, line_from

log = logging.getLogger(__name__)


def play(run: RunState, journal: "PlayedJournal", run_dir: Path) -> None:
    """Give a new run the whole line of policies of a journal.

    Raises JournalError: there is no journal, it is of other settings, or it does not reach back to step 1.
    """
    whole_line(run, journal.records())
    line = run.buffer.line
    if not line.steps or not line.reaches(0) or min(line.steps) != 1:
        found = f"steps {min(line.steps)} to {line.last}" if line.steps else "no step"
        raise JournalError(
            f"{run_dir}/journal: it holds {found}, and --replay needs all from step 1 on; a run with"
            " replay.journal_keep=all keeps them"
        )
    log.info("replay: plays the %d steps of %s/journal", line.last, run_dir)


def whole_line(run: RunState, records: Iterable[Record]) -> None:
    """The line of policies from the first file on; steps without a commit are left out."""
    line, found = run.buffer.line, dict[GroupId, TakenGroup]()
    for record in records:
        if record.kind == "boot":
            check_boot(run, record)
        found |= _groups(record)
        _note(line, record, found)
    for step in [step for step, made in line.steps.items() if not made.digest]:
        del line.steps[step]


def _note(line: PolicyLine, record: Record, found: dict[GroupId, TakenGroup]) -> None:
    fields = record.fields
    if record.kind == "snapshot" and not line.steps and line.initial is None:
        line_from(line, fields)
    elif record.kind == "learner":
        line.initial = line.initial or (fields["version"], fields["digest"])
    elif record.kind == "take" and fields["step"] not in line.steps:  # a resumed learner takes the same batch again
        taken = [group_id_of(group) for group in fields["groups"]]
        if all(group_id in found for group_id in taken):
            line.steps[fields["step"]] = LineStep([found[g] for g in taken], fields["async_lag"], fields["masked"])
    elif record.kind == "diverged":
        line.correct(fields["step"], fields["found"])
        for step in line.ahead(fields["step"]):
            del line.steps[step]
    elif record.kind == "commit" and fields["step"] in line.steps:
        line.steps[fields["step"]].digest = fields["digest"]


def _groups(record: Record) -> dict[GroupId, TakenGroup]:
    """Groups that a record names: the last accepted answer of a prompt is the one that a batch takes."""
    if record.kind == "group":
        group_id = group_id_of(record.fields["group"])
        return {group_id: TakenGroup(group_id, record.fields["attempt"], 0, record.location)}
    if record.kind != "snapshot":
        return {}
    slots = [plain for plain in record.fields["slots"] if plain["location"] is not None]
    found = [TakenGroup(group_id_of(p["group"]), p["attempt"], 0, Location.of(p["location"])) for p in slots]
    line = PolicyLine()
    line_from(line, record.fields)
    found += line.groups_ahead(0)
    return {entry.group_id: entry for entry in found}


class PlayedJournal(Journal):
    """The journal of another run, to be read only; nothing is written."""

    def __init__(self, folder: Path) -> None:
        self._reader = JournalReader(folder)

    def records(self) -> Iterator[Record]:
        """All records, from the first file on. Raises JournalError."""
        return self._reader.records()

    def read(self, location: Location) -> Group | EvaluationResult:
        return self._reader.read(location)

    def whole(self, group: Group) -> Group:
        return read_apart(self._reader.folder, group) if group.routing_place else group
