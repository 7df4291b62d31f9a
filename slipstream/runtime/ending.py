"""How a run ended, as `<run>/ending.json`: for views and scripts, which read no prose of logs."""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "ending.json"


@dataclass(frozen=True, slots=True)
class Ending:
    """Of the launcher. Example: Ending(code=1, said="run stopped: no room [SLIP-CONFIG-10]", unix_s=1764e6)."""

    code: int
    """Exit code: 0 finished, 130 interrupted, else failed."""
    said: str
    unix_s: float

    @property
    def failed(self) -> bool:
        """Whether it ended before its last step, and not by a signal."""
        return self.code not in (0, 130)


def write(run_dir: str | Path, code: int, said: str) -> None:
    """Leave it in the run folder; a disk that is full, or a folder that is gone, has its own line in the log."""
    with contextlib.suppress(OSError):
        (Path(run_dir) / FILE).write_text(json.dumps(asdict(Ending(code, said, time.time()))) + "\n", encoding="utf-8")


def clear(run_dir: str | Path) -> None:
    """The run goes on."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)


def read(run_dir: str | Path) -> Ending | None:
    """None while the run goes on, or where its launcher was killed."""
    try:
        return Ending(**json.loads((Path(run_dir) / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
