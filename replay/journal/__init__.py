"""The journal: every decision of replay, written before anybody hears of it. Torch-free.

    runs/NAME/journal/000001.seg, 000002.seg, ...      or elsewhere (`place`)

`format` is the bytes of a record, `writer` appends and has threads that write and sync the `files`, `reader` finds what
is there and tells a torn end from damage; `apply` turns records back into the state that wrote them. docs/protocol.md
is the page about it.
"""

from replay.journal.files import FolderLock, JournalFull, JournalReadOnly
from replay.journal.format import JournalDamaged, JournalError, Location, Record
from replay.journal.place import check_place, find_journal, place_journal
from replay.journal.reader import JournalReader
from replay.journal.writer import Journal, JournalWriter

__all__ = [
    "FolderLock",
    "Journal",
    "JournalDamaged",
    "JournalError",
    "JournalFull",
    "JournalReadOnly",
    "JournalReader",
    "JournalWriter",
    "Location",
    "Record",
    "check_place",
    "find_journal",
    "place_journal",
]
