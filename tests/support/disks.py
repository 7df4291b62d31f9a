"""A disk of a few KiB, which is soon full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory at `folder`; the test is skipped where none may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a test that failed has files open


def grow(folder: Path) -> None:
    """Give it 64 MiB."""
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
