"""Journals for tests: small groups, what was appended, and what a reader finds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay import messages as m
from replay.channel.frames import encode
from replay.journal import JournalFull, JournalReader, JournalWriter, Location
from replay.journal.files import Fsync
from replay.journal.format import path_of
from tests.replay.simulation.samples import make_group

Entry = tuple[str, dict[str, Any], list[bytes]]


def group(index: int, *, tokens: int = 2) -> m.Group:
    """A group of one answer; its tokens depend on its index."""
    rng = np.random.default_rng(index)
    token_ids, logprobs = rng.integers(0, 50, tokens, dtype=np.int32), -rng.random(tokens, dtype=np.float32)
    return make_group([tokens], index=index, token_ids=token_ids, logprobs=logprobs)


def frames_of(message: m.Message) -> list[bytes]:
    """A message as it comes from the wire."""
    return [bytes(frame) for frame in encode(message, "run", 7)]


def entry(rng: random.Random, index: int, *, tokens: int = 2) -> Entry:
    """Something that replay would append."""
    if rng.random() < 0.5:
        return "lease", {"group": [0, index], "attempt": 1, "min_version": 0, "server": "s" * rng.randrange(20)}, []
    return "group", {"group": [0, index], "attempt": 1, "server": "s"}, frames_of(group(index, tokens=tokens))


@dataclass
class Books:
    """A writer, and what it was given: every record that must be found, in order."""

    writer: JournalWriter
    entries: list[Entry] = field(default_factory=list)
    places: list[Location] = field(default_factory=list)

    def append(self, kind: str, fields: dict[str, Any], frames: list[bytes]) -> Location:
        self.entries.append((kind, fields, frames))
        self.places.append(self.writer.append(kind, fields, frames))
        return self.places[-1]


def flush(writer: JournalWriter) -> None:
    """Have what was appended written, as the writing thread does. Raises JournalError."""
    writer.submit()
    while writer.write():
        writer.submit()  # from now on it is read from the file


def opened(folder: Path, fsync: Any = "never") -> tuple[JournalWriter, list[Entry]]:
    reader = JournalReader(folder)
    found = entries(folder, reader, cut=True)
    return JournalWriter(folder, "run", fsync=fsync, after=reader), found


def entries(folder: Path, reader: JournalReader | None = None, *, cut: bool = False) -> list[Entry]:
    """What a reader finds, without the records that the writer adds by itself."""
    reader = reader or JournalReader(folder)
    found = []
    for record in reader.records(cut=cut):
        if record.kind in ("segment", "synced"):
            continue
        data = path_of(folder, record.location.segment).read_bytes()
        frames, start = [], record.location.offset
        for size in record.location.sizes:
            frames.append(data[start : start + size])
            start += size
        found.append((record.kind, record.fields, frames))
    return found


def a_journal(folder: Path, seed: int = 0, count: int = 4) -> list[Entry]:
    """A journal of one file, as a process leaves it that is killed."""
    rng = random.Random(seed)
    books = Books(JournalWriter(folder, "run", fsync="never"))
    for index in range(count):
        books.append(*entry(rng, index))
        flush(books.writer)
    return books.entries


def same(message: m.Message, frames: list[bytes]) -> bool:
    """Whether a message that was read is the one that was appended."""
    return frames_of(message) == frames


def fill_up(folder: Path, fsync: Fsync, make_room: Callable[[], object]) -> None:
    """Write until the disk is full, go on when there is room again; nothing is lost, and no half record is left."""
    rng, books, flushed = random.Random(0), Books(JournalWriter(folder, "run", fsync=fsync)), 0
    with pytest.raises(JournalFull, match=r"000001\.seg: .*free space"):
        while True:
            books.append(*entry(rng, flushed, tokens=rng.choice([2, 900])))
            flush(books.writer)
            flushed += 1
    assert flushed > 3
    assert entries(folder) == books.entries[:flushed], "the file ends with a whole record"
    place = books.append("group", {"group": [0, flushed + 1]}, frames_of(group(flushed + 1, tokens=9000)))
    for _ in range(3):
        with pytest.raises(JournalFull):
            flush(books.writer)
    assert entries(folder) == books.entries[:flushed]
    assert same(books.writer.read(place), books.entries[-1][2]), "what waits for the disk can be read"
    make_room()
    flush(books.writer)
    assert entries(folder) == books.entries, "nothing is lost"
    books.append(*entry(rng, 0))
    books.writer.close()
    assert entries(folder) == books.entries
