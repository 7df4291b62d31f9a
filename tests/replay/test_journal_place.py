"""A journal elsewhere than in the run folder: each run has a folder of its own, which is found, missed and checked."""

import shutil
from pathlib import Path

import pytest

from replay.journal import JournalError, JournalReader, find_journal, place_journal
from replay.main import open_journal
from slipstream.check import checks, machine
from slipstream.launch import earlier_run
from tests.replay.simulated_run import bare_service


@pytest.fixture
def disk(tmp_path):
    """The other disk."""
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def config(folder, disk):
    where = {"run__dir": str(folder), "run__name": "run", "replay__journal_dir": disk and str(disk)}
    return bare_service(replay__fsync="never", **where).config


def write(config, *, recover=False):
    """Kinds of the records that are there before replay starts and ends."""
    journal, records = open_journal(config, "run", recover=recover)
    journal.append("end", {"reason": "", "failed": False})
    journal.close()
    return [record.kind for record in records]


def test_runs_of_one_name_have_folders_of_their_own_that_their_run_folders_lead_to(tmp_path, disk):
    for runs in ("a", "b"):
        assert write(config(tmp_path / runs, disk)) == []
        with pytest.raises(JournalError, match="this run has a journal"):
            write(config(tmp_path / runs, disk))
        assert write(config(tmp_path / runs, disk), recover=True) == ["segment", "end"]
    found = [find_journal(tmp_path / runs / "run") for runs in ("a", "b")]
    assert {path.parent for path in found} == {disk} and len(set(found)) == 2
    for path, runs in zip(found, ("a", "b"), strict=True):
        inside = tmp_path / runs / "run" / "journal"
        assert [r.kind for r in JournalReader(inside).records()] == ["segment", "end", "end"]
        assert [p.name for p in path.iterdir()] == [p.name for p in inside.iterdir()]


def test_a_journal_that_has_vanished_is_named_wherever_it_is_needed(tmp_path, disk):
    made = config(tmp_path / "runs", disk)
    write(made)
    (there,) = disk.iterdir()
    shutil.rmtree(there)
    gone = rf"replay\.journal_dir: {there}, the journal of {made.run_dir}, is gone: mount its disk"
    for recover in (False, True):  # also where a job is begun again and finds nothing of its run
        with pytest.raises(JournalError, match=gone):
            write(made, recover=recover)
    (Path(made.run_dir) / "config.yaml").touch()
    with pytest.raises(JournalError, match=gone):
        earlier_run.played_back(Path(made.run_dir), [])
    (finding,) = checks.found(made, [checks.journal])
    assert finding.severity == "stop" and "is gone: mount its disk" in finding.text
    (Path(made.run_dir) / "journal").unlink()
    assert write(made, recover=True) == [], "what the message says: it goes on from the checkpoint"


@pytest.mark.parametrize("moves", ["in", "out", "on"])
def test_a_journal_stays_where_it_was_begun(tmp_path, disk, moves):
    before, after = {"in": (disk, None), "out": (None, disk), "on": (disk, tmp_path)}[moves]
    write(config(tmp_path / "runs", before))
    with pytest.raises(
        JournalError, match=r"replay\.journal_dir: the journal of .*/run is in .*, not in .*; leave the"
    ):
        write(config(tmp_path / "runs", after), recover=True)
    assert write(config(tmp_path / "runs", before), recover=True) == ["segment", "end"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path, disk):
    """It may be that of a disk that is not mounted."""
    made = config(tmp_path / "runs", disk / "absent")
    with pytest.raises(JournalError, match=r"replay\.journal_dir: .*absent/run-\w+ cannot be made: No such file"):
        place_journal(made.run_dir, made.replay.journal_dir)
    (finding,) = checks.found(made, [checks.journal])
    assert finding.severity == "stop" and "absent': No such file or directory; name a folder" in finding.text


@pytest.mark.parametrize(("free", "severity"), [(1, "stop"), (1 << 30, "warn"), (1 << 40, "ok")])
def test_the_room_of_the_other_disk_is_looked_at(tmp_path, disk, monkeypatch, free, severity):
    there = type("Found", (), {"f_bavail": free, "f_frsize": 1})
    monkeypatch.setattr(machine.os, "statvfs", lambda path: there if path == str(disk) else 1 // 0)
    (finding,) = checks.found(config(tmp_path / "runs", disk), [checks.journal])
    assert finding.severity == severity
    assert list(checks.found(config(tmp_path / "runs", None), [checks.journal])) == []
