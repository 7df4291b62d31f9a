"""Folders that a script makes once: whole or not at all, and not again."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from configs.errors import SlipstreamError

MADE = "made.json"


class MakeError(SlipstreamError, RuntimeError, code="SLIP-MAKE-01"):
    """The folder cannot be made; the message names the flag and the way out."""


def seed(text: str) -> int:
    """`--seed` of a command, as argparse reads it."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text}: must not be negative")
    return number


def make_folder(
    out: Path, arguments: Mapping[str, Any], fill: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Make `out` unless it is there already; returns (report, whether it was made now).

    Everything is written beside `out` and renamed; made.json, with the arguments and the size of every file, is last.

    Args:
        arguments: what decides the contents, as JSON holds it.
        fill: writes the files into a folder and returns the report.

    Raises:
        MakeError: `out` exists and was not made like this, or cannot be written; or what `fill` raises.
    """
    if report := complete(out, arguments):
        return report, False
    if out.exists() and not (out.is_dir() and ((out / MADE).is_file() or not any(out.iterdir()))):
        raise MakeError(f"--out {out}: exists and was not made by this script; remove it or take another folder")
    beside = out.parent / f".{out.name}.{os.getpid()}.new"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        report = fill(beside)
        files = {str(p.relative_to(beside)): p.stat().st_size for p in sorted(beside.rglob("*")) if p.is_file()}
        made = {"arguments": arguments, "report": report, "files": files}
        (beside / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        move_into_place(beside, out)
    except OSError as error:
        # another process that makes the same folder may have been faster, and then its result is as good
        report = complete(out, arguments)
        if report is None:
            raise MakeError(f"--out {out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report, True


def report_of(name: str, out: Path, made: Mapping[str, str], make: Callable[[], tuple[dict[str, Any], bool]]) -> int:
    """Run `make` for a command of that name; print `made` and its report as the last line; returns the exit code."""
    try:
        report, fresh = make()
    except MakeError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    if not fresh:
        sys.stdout.write(f"{out} is complete and was made with the same arguments; nothing to do\n")
    sys.stdout.write(json.dumps({**made, **report}) + "\n")
    return 0


def complete(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What made.json reports if `folder` was made with these arguments and every file has its size, else None."""
    try:
        made = json.loads((folder / MADE).read_text(encoding="utf-8"))
        if made["arguments"] != arguments:
            return None
        whole = all((folder / name).stat().st_size == size for name, size in made["files"].items())
        return dict(made["report"]) if whole and made["files"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def move_into_place(new: Path, out: Path) -> None:
    """Rename `new` to `out`; an older `out` is moved aside first and then removed."""
    aside = new.with_suffix(".old")
    if out.exists():
        out.rename(aside)
    new.rename(out)
    shutil.rmtree(aside, ignore_errors=True)
