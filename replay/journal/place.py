"""Where a journal is: in the run folder, or with replay.journal_dir elsewhere, to which the run folder has a link.

    runs/NAME/journal -> /nvme/journals/NAME-3f9a1c20

Each run gets a folder of its own there, whatever other runs are called. Who only reads a run follows the link.
"""

import os
import secrets
from pathlib import Path

from replay.journal.format import JournalError

NAME = "journal"
KEY = "replay.journal_dir"


def find_journal(run_dir: str | Path) -> Path | None:
    """The folder of a run's journal; None where the run has none yet. Raises JournalError: it has vanished."""
    here = Path(os.path.abspath(run_dir)) / NAME
    if not os.path.lexists(here):
        return None
    there = Path(os.readlink(here)) if here.is_symlink() else here
    if not there.is_dir():
        raise JournalError(
            f"{KEY}: {there}, the journal of {here.parent}, is gone: mount its disk, or resume on the machine that has"
            f" it; without it, rm {here} and --resume goes on from the newest checkpoint (the prompts of lost groups"
            " are sampled again)"
        )
    return there


def check_place(run_dir: str | Path, journal_dir: str | None) -> Path | None:
    """As `find_journal`. Raises JournalError: it has vanished, or is not where the configuration has it."""
    there, folder = find_journal(run_dir), os.path.abspath(journal_dir or run_dir)
    if there is not None and str(there.parent) != folder:
        raise JournalError(
            f"{KEY}: the journal of {run_dir} is in {there.parent}, not in {folder}; leave the key as it was, or move"
            f" {there} there and have {Path(run_dir) / NAME} lead to it"
        )
    return there


def place_journal(run_dir: str | Path, journal_dir: str | None) -> Path:
    """The folder of a run's journal, which is made where it is to be elsewhere and the run has none yet.

    Raises JournalError: as `check_place`, or it cannot be made.
    """
    found, here = check_place(run_dir, journal_dir), Path(run_dir) / NAME
    if found is not None or journal_dir is None:
        return found or here
    there = Path(os.path.abspath(journal_dir)) / f"{here.parent.name}-{secrets.token_hex(4)}"
    try:
        there.mkdir()
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(there)
    except OSError as error:
        raise JournalError(
            f"{KEY}: {error.filename2 or error.filename} cannot be made: {error.strerror}; name a folder that is there"
            " and that this user may write to"
        ) from error
    return there
