"""The folders checkpoints/step_N of a run: which are complete, and which one a run goes on from. Imports no torch."""

import json
import re
from pathlib import Path


def latest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, or none, and why newer folders are skipped."""
    passed_over: list[str] = []
    for folder in numbered(run_dir / "checkpoints"):
        reason = incomplete(folder)
        if not reason:
            return folder, passed_over
        passed_over.append(f"checkpoint {folder.name} is passed over: {reason}")
    return None, passed_over


def incomplete(folder: Path) -> str:
    """Why the folder is not a complete checkpoint, or an empty string."""
    try:
        sizes = json.loads((folder / "COMPLETE").read_text(encoding="utf-8"))["files"]
        for name, size in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, COMPLETE says {size}"
    except FileNotFoundError as error:
        return f"no {Path(str(error.filename)).relative_to(folder)}"
    except (ValueError, KeyError, AttributeError, OSError) as error:
        return f"COMPLETE is not readable: {error!r}"
    return ""


def numbered(parent: Path) -> list[Path]:
    """step_N folders, the highest N first."""
    found = [path for path in parent.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """N of step_N."""
    return int(folder.name.removeprefix("step_"))
