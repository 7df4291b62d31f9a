"""Diagnosis of a checkpoint that cannot be read, file by file."""

import io
import json
import zipfile
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from learner.checkpoints.folders import CheckpointError, numbered, resumable, step_of


def check_shared(folder: Path) -> None:
    """Raises CheckpointError when another rank's files are not visible here."""
    stored = FileSystemReader(folder / "dcp").read_metadata().storage_data
    written = {f"dcp/{place.relative_path}" for place in stored.values()}
    if (index := folder / "hf" / "model.safetensors.index.json").is_file():
        written |= {f"hf/{name}" for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    away = sorted(name for name in written if not (folder / name).is_file())
    if away:
        raise CheckpointError(f"{folder}: {away[0]} is not here; run.dir must be shared by all learner nodes")


def unreadable(folder: Path, error: CheckpointException) -> str:
    """Which file of the checkpoint could not be read, and why."""
    cause, frames = next(iter(error.failures.values()))
    # torch raises an error of its own in `local_step` where it could not read the index, older ones what had happened
    no_index = frames[-1].name == "local_step" or any(frame.name == "read_metadata" for frame in frames)
    damage = "dcp/.metadata is damaged" if no_index else damaged(folder)
    return damage or f"dcp/ could not be read ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"


def damaged(folder: Path) -> str:
    """The first damaged file, found by the CRC stored with each tensor; empty for none."""
    for index, place in FileSystemReader(folder / "dcp").read_metadata().storage_data.items():
        with (folder / "dcp" / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            part = io.BytesIO(file.read(place.length))
        try:
            with zipfile.ZipFile(part) as members:
                is_whole = members.testzip() is None
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
            is_whole = False
        if not is_whole:
            return f"dcp/{place.relative_path} is damaged at {index.fqn}"
    return ""


def remedy(folder: Path) -> str:
    """How to continue without this checkpoint."""
    older = [other for other in numbered(folder.parent) if step_of(other) < step_of(folder) and resumable(other)]
    there = older[0].name if older else "the initial model, if the journal has every step"
    return f"restore it from a copy, or move {folder.name} away: then --resume goes on from {there}"
