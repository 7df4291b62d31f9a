"""Sees that the run folder stays where it is: what is written into one that was deleted or moved is lost."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from learner.launch.servers import RunFailed

PARTS = ("config.yaml", "journal", "logs")
"""Of the folder; a clean-up may take them one after the other."""
SETTLED_S = 1.0
"""Within this time a clean-up that has begun has taken one of these, too."""


class FolderGone(
    RunFailed,
    code="SLIP-RUN-09",
    cause="The folder of the run was deleted, moved or replaced while the run wrote into it: by hand, or by a clean-up"
    " of scratch space.",
    mend="Move it back, or restore it from a copy, and `--resume` it; give runs a run.dir that nothing cleans up.",
):
    """The run folder is not there any more."""


@dataclass(slots=True)
class RunFolder:
    """What of the folder was there when the run began."""

    path: Path
    _known: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        found = {name: identity(self.path / name) for name in PARTS}
        self._known = {name: one for name, one in found.items() if one is not None}

    def check(self) -> None:
        """Raises FolderGone."""
        gone = [name for name, known in self._known.items() if identity(self.path / name) != known]
        if gone:
            raise FolderGone(
                f"run.dir: {self.path} was deleted, moved or replaced while the run writes into it ({gone[0]} is not"
                " the one that it began with), so nothing more can be kept; move it back and --resume it, or start"
                " again with a run.dir that nothing cleans up"
            )

    def check_after(self, error: FileNotFoundError) -> None:
        """A file of the run is missing: look again when a clean-up is further. Raises FolderGone, or else the error."""
        time.sleep(SETTLED_S)
        self.check()
        raise error


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None where there is nothing."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
