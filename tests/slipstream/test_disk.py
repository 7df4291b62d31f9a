"""Lines and files of a run on a disk that fills up: nothing is lost, doubled or torn, and it is said once."""

import json
import logging

import pytest

from slipstream.runtime import disk as disks
from slipstream.runtime.disk import Disk
from tests.support.disks import grow, small_disk


def test_what_finds_no_room_is_written_once_there_is(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(disks, "RETRY_S", 0.01)
    caplog.set_level(logging.INFO)
    with small_disk(tmp_path, "size=64k") as folder:
        (folder / "ballast").write_bytes(bytes(40_000))
        disk, lines = Disk(), [json.dumps({"step": n, "text": "x" * 500}) + "\n" for n in range(100)]
        for line in lines:
            disk.append(folder / "metrics.jsonl", line)
        disk.write(folder / "answers" / "a.jsonl", "answers\n")
        assert not disk.retry()
        written = (folder / "metrics.jsonl").read_text()
        assert 10 < written.count("\n") < 60 and "".join(lines).startswith(written) and written.endswith("\n")
        (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert str(folder) in said.getMessage() and "No space left on device" in said.getMessage()
        disk.settle(lambda: grow(folder))
        assert (folder / "metrics.jsonl").read_text() == "".join(lines)
        assert (folder / "answers" / "a.jsonl").read_text() == "answers\n"
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_other_errors_are_no_full_disk(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        Disk().append(tmp_path / "file" / "metrics.jsonl", "x")
