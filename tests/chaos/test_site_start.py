"""The shifted wall clock: in a process of a role, and in no other."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.chaos import site_start

PROGRAM = """
import time, datetime
print(time.time() - datetime.datetime.now().timestamp(), time.time_ns() / 1e9 - time.time())
"""


@pytest.mark.parametrize(
    ("words", "expected"), [(("-m", "replay.main"), 3600), (("-m", "learner.train"), -3600), (("-m", "other"), 0)]
)
def test_the_wall_clock_of_a_role_is_shifted(tmp_path, words, expected):
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("<4d", 3600, -3600, 0, 0))
    shutil.copyfile(site_start.__file__, tmp_path / "sitecustomize.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CHAOS_CLOCK": str(clock)}
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(
        command, env=environment, cwd=Path("/"), capture_output=True, text=True, timeout=30, check=True
    )
    shift, difference = map(float, done.stdout.split())
    assert abs(shift - expected) < 5 and abs(difference) < 1
