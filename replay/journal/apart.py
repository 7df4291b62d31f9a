"""Routing, which the journal keeps apart: it is some thirty times as many bytes as all else of a group.

    runs/NAME/journal/routing/000001.ids, ...      of the groups in 000001.seg

The bytes of a group are on the disk before its record is written (with replay.fsync `never`: they are written), and so
as durable as it. The record has their place and a sum of each sample (replay/routing.py). A file goes with the one of
the journal that it belongs to.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from replay.journal.files import Fsync, journal_error, sync_folder
from replay.journal.format import JournalDamaged, path_apart
from replay.messages import Group


def size_apart(folder: Path, segment: int) -> int:
    """Bytes of a file; 0 where there is none."""
    path = path_apart(folder, segment)
    return path.stat().st_size if path.exists() else 0


def write_apart(folder: Path, segment: int, offset: int, data: bytes | memoryview, fsync: Fsync) -> None:
    """Write bytes at their place, durably. Raises JournalError; to try again does no harm."""
    path = path_apart(folder, segment)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if fsync == "never" else os.O_DSYNC)
    try:
        path.parent.mkdir(exist_ok=True)
        file = os.open(path, flags, 0o644)
        try:
            if not offset and fsync != "never":  # as segments are made: the name is to outlive the machine, too
                sync_folder(path.parent)
                sync_folder(folder)
            left = memoryview(data)
            while left:
                written = os.pwrite(file, left, offset)
                left, offset = left[written:], offset + written
        finally:
            os.close(file)
    except OSError as error:
        raise journal_error(error, path, f"{len(data)} bytes of routing cannot be written") from error


def read_apart(folder: Path, group: Group) -> Group:
    """A group with its routing. Raises JournalDamaged: it is not there whole."""
    segment, offset, size, of_prompts = group.routing_place
    path = path_apart(folder, segment)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size + of_prompts)
    except OSError as error:
        raise _damaged(path, group, error.strerror or "") from error
    if len(data) != size + of_prompts:
        raise _damaged(path, group, f"{len(data)} of {size + of_prompts} bytes are there")
    return whole(group, data)


def whole(group: Group, data: bytes | memoryview) -> Group:
    """A group with these bytes, of its tokens and then of its prompts."""
    ids, size = np.frombuffer(data, np.uint8), group.routing_place[2]
    return replace(group, routing=ids[:size], prompt_routing=ids[size:], routing_place=[])


def _damaged(path: Path, group: Group, why: str) -> JournalDamaged:
    name = (group.pass_, group.index)
    return JournalDamaged(f"{path}: byte {group.routing_place[1]}: the routing of group {name} is missing: {why}")
