"""How a run and its processes ended, as files: what programs decide by. Logs are for readers.

    <run>/ending.json             the run, written by its launcher
    <run>/logs/<name>.exit.json   a process: `replay`, `rollout-0`, `learner-3` (a rank)

A process that SIGKILL ends writes none. Its parent has the exit status; that of a rank notes it in its place.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from configs.errors import SlipstreamError
from slipstream.runtime.hang import registry

FILE = "ending.json"
SUFFIX = ".exit.json"
GENERATION = "SLIPSTREAM_GENERATION"
"""Environment variable that counts the starts of the learner's ranks: each has its own meeting and its own endings."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Of a run or a process. Example: Ending(code=1, said="run stopped: no room [SLIP-CONFIG-10]", unix_s=1764e6)."""

    code: int
    """Exit code: 0 finished, 130 interrupted, negative the signal that ended it, else failed."""
    said: str
    """For a person."""
    unix_s: float = field(default_factory=time.time)
    pid: int = 0
    error: str = ""
    """Code of the error, such as SLIP-NET-02; empty at an end by intent."""
    kind: str = ""
    """Class of the error."""
    symptom: str = ""
    """Class of the symptom, such as `silent`, of an error that has one."""
    peers: tuple[str, ...] = ()
    """Processes that it waited for in vain."""
    rank: int | None = None
    generation: int = 0
    """Of a learner rank: which start of all ranks it belonged to."""
    step: int | None = None
    """Step that a learner rank was at."""

    @property
    def failed(self) -> bool:
        """Whether it ended before its last step, and not by a signal."""
        return self.code not in (0, 130)


step: int | None = None
"""What this process is at; a learner rank sets it."""


def write(run_dir: str | Path, code: int, said: str) -> None:
    """Leave the run's in its folder; a disk that is full, or a folder that is gone, has its own line in the log."""
    write_file(Path(run_dir) / FILE, Ending(code, said))


def write_file(path: Path, ending: Ending) -> None:
    """Write one, which appears whole, or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        beside.write_text(json.dumps(asdict(ending)) + "\n", encoding="utf-8")
        beside.replace(path)


def leave(code: int, said: str, error: BaseException | None = None) -> int:
    """Note how this process ends, beside its log; one that belongs to no run notes nothing. Returns the code."""
    if registry.own is not None:
        rank = os.environ.get("RANK")
        ending = Ending(
            code,
            said.partition("\n")[0],
            pid=os.getpid(),
            error=error.code if isinstance(error, SlipstreamError) else "",
            kind=type(error).__name__ if error is not None else "",
            symptom=str(getattr(error, "symptom", "")),
            peers=registry.owed_by if error is not None else (),
            rank=int(rank) if rank is not None else None,
            generation=int(os.environ.get(GENERATION, "0")),
            step=step,
        )
        write_file(path_of(registry.own.run_dir, registry.own.member.name), ending)
    return code


def leave_on_error() -> None:
    """From now on note an error that nothing in this process foresees, too."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave(1, f"{kind.__name__}: {error}", error)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def path_of(run_dir: Path, name: str) -> Path:
    """Where a process notes how it ended."""
    return run_dir / "logs" / f"{name}{SUFFIX}"


def clear(run_dir: str | Path) -> None:
    """The run goes on."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)


def read(run_dir: str | Path) -> Ending | None:
    """None while the run goes on, or where its launcher was killed."""
    return read_file(Path(run_dir) / FILE)


def read_file(path: Path) -> Ending | None:
    """None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Ending(**{**found, "peers": tuple(found.get("peers", ()))})
    except (OSError, ValueError, TypeError):
        return None


def of_ranks(logs: Path) -> list[Ending]:
    """Those of learner ranks that failed, by this folder of logs."""
    found = (read_file(path) for path in logs.glob(f"learner-*{SUFFIX}"))
    return [one for one in found if one is not None and one.code]


def how(code: int) -> str:
    """`exit code 2`, or `killed by SIGKILL [closed]`."""
    return f"killed by {signal.Signals(-code).name} [closed]" if code < 0 else f"exit code {code}"


def first(endings: Iterable[Ending]) -> Ending | None:
    """The earliest."""
    return min(endings, key=lambda one: one.unix_s, default=None)
