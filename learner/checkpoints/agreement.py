"""Agreement of ranks: a failure of one is raised on all."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from learner.checkpoints.folders import CheckpointError, DiskFull
from slipstream.runtime.disk import is_full

TEXT_BYTES = 1024


class Outcome(IntEnum):
    """Of a rank's part of a work."""

    DONE = 0
    GOES_ON = 1
    LATE = 2
    FAILED = 3
    NO_ROOM = 4
    """It failed because its disk was full."""


class Said(NamedTuple):
    """What a rank tells the others: a code for programs, a text for people."""

    outcome: Outcome
    text: str = ""


def exchange(said: Said, group: dist.ProcessGroup, device: torch.device) -> list[Said]:
    """What each rank says, in rank order, texts cut at TEXT_BYTES. A collective."""
    encoded = bytes([said.outcome]) + said.text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    found = [bytes(each.tolist()) for each in all_ranks]
    return [Said(Outcome(each[0]), each[1:].rstrip(b"\0").decode(errors="replace")) for each in found]


@contextmanager
def together(group: dist.ProcessGroup, folder: Path, done: str) -> Iterator[None]:
    """Raise a failure of one rank on all ranks. A collective at its end.

    Args:
        group: of host memory.
        folder: of the checkpoint.
        done: what the work does to it, a participle.

    Raises:
        CheckpointError: the work failed on some rank; names the folder, the rank and the cause.
        DiskFull: as that, where a disk was full.
    """
    cause: BaseException | None = None
    try:
        yield
    except (OSError, ValueError, KeyError, CheckpointError, CheckpointException) as error:
        cause = error
    said = exchange(_cause(cause, dist.get_rank(group)), group, torch.device("cpu"))
    if isinstance(cause, CheckpointError):
        raise cause
    failed = [(rank, its.text) for rank, its in enumerate(said) if its.outcome is not Outcome.DONE]
    if failed:
        kind = DiskFull if any(its.outcome is Outcome.NO_ROOM for its in said) else CheckpointError
        rank, text = failed[0]
        raise kind(f"checkpoint {folder} could not be {done} on rank {rank}: {text}") from cause


def _cause(error: BaseException | None, rank: int) -> Said:
    """What went wrong on this rank, in a line.

    torch.distributed.checkpoint raises what went wrong on some ranks on all of them.
    """
    if isinstance(error, CheckpointException):
        error = error.failures[rank][0] if rank in error.failures else None
    if error is None:
        return Said(Outcome.DONE)
    text = str(error).partition("\n")[0]
    text = text if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {text}"
    return Said(Outcome.NO_ROOM if is_full(error) else Outcome.FAILED, text)
