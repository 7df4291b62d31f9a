"""The index of a run's trajectories in the user's cache, so that a second look needs no second reading.

The run folder itself stays as it is. A cache that cannot be read or written costs time and nothing else.
"""

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

FORMAT = 1
Key = tuple[str, int, int]
"""File in the run folder, its size and its modification time in ns."""
Array = np.ndarray[Any, Any]


class KeptIndex:
    """One file of arrays for a run folder."""

    def __init__(self, folder: Path, columns: np.dtype[Any]) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:24]
        self.path = base / "slipstream" / "dashboard" / f"{name}.npz"
        self.columns = columns
        self._layout = json.dumps([FORMAT, str(folder), columns.descr])

    def load(self) -> dict[Key, Array]:
        """Rows by file; empty where there is no index of this layout."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                if str(stored["layout"]) != self._layout:
                    return {}
                keys, counts, rows = json.loads(str(stored["keys"])), stored["counts"], stored["rows"]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            log.warning("%s: not used, the index is built anew: %s", self.path, error)
            return {}
        if rows.dtype != self.columns or int(counts.sum()) != len(rows) or len(keys) != len(counts):
            return {}
        parts = np.split(rows, np.cumsum(counts)[:-1]) if keys else []
        return {(str(name), int(size), int(time)): part for (name, size, time), part in zip(keys, parts, strict=True)}

    def save(self, parts: Mapping[Key, Array]) -> None:
        """Replace the file; a failure is logged."""
        beside = self.path.with_suffix(f".{os.getpid()}.new.npz")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            np.savez(
                beside,
                layout=np.array(self._layout),
                keys=np.array(json.dumps(list(parts))),
                counts=np.array([len(rows) for rows in parts.values()], np.int64),
                rows=np.concatenate([np.zeros(0, self.columns), *parts.values()]),
            )
            beside.replace(self.path)
        except OSError as error:
            log.warning("%s: the index of trajectories is not kept: %s", self.path, error)
