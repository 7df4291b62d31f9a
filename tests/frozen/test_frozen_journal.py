"""A journal of today's format gives back its state; `python -m tests.frozen.test_frozen_journal` writes it anew."""

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from replay import messages as m
from replay.journal import JournalReader, JournalWriter
from replay.journal.format import FORMAT
from replay.service import Service
from replay.state.apply import boot_fields
from tests.replay.simulated_run import bare_service, finishes, joins, learner, lease, make_step
from tests.replay.simulation.world import comparable

FILE = Path(__file__).parent / "journal.json"
OPTIONS = {"replay__async_lag": 2}


def state_of(service: Service) -> dict[str, Any]:
    """What must survive, as JSON has it; not the keys that decide weights, which are today's and grow."""
    state = dict(json.loads(json.dumps(comparable(service), default=str, sort_keys=True)))
    del state["run"]["deciding"]
    return state


def test_the_frozen_journal_gives_back_its_state(tmp_path: Path) -> None:
    frozen = json.loads(FILE.read_text())
    for name, data in frozen["files"].items():
        (tmp_path / name).write_bytes(base64.b64decode(data))
    reader = JournalReader(tmp_path)
    service = bare_service(evaluated=2, **OPTIONS)
    service.journal.read = reader.read
    service.restore(list(reader.records(reader.newest_snapshot())), 0.0)
    assert (frozen["format"], state_of(service)) == (FORMAT, frozen["state"])


def write() -> None:
    """Steps, a checkpoint, an evaluation, groups here, leases that run and one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        journal = JournalWriter(Path(folder), "frozen", fsync=False)
        made = bare_service(journal, evaluated=2, **OPTIONS)
        journal.append("boot", boot_fields(made.config, made.run.source.state(), 1))
        learner(made, "l")
        joins(made, "a")
        for step in (1, 2):
            make_step(made, step, versions=[step - 1])
        made.handle("l", m.Checkpointed(step=1, kept=[1]), 1.0)
        made.handle("l", m.Evaluate(version=2), 1.0)
        finishes(made, 2, [2])
        running = lease(made, version=2, capacity=3)
        failed = {"pass_": running[0].pass_, "index": running[0].index, "attempt": 1, "reason": "engine_error"}
        made.handle("a", m.Cancel(**failed), 1.0)
        made.handle("l", m.Take(step=3, rank=0), 1.0)
        journal.close()
        files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(Path(folder).glob("*.seg"))}
        FILE.write_text(json.dumps({"format": FORMAT, "files": files, "state": state_of(made)}) + "\n")


if __name__ == "__main__":
    sys.exit(write())
