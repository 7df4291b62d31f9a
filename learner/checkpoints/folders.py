"""The folders checkpoints/step_N of a run: what each of them is good for. Imports no torch."""

import errno
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.errors import SlipstreamError

MARK = "COMPLETE"
"""File that is written last: names and sizes of all others, and whether weights alone are left."""


class CheckpointError(SlipstreamError, RuntimeError, code="SLIP-CKPT-01"):
    """A checkpoint could not be written or loaded; names the folder and the cause."""


class DiskFull(CheckpointError):
    """A checkpoint finds no room on its disk: it is written again, from its beginning, once there is."""

    errno = errno.ENOSPC


def latest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that a run can go on from, or none, and why newer folders are skipped."""
    passed_over: list[str] = []
    for folder in numbered(run_dir / "checkpoints"):
        reason = incomplete(folder)
        if resumable(folder):
            return folder, passed_over
        if reason:
            passed_over.append(f"checkpoint {folder.name} is passed over: {reason}")
    return None, passed_over


def incomplete(folder: Path) -> str:
    """Why the folder is not a complete checkpoint, or an empty string."""
    try:
        for name, size in _mark(folder)["files"].items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {MARK} says {size}"
    except FileNotFoundError as error:
        return f"no {Path(str(error.filename)).relative_to(folder)}"
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        return f"{MARK} is not readable: {error!r}"
    return ""


def weights_only(folder: Path) -> bool:
    """Whether a complete checkpoint has hf/ alone: it was among the best and is no more among the newest."""
    return bool(_mark(folder).get("weights_only", False))


def resumable(folder: Path) -> bool:
    """Whether a run can go on from it."""
    return not incomplete(folder) and not weights_only(folder)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder that is being written."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has got its name meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def mark_complete(folder: Path) -> int:
    """Flush all files of a checkpoint to disk, and write its mark; how many bytes they have."""
    inside = sorted(folder.rglob("*"))
    for path in (*inside, folder):
        sync_file(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in inside if path.is_file()}
    write_json(folder / MARK, {"files": sizes})
    sync_file(folder)
    sync_file(folder.parent)
    return sum(sizes.values())


def _mark(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
    return value


def numbered(parent: Path) -> list[Path]:
    """step_N folders, the highest N first."""
    found = [path for path in parent.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """N of step_N."""
    return int(folder.name.removeprefix("step_"))


def write_json(path: Path, value: object) -> None:
    """Write and flush to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, value: object) -> None:
    """Write in place of what is there: a kill leaves the one or the other, whole."""
    beside = path.with_name(f"{path.name}.new")
    write_json(beside, value)
    beside.replace(path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
