"""Room for the run folder: free bytes and inodes, the limit of a file's size, speed, beside what a run writes."""

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from configs.schema import Config
from learner.doctor.facts import MIB
from learner.doctor.findings import Finding
from learner.doctor.machine import DTYPE_BYTES
from learner.policy.memory import GIB, Sizes

JOURNAL_BYTES = GIB // 16
"""Replay's journal stays small beside a checkpoint; logs and metrics as well."""
FREE_INODES = 10_000
SLOW = 50e6
"""Bytes a second; a checkpoint of 8B is 100 GB."""
STATE_BYTES = 12
"""A parameter in dcp/: weight and two moments in float32."""
MEND = "free some, or name a folder with room (run.dir)"


def checkpoint_bytes(config: Config, sizes: Sizes) -> int:
    """Of one checkpoint: dcp/ of what is trained, hf/ of the whole policy; a critic is taken to be of its size."""
    lora = config.learner.lora
    trained = sizes.adapter_parameters(lora) if lora.rank else sizes.parameters
    if config.algorithm.advantage == "gae":
        trained += sizes.parameters
    return trained * STATE_BYTES + weights_bytes(config, sizes)


def weights_bytes(config: Config, sizes: Sizes) -> int:
    """Of hf/, all that checkpoint.keep_best keeps: with LoRA the adapters are merged there."""
    return sizes.parameters * DTYPE_BYTES[config.checkpoint.hf_dtype]


def room(config: Config, sizes: Sizes | None) -> Finding:
    """Free bytes and inodes of the disk of run.dir, and what this process may write into one file."""
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    one = checkpoint_bytes(config, sizes) if sizes is not None else 0
    kept, best = config.checkpoint.keep + 1, config.checkpoint.keep_best  # the next one comes before the oldest goes
    whole = kept * one + JOURNAL_BYTES + (best * weights_bytes(config, sizes) if sizes is not None else 0)
    said = f"{free / GIB:.1f} GiB free in {folder}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(one // max(1, config.num_learner_ranks), JOURNAL_BYTES)
    if limit != resource.RLIM_INFINITY and limit < largest:
        what = f"a file may have {limit / MIB:.0f} MiB (ulimit -f), and the run writes some of {largest / MIB:.0f} MiB"
        return Finding(
            "stop", "disk", what, why="a larger file ends its process by SIGXFSZ", mend="ulimit -f unlimited"
        )
    if free < one + JOURNAL_BYTES:
        what = f"{said}; one checkpoint and the journal take {(one + JOURNAL_BYTES) / GIB:.1f} GiB"
        return Finding("stop", "disk", what, why="the run would end at its first checkpoint", mend=MEND)
    if free < whole:
        what = f"{said}; {kept} checkpoints at a time (checkpoint.keep {config.checkpoint.keep}"
        what += f"{f', and {best} of keep_best' if best else ''}) take {whole / GIB:.1f}"
        return Finding("warn", "disk", f"{what} GiB", why="the run would end at a later checkpoint", mend=MEND)
    if disk.f_files > 0 and disk.f_favail < FREE_INODES:
        what = f"{disk.f_favail} inodes are free in {folder}"
        return Finding("warn", "disk", what, why="a disk without inodes takes no new file", mend=MEND)
    return Finding("ok", "disk", f"{said}, {whole / GIB:.1f} GiB are needed at a time")


def speed(config: Config, sizes: Sizes | None, measured: float | str) -> Iterable[Finding]:
    """Bytes a second of a file that was written there, or why it could not be."""
    if isinstance(measured, str):
        what = f"writing 64 MiB to {config.run_dir} failed: {measured}"
        yield Finding("stop", "disk", what, why="journal and checkpoints go there", mend=MEND)
        return
    one = checkpoint_bytes(config, sizes) if sizes is not None else 0
    said = f"{measured / 1e6:.0f} MB/s in {config.run_dir}"
    if one / measured > config.checkpoint.deadline_s:
        yield Finding(
            "stop",
            "disk speed",
            f"{said}: a checkpoint of {one / GIB:.1f} GiB takes {one / measured:.0f} s",
            why=f"checkpoint.deadline_s is {config.checkpoint.deadline_s:g}",
            mend="a faster folder (run.dir), or a longer checkpoint.deadline_s",
        )
    elif measured < SLOW:
        why = "every group is written to the journal before it is acknowledged"
        yield Finding("warn", "disk speed", said, why=why, mend="a local folder (run.dir), or replay.fsync=never")
    else:
        yield Finding("ok", "disk speed", said)
