"""Copied to a folder of PYTHONPATH as sitecustomize.py: every Python process of a run begins with it.

CHAOS_CLOCK names a file with one double of seconds for each role, by which the wall clock of its processes is shifted.
Monotonic clocks stay as they are, as on a machine whose wall clock is set. Where CHAOS_PROBES names a folder, rollout
servers and learner rank 0 go on as the same with a probe (scripts/chaos/probe.py), under the same pid.
"""

import mmap
import os
import struct
import sys
import time

ROLES = ("replay.main", "learner.train", "rollout_server.main", "learner.main")
"""Whose clock each double of the file is, by what the command line holds."""
DOUBLE = struct.Struct("<d")


def skew(path: str) -> None:
    role = next((i for i, role in enumerate(ROLES) if role in " ".join(sys.orig_argv)), None)
    if role is None:
        return
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    seconds, nanoseconds = time.time, time.time_ns

    def offset() -> float:
        return float(DOUBLE.unpack_from(shared, role * DOUBLE.size)[0])

    time.time = lambda: seconds() + offset()
    time.time_ns = lambda: nanoseconds() + int(offset() * 1e9)


def become_probe() -> None:
    """Go on as `python -m scripts.chaos.probe MODULE ...` where MODULE is to have a probe."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module == "rollout_server.main" or (module == "learner.train" and os.environ.get("RANK") == "0"):
        at = words.index("-m") + 1
        os.execv(sys.executable, [sys.executable, *words[1:at], "scripts.chaos.probe", *words[at:]])


if __name__ == "sitecustomize" and "CHAOS_CLOCK" in os.environ:
    skew(os.environ["CHAOS_CLOCK"])
    if "CHAOS_PROBES" in os.environ:
        become_probe()
