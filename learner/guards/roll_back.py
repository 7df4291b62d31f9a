"""Roll-backs: rank 0 records one, the ranks end, the next incarnation performs it.

    runs/<name>/checkpoints/roll_back.json     {"count": 1, "first_bad": 9, "step": 12, "reason": "..."}

`first_bad` is the first step that broke the rule: checkpoints from it on are set aside, and what replay holds of later
policies goes (Hello with `rolls_back`). Then it is 0. Until then every start carries it out, whatever dies meanwhile.
"""

import json
import logging
from pathlib import Path
from typing import Any

from configs.errors import SlipstreamError
from learner.checkpoints.folders import MARK, numbered, replace_json, resumable, step_of

log = logging.getLogger(__name__)

FILE = "roll_back.json"
ASIDE = "rolled_back"


class RollBack(SlipstreamError, RuntimeError, code="SLIP-GUARD-07"):
    """The run goes on from an earlier checkpoint: this incarnation of the learner ends."""


class RollBacks:
    """Those of one run, as rank 0 notes them."""

    def __init__(self, run_dir: str | Path) -> None:
        self._checkpoints = Path(run_dir) / "checkpoints"
        self._path = self._checkpoints / FILE

    @property
    def count(self) -> int:
        """Decided so far."""
        return int(self._read()["count"])

    @property
    def pending(self) -> int:
        """First bad step of one that is not carried out yet; 0 without."""
        return int(self._read()["first_bad"])

    def target(self, first_bad: int) -> int:
        """Version of the newest whole checkpoint before a step, 0 for the initial model where there is no checkpoint
        at all, -1 for none: the journal begins at the oldest whole one, and those of weights alone are older."""
        whole = [step_of(folder) for folder in numbered(self._checkpoints) if resumable(folder)]
        return max((step for step in whole if step < first_bad), default=-1 if whole else 0)

    def note(self, first_bad: int, *, step: int, reason: str) -> None:
        """Have the next start roll back."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        replace_json(self._path, {"count": self.count + 1, "first_bad": first_bad, "step": step, "reason": reason})

    def set_aside(self) -> None:
        """Rename the checkpoints from the first bad step on, so that none of them is loaded.

        What a kill has left half written stays, and is deleted by the resume that follows.
        """
        for folder in numbered(self._checkpoints):
            if step_of(folder) >= self.pending and (folder / MARK).exists():
                aside = folder.with_name(f"{folder.name}.{ASIDE}_{self.count}")
                folder.rename(aside)
                log.warning("checkpoint %s is of a policy that is rolled back: now %s", folder.name, aside.name)

    def done(self) -> None:
        """It is carried out: replay has it in its journal."""
        replace_json(self._path, self._read() | {"first_bad": 0})

    def _read(self) -> dict[str, Any]:
        nothing = {"count": 0, "first_bad": 0}
        return nothing | json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else nothing
