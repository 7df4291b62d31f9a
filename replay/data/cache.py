"""A folder of what is made of large data files once, and read again by every later start.

An entry is named after its file's place, size, inode and times of change, so whatever was written to a file since makes
another entry. What is in it is derived: it may be deleted at any time between two runs.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

from replay.data.rows import DataError

SCHEMA = 1
META = "meta.json"
MAKING = "making-"
"""Begins the name of a folder that is not whole yet; host and pid of its maker follow."""

Make = Callable[[Path], dict[str, Any]]
"""Writes the files of an entry into a folder; what it returns stands in meta.json."""


class Entry:
    """A folder of the cache, whole, and its meta.json."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/slipstream/data`, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "data"


def entry_for(folder: Path | None, file: Path, kind: str, make: Make) -> Entry:
    """The entry of a file, made where it is not there.

    Several processes may come at once: each makes its own, and the first that is whole counts.

    Args:
        folder: of the cache (data.cache); None takes the default.
        file: what the entry is derived from.
        kind: what is derived; it stands in the entry's name.
        make: see Make. What it raises is raised.

    Raises:
        DataError: the cache cannot be written.
    """
    root = folder or default_folder()
    status, path = file.stat(), str(file.resolve())
    place = blake2b(path.encode(), digest_size=8).hexdigest()
    seen = (SCHEMA, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    state = blake2b(repr(seen).encode(), digest_size=8).hexdigest()
    target = root / f"{kind}-{place}-{state}"
    if (found := _read(target)) is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(root)
        mine = f"{MAKING}{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(dir=root, prefix=mine, ignore_cleanup_errors=True) as made:
            meta = make(Path(made)) | {"file": path}
            (Path(made) / META).write_text(json.dumps(meta), encoding="utf-8")
            if not target.exists():
                Path(made).rename(target)
    except OSError as error:
        if (found := _read(target)) is not None:  # another process was first
            return found
        raise DataError(
            f"data.cache: {root}: cannot be written ({error.strerror or error}), and {file} needs an index there; name"
            " a folder with room that this user may write to"
        ) from error
    for old in root.glob(f"{kind}-{place}-*"):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)  # of an earlier state of the file; who reads it holds it open
    entry = _read(target)
    if entry is None:
        raise DataError(f"data.cache: {target} is broken; delete it")
    return entry


def _remove_left_behind(root: Path) -> None:
    """Delete what processes of this host were making when they were killed."""
    for left in root.glob(f"{MAKING}{socket.gethostname()}-*"):
        pid = left.name.rsplit("-", 2)[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _read(target: Path) -> Entry | None:
    try:
        return Entry(target, json.loads((target / META).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise DataError(f"data.cache: {target / META} is not readable as JSON ({error}); delete {target}") from error
