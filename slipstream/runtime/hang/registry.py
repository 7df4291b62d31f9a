"""Each process of a run notes itself in `<run>/processes/` at its start, and answers a signal with its stacks.

`NAME.json` says which process it is, `NAME.stacks` gets what faulthandler writes: the stacks of all threads, also of
one that holds the interpreter's lock in a collective or a kernel.
"""

import faulthandler
import json
import logging
import os
import signal
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.runtime import processes

log = logging.getLogger(__name__)

FOLDER = "processes"
SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredProcess:
    """A process of the run. Example: RegisteredProcess(name="rollout-0", pid=71, host="node1", started=81723, ...)."""

    name: str
    pid: int
    host: str
    started: int
    replay: str | None
    """Address of replay, as this process knows it; replay's own from when it serves on."""
    keys: str | None
    """Folder of CURVE keys."""

    def is_here(self) -> bool:
        """Whether it runs on this host, and is still the same process."""
        found = processes.of(self.pid) if self.host == socket.gethostname() else None
        return found is not None and found.started == self.started and found.state not in "ZX"


@dataclass(frozen=True, slots=True)
class Own:
    """This process within its run."""

    run_dir: Path
    member: RegisteredProcess


own: Own | None = None
owed_by: tuple[str, ...] = ()
"""Processes that this one has waited for in vain (report.expired)."""


def begin(name: str, run_dir: str | Path, *, replay: str | None = None, keys: str | None = None) -> None:
    """Note this process in the run folder. Called once, at its start; where that cannot be, a warning says so."""
    try:
        _begin(name, Path(run_dir), replay, keys)
    except OSError as error:
        log.warning("%s: hang reports will be without this process: %s/%s: %s", name, run_dir, FOLDER, error)


def _begin(name: str, run_dir: Path, replay: str | None, keys: str | None) -> None:
    global own
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    found = processes.of(os.getpid())
    member = RegisteredProcess(
        name=name,
        pid=os.getpid(),
        host=socket.gethostname(),
        started=found.started if found is not None else 0,
        replay=replay,
        keys=keys,
    )
    # a bare descriptor, never closed: the handler writes to it until the process ends, and a fork must not close it
    stacks = os.open(folder / f"{name}.stacks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)
    own = _noted(run_dir, member)  # only after its signal is caught: without a handler, it would end the process


def _noted(run_dir: Path, member: RegisteredProcess) -> Own:
    noted = run_dir / FOLDER / f".{member.name}.{os.getpid()}"
    noted.write_text(json.dumps(asdict(member)), encoding="utf-8")
    noted.replace(run_dir / FOLDER / f"{member.name}.json")
    return Own(run_dir, member)


def serves(address: str) -> None:
    """Note where this process, replay, listens: its launcher and views read it. Raises OSError."""
    global own
    if own is not None:
        own = _noted(own.run_dir, replace(own.member, replay=address))


def member(run_dir: Path, name: str) -> RegisteredProcess | None:
    """The last process of this name, dead or alive; None where it was not noted."""
    try:
        return RegisteredProcess(**json.loads((run_dir / FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # half written by a full disk, or of another version


def members(run_dir: Path) -> list[RegisteredProcess]:
    """All that were noted in a run folder, the last of each name, dead or alive."""
    found = (member(run_dir, path.stem) for path in sorted((run_dir / FOLDER).glob("*.json")))
    return [one for one in found if one is not None]
