"""Agreement of ranks: a failure of one is raised on all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from learner.checkpoints.folders import CheckpointError, DiskFull
from slipstream.runtime.disk import is_full

TEXT_BYTES = 1024
NO_ROOM = "no room: "
"""Begins what a rank says whose disk is full."""


def exchange(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The text of each rank, in rank order, cut at TEXT_BYTES. A collective."""
    encoded = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, mine, group=group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in texts]


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
    failed = [(rank, text.removeprefix(NO_ROOM)) for rank, text in enumerate(said) if text]
    if failed:
        kind = DiskFull if any(text.startswith(NO_ROOM) for text in said) else CheckpointError
        rank, text = failed[0]
        raise kind(f"checkpoint {folder} could not be {done} on rank {rank}: {text}") from cause


def _cause(error: BaseException | None, rank: int) -> str:
    """What went wrong on this rank, in a line; empty for nothing.

    torch.distributed.checkpoint raises what went wrong on some ranks on all of them.
    """
    if isinstance(error, CheckpointException):
        error = error.failures[rank][0] if rank in error.failures else None
    if error is None:
        return ""
    text = str(error).partition("\n")[0]
    text = text if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {text}"
    return NO_ROOM + text if is_full(error) else text
