"""Files of the journal: what was flushed is read back, a torn end is cut, and damage is never taken for one."""

import errno
import fcntl
import logging
import os
import random
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.journal import FolderLock, JournalDamaged, JournalError, JournalReader, JournalWriter, files, writer
from replay.journal.format import FORMAT, HEAD, MAGIC, pack, path_of, segments
from tests.replay.journal_files import Books, a_journal, entries, entry, flush, frames_of, group, opened, same


def first_file(folder: Path) -> Path:
    return path_of(folder, 1)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), flushes=st.lists(st.integers(0, 5), max_size=6), small=st.booleans())
def test_what_was_flushed_is_read_back_in_order(tmp_path_factory, seed, flushes, small):
    folder, rng = tmp_path_factory.mktemp("journal"), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SEGMENT_BYTES", 300 if small else 1 << 20)
        patch.setattr(files, "MAX_BUFFERS", rng.choice([1, 2, 512]))
        books = Books(JournalWriter(folder, "run", fsync="never"))
        for count in flushes:
            for _ in range(count):
                place = books.append(*entry(rng, len(books.entries), tokens=rng.choice([1, 2, 3000])))
                if place.sizes:
                    assert same(books.writer.read(place), books.entries[-1][2]), "before it is written"
            flush(books.writer)
        for place, (_, _, frames) in zip(books.places, books.entries, strict=True):
            if frames:
                assert same(books.writer.read(place), frames) and same(JournalReader(folder).read(place), frames)
        assert entries(folder) == books.entries
        numbers = [record.number for record in JournalReader(folder).records()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert books.writer.size_bytes >= sum(path_of(folder, s).stat().st_size for s in segments(folder))
        books.writer.close()


def test_every_prefix_of_a_file_reads_as_a_prefix_and_can_be_written_on(tmp_path, caplog):
    written = a_journal(tmp_path / "whole")
    data = first_file(tmp_path / "whole").read_bytes()
    seen, folder = set(), tmp_path / "cut"
    folder.mkdir()
    caplog.set_level(logging.CRITICAL)
    for end in range(len(data) + 1):
        first_file(folder).write_bytes(data[:end])
        made, found = opened(folder)
        assert found == written[: len(found)]
        made.append("drop", {"group": [0, end], "reason": "test"})
        flush(made)
        made.close()
        assert entries(folder) == [*found, ("drop", {"group": [0, end], "reason": "test"}, [])]
        first = next(JournalReader(folder).records())
        assert (first.kind, first.number, first.fields["number"]) == ("segment", 1, 1)
        seen.add(len(found))
    assert seen == set(range(len(written) + 1))


def test_a_torn_end_is_named_with_its_size(tmp_path, caplog):
    a_journal(tmp_path)
    with first_file(tmp_path).open("ab") as file:
        file.write(MAGIC + b"\x10")
    assert JournalReader(tmp_path).newest_snapshot() is None
    reader = JournalReader(tmp_path)
    list(reader.records())
    assert reader.torn_bytes == 5 and "000001.seg: the last 5 bytes are a torn record" in caplog.text
    assert first_file(tmp_path).stat().st_size == reader.end + 5, "only one who writes on cuts"
    list(reader.records(cut=True))
    assert first_file(tmp_path).stat().st_size == reader.end


def test_a_record_in_the_text_of_a_torn_group_is_part_of_it(tmp_path):
    """What a model answers may look like anything, and must not make a torn end look like damage."""
    made = JournalWriter(tmp_path, "run", fsync="never")
    made.append("lease", {"group": [0, 0]})
    flush(made)
    looks_like = pack("commit", 9, {"step": 9}, ())
    frames = [*frames_of(group(0, tokens=500)), looks_like + bytes(100)]
    made.append("group", {"group": [0, 0]}, frames)
    flush(made)
    data = first_file(tmp_path).read_bytes()
    first_file(tmp_path).write_bytes(data[:-50])
    assert [kind for kind, *_ in entries(tmp_path, cut=True)] == ["lease"]


HUGE = msgpack.packb(["group", 9, {}, [1 << 60]])  # more than a file or memory holds


@pytest.mark.parametrize("meta", [b"\xc1", b"\x93\x01\x02\x03", b"\x94\x01\x02\x03\x04", b"", b"\x91" * 3000, HUGE])
def test_bytes_that_only_look_like_a_record_are_none(tmp_path, meta):
    written = a_journal(tmp_path)
    with first_file(tmp_path).open("ab") as file:
        file.write(b"torn" + HEAD.pack(MAGIC, len(meta), zlib.crc32(meta)) + meta)
    assert entries(tmp_path, cut=True) == written == entries(tmp_path)


def test_every_flipped_byte_is_found(tmp_path, caplog):
    written = a_journal(tmp_path / "whole")
    path = first_file(tmp_path / "whole")
    data, records = path.read_bytes(), list(JournalReader(tmp_path / "whole").records())
    last = records[-2].location.end
    folder, rng = tmp_path / "flipped", random.Random(1)
    folder.mkdir()
    caplog.set_level(logging.CRITICAL)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        first_file(folder).write_bytes(flipped)
        if position >= last:  # nothing whole follows
            assert entries(folder) == written[:-1]
            continue
        with pytest.raises(JournalDamaged, match=r"000001\.seg: byte \d+: no whole record there although record") as e:
            entries(folder, cut=True)
        start = max((r.location.end for r in records if r.location.end <= position), default=0)
        assert f"byte {start}:" in str(e.value) and "--resume" in str(e.value)
        assert first_file(folder).read_bytes() == flipped, "nothing is cut"


@pytest.mark.parametrize("bytes_visible", [0, 7])
def test_a_journal_that_is_written_on_meanwhile_is_read_as_it_was(tmp_path, caplog, bytes_visible):
    """A plan, a hint about the split or a playback read beside a run."""
    books = Books(JournalWriter(tmp_path, "run", fsync="never"))
    for number in range(3):
        books.append(*entry(random.Random(number), number))
    flush(books.writer)
    size = first_file(tmp_path).stat().st_size
    with first_file(tmp_path).open("ab") as file:
        file.write((MAGIC * 2)[:bytes_visible])  # of a record that is being written
    reader, found = JournalReader(tmp_path), []
    for record in reader.records():
        found.append(record)
        if len(found) == 1:
            os.truncate(first_file(tmp_path), size)
            for number in range(3, 6):
                books.append(*entry(random.Random(number), number))
            flush(books.writer)
    assert [record.number for record in found] == [1, 2, 3, 4] and reader.torn_bytes == bytes_visible
    books.writer.close()


def test_missing_first_files_are_missed_unless_a_snapshot_takes_their_place(tmp_path):
    made = JournalWriter(tmp_path, "run", fsync="never")
    made.begin_segment()
    made.append("lease", {"group": [0, 0]})
    flush(made)
    first_file(tmp_path).unlink()
    with pytest.raises(JournalDamaged, match=r"000002\.seg: the journal begins with this file"):
        JournalReader(tmp_path).newest_snapshot()
    made.begin_segment()
    made.append("snapshot", {"version": 4})
    made.close()
    assert JournalReader(tmp_path).newest_snapshot() == 3


def no_journal(folder):
    path_of(folder, 2).unlink()
    first_file(folder).write_bytes(b"SJR2" + bytes(60))


SPOILED = {
    "missing": (lambda f: path_of(f, 2).rename(path_of(f, 3)), r"000002\.seg: this file of the journal is missing"),
    "renamed": (lambda f: path_of(f, 2).replace(path_of(f, 1)), r"000001\.seg: begins with 'segment' of file 2"),
    "cut": (lambda f: os.truncate(first_file(f), first_file(f).stat().st_size - 1), r"byte \d+: .* other files follow"),
    "format": (
        lambda f: first_file(f).write_bytes(pack("segment", 1, {"format": 2, "number": 1, "run_id": "r"}, ())),
        rf"000001\.seg: format 2, this version reads {FORMAT}",
    ),
    "other": (lambda f: first_file(f).write_bytes(b"SJR2" + bytes(60)), "byte 0: no whole record there although other"),
    "no journal": (no_journal, r"000001\.seg: byte 0: no record begins like that"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_journal_that_cannot_be_used_is_refused_by_file_and_not_cut(tmp_path, case):
    spoil, says = SPOILED[case]
    a_journal(tmp_path)
    made, _ = opened(tmp_path)
    made.begin_segment()
    made.close()
    spoil(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(JournalError, match=says):
        entries(tmp_path, cut=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_message_that_is_needed_and_damaged_is_named(tmp_path):
    books = Books(JournalWriter(tmp_path, "run", fsync="never"))
    place = books.append("group", {"group": [0, 0]}, frames_of(group(0)))
    flush(books.writer)
    data = bytearray(first_file(tmp_path).read_bytes())
    data[-1] ^= 1
    first_file(tmp_path).write_bytes(data)
    with pytest.raises(JournalDamaged, match=rf"000001\.seg: byte {place.offset}: .* checksum"):
        books.writer.read(place)
    first_file(tmp_path).unlink()
    with pytest.raises(JournalDamaged, match=r"000001\.seg: .* cannot be read: No such file"):
        JournalReader(tmp_path).read(place)


@pytest.mark.parametrize("fsync", ["every", "interval", "never"])
def test_files_that_are_released_go_once_what_was_appended_is_on_the_disk(tmp_path, fsync):
    books = Books(JournalWriter(tmp_path, "run", fsync=fsync))
    old = books.append("group", {"group": [0, 0]}, frames_of(group(0)))
    books.writer.begin_segment()
    kept = books.append("group", {"group": [0, 1]}, frames_of(group(1)))
    flush(books.writer)
    books.writer.begin_segment()
    before = books.writer.size_bytes
    books.writer.append("snapshot", {"version": 1})
    books.writer.release(2)
    assert not books.writer.write()
    assert segments(tmp_path) == [1, 2], "until then a crash must find what the snapshot replaces"
    assert JournalReader(tmp_path).newest_snapshot() is None
    flush(books.writer)
    if fsync == "interval":
        assert segments(tmp_path) == [1, 2, 3], "a power failure may take the snapshot"
        books.writer.sync()
        books.writer.write()
    assert segments(tmp_path) == [2, 3] and books.writer.size_bytes < before
    assert JournalReader(tmp_path).newest_snapshot() == 3
    assert same(books.writer.read(kept), frames_of(group(1)))
    with pytest.raises(JournalDamaged, match="No such file"):
        books.writer.read(old)
    books.writer.close()


def test_the_newest_whole_snapshot_counts(tmp_path):
    made = JournalWriter(tmp_path, "run", fsync="never")
    assert JournalReader(tmp_path).newest_snapshot() is None
    for version in (1, 2, 3):
        made.begin_segment()
        made.append("snapshot", {"version": version})
    made.begin_segment()
    made.append("lease", {"group": [0, 0]})
    made.append("snapshot", {"version": 9})  # not at the beginning of its file
    made.close()
    assert JournalReader(tmp_path).newest_snapshot() == 4
    path_of(tmp_path, 5).unlink()
    torn = path_of(tmp_path, 4)
    torn.write_bytes(torn.read_bytes()[:-1])
    reader = JournalReader(tmp_path)
    assert reader.newest_snapshot() == 3
    assert [r.fields["version"] for r in reader.records(3, cut=True) if r.kind == "snapshot"] == [2]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for make in (FolderLock, lambda folder: JournalWriter(folder, "run", fsync="never")):
        with pytest.raises(JournalError, match=r"file/journal: the journal cannot be written: Not a directory"):
            make(tmp_path / "file" / "journal")


def test_a_file_system_without_locks_is_warned_of_and_used(tmp_path, monkeypatch, caplog):
    def no_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    FolderLock(tmp_path).close()
    assert "its file system has no locks; start no second replay" in caplog.text
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat(tmp_path / "gone"))
    with pytest.raises(JournalError, match="the journal cannot be written: No such file"):
        FolderLock(tmp_path)
