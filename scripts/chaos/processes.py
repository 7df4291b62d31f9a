"""The processes of a run by role, found by their parents and command lines; signals by pid."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROLES = {
    "replay": ("-m replay.main",),
    "learner": ("-m learner.train",),
}
NOT_RANKS = "learner.launch.torchrun"


def table() -> Iterator[tuple[int, int, str, str]]:
    """(pid, parent, state, command line) of every process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            yield int(entry.name), int(fields[1]), fields[0], command


def below(root: int) -> dict[int, tuple[str, str]]:
    """(state, command line) by pid of all living descendants of a process."""
    rows = list(table())
    found = {root}
    grown = True
    while grown:
        more = {pid for pid, parent, _, _ in rows if parent in found} - found
        found |= more
        grown = bool(more)
    return {pid: (state, command) for pid, _, state, command in rows if pid in found - {root} and state != "Z"}


def of_role(root: int, role: str) -> list[int]:
    """Pids of replay, or of the learner ranks in the order of their start, below the launcher."""
    (needle,) = ROLES[role]
    return sorted(p for p, (_, c) in below(root).items() if needle in c and NOT_RANKS not in c)


def send(pid: int, sig: signal.Signals) -> bool:
    """Send a signal to a process that was found before; False when it has ended since."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether it runs and is no zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
