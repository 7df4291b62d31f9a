"""ledger.jsonl of a run: what each step was trained on, one line a step, in the order in which steps were made.

    {"step": 12, "incarnation": 1, "digest": "f153...", "groups": [[0, 176], [0, 177]]}

After a crash the steps since the checkpoint are made again: they have two lines, of which the last counts. Where replay
gave the digest that its journal has, the line holds it as `expected`. Imports no torch.
"""

import json
import os
from pathlib import Path
from typing import Any

from slipstream.runtime.disk import Disk

FILE = "ledger.jsonl"


class Ledger:
    """Rank 0 appends a line after each step."""

    def __init__(self, run_dir: str | Path, *, resume_version: int | None, disk: Disk | None = None) -> None:
        """Open the ledger of a run that begins, or goes on from a version; it is written through `disk`."""
        self._path, self._disk = Path(run_dir) / FILE, disk or Disk()
        self._trained: set[tuple[int, int]] = set()
        self._trained_twice = 0
        if resume_version is not None:
            lines = read(run_dir)
            if self._path.exists():  # a torn last line is cut off: its step is above the checkpoint's
                os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
            surviving = {line["step"]: line["groups"] for line in lines if line["step"] <= resume_version}
            self._trained = {(pass_, index) for groups in surviving.values() for pass_, index in groups}

    def append(self, step: int, groups: list[list[int]], *, incarnation: int, digest: str, expected: str) -> int:
        """Append a step; returns how many groups were trained twice so far (always 0)."""
        for pass_, index in groups:
            self._trained_twice += (pass_, index) in self._trained
            self._trained.add((pass_, index))
        line = {"step": step, "incarnation": incarnation, "digest": digest, "groups": groups}
        if expected:
            line["expected"] = expected
        self._disk.append(self._path, json.dumps(line) + "\n")
        return self._trained_twice


def last_step(run_dir: str | Path) -> int:
    """The newest step that a run has trained; 0 for none."""
    return max((line["step"] for line in read(run_dir)), default=0)


def read(run_dir: str | Path) -> list[dict[str, Any]]:
    """The whole lines, oldest first; none where the run has no ledger yet."""
    path = Path(run_dir) / FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
