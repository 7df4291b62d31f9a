"""Journals that commit a694bf1 wrote give back the state that a694bf1 restored from them."""

import base64
import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from configs import Config
from configs.loading import load
from replay.journal import JournalReader, Location, Record
from replay.journal.snapshot import snapshot_of
from replay.prompts import PromptSource, load_rows
from replay.service import Service
from tests.replay.simulation.journal import MemoryJournal
from tests.replay.simulation.world import NOT_JOURNALED, rows

FROZEN = Path(__file__).parent


def state_of(service: Service) -> dict[str, Any]:
    """What must survive, in the words of the frozen files."""
    buffer, line = service.buffer, service.buffer.line
    board, counters = service.evaluations.board, snapshot_of(service.run)["counters"]
    slots = sorted(buffer.slots.values(), key=lambda slot: slot.group_id)
    return {
        "version": buffer.version,
        "incarnation": service.incarnation,
        "published": service.run.policies.published,
        "line": {str(step): made.digest for step, made in sorted(line.steps.items())},
        "trained": {
            str(step): [list(taken.group_id) for taken in made.groups] for step, made in sorted(line.steps.items())
        },
        "slots": [[*s.group_id, s.state.name, s.attempt, s.min_version, s.server] for s in slots],
        "again": [list(group) for group in service.run.again],
        "cursor": service.run.source.state(),
        "initial": list(line.initial) if line.initial else None,
        "evaluations": {
            "open": sorted(board.open),
            "closed": {str(version): reason for version, reason in board.closed.items()},
            "results": sorted(board.results),
        },
        "counters": {k: n for k, n in counters.items() if n and not k.startswith(NOT_JOURNALED)},
    }


FROZEN_RUNS = json.loads(gzip.decompress((FROZEN / "journals.json.gz").read_bytes()))


@pytest.mark.parametrize("frozen", FROZEN_RUNS, ids=lambda frozen: f"seed{frozen['seed']}")
def test_a_simulated_journal_gives_back_its_state(frozen: dict[str, Any]) -> None:
    journal = MemoryJournal()
    journal._frames = {
        tuple(place[:2]): [base64.b64decode(frame) for frame in each] for place, each in frozen["frames"]
    }
    records = [Record(kind, n, fields, Location.of(place)) for kind, n, fields, place, _ in frozen["records"]]
    source = PromptSource(rows(frozen["rows"]), shuffle=True, seed=frozen["seed"])
    config = Config.model_validate(frozen["config"])
    service = Service(config, source, {"": rows(2)}, 0.0, journal=journal)
    service.restore(records, 0.0)
    found, wanted = state_of(service), frozen["state"]
    assert {key: found[key] for key in wanted} == wanted


def test_the_journal_of_a_killed_run_gives_back_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(FROZEN / "runs_a694bf1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    config = load("runs/killed/config.yaml")
    source = PromptSource(load_rows(config.data.train), shuffle=config.data.shuffle, seed=config.run.seed)
    reader = JournalReader(Path("runs/killed/journal"))
    journal = MemoryJournal()
    monkeypatch.setattr(journal, "read", reader.read)
    service = Service(config, source, {"": load_rows(str(config.data.eval))}, 0.0, journal=journal)
    service.restore(list(reader.records(reader.newest_snapshot())), 0.0)
    found, wanted = state_of(service), json.loads((FROZEN / "killed_state.json").read_text())
    awaited = wanted.pop("servers_awaited")
    assert {key: found[key] for key in wanted} == wanted
    assert sorted(service.missing) == awaited
