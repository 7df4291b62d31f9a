"""Versions as safetensors files in a folder that learner rank 0 and all rollout servers see.

For clusters without a route between their GPUs, and for engines that come and go: no member waits for another, and a
late one reads what is there. Each bucket is a file, which takes its name only when it is whole, so readers begin while
the next one is written. A version that travels whole is a model folder that any reader of safetensors can open:

    <weight_bus.folder>/<run id>-<incarnation>/
        publisher.json                           host and pid of the writer
        v000012/bucket-00001.safetensors ...     the tensors by name
        v000012/model.safetensors.index.json     which tensor is in which file; last
        v000013.change/part-00001.safetensors    with weight_bus.delta: flat bytes, see weight_bus/delta/coding.py

The control plane says which version to read. The two newest are kept, so a slower reader finds its files gone, says so,
and gets the newest. What earlier incarnations have left is removed when the first reader of the next one joins.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from configs.infrastructure import WeightBus
from weight_bus.errors import TransportError, WeightBusError
from weight_bus.manifest import Entry, Layout
from weight_bus.transports.base import PROTOCOL, Formation, ignore

KEPT = 2
LOOK_S = 0.005
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
INDEX = "model.safetensors.index.json"
OWNER = "publisher.json"


class DiskTransport:
    """One member's end: rank 0 writes, the others read. Buckets live in host memory."""

    device = torch.device("cpu")

    def __init__(self, config: WeightBus, host: str) -> None:
        if config.folder is None:
            raise WeightBusError("weight_bus.transport 'disk' needs weight_bus.folder, which all nodes see")
        self._root = Path(config.folder).absolute()
        self._patience_s = config.collective_timeout_s
        self._folder: Path | None = None
        self._rank, self._version, self._version_folder = 0, -1, Path()
        self._entries: Sequence[Sequence[Entry]] | None = None

    def facts(self) -> dict[str, str]:
        """The transport and the protocol; where the folder is mounted may differ."""
        return {"transport": "disk", "protocol": PROTOCOL}

    def serve(self) -> str:
        """Make the folder; subscribers find it by their own weight_bus.folder."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            probe = self._root / f".writable-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise WeightBusError(f"weight_bus.folder: {self._root} cannot be written: {error.strerror}") from error
        return "disk"

    def renew(self) -> None:
        """The folder is where it was."""

    def form(self, formation: Formation) -> None:
        """Go to the folder of the run's incarnation; a reader waits until it is there."""
        run, _, incarnation = formation.prefix.rpartition("/")[0].rpartition("/")
        run = run.removesuffix("/wb").replace("/", "_")
        self._folder, self._rank = self._root / f"{run}-{incarnation}", formation.rank
        owner = self._folder / OWNER
        if formation.rank == 0:
            _remove_older(self._root, f"{run}-", int(incarnation))
            _write(owner, [json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()])
        else:
            self._wait_for(owner, "is weight_bus.folder the same shared folder as the learner's?")

    def label(self, version: int, layout: Layout | None) -> None:
        """What comes next: a version as it is, or a change of the version before."""
        if self._folder is None:
            raise TransportError(f"v{version}: no group is formed", "closed")
        self._version, self._entries = version, layout.by_bucket() if layout is not None else None
        self._version_folder = self._folder / f"v{version:06d}{'' if layout is not None else '.change'}"
        if self._rank == 0:
            _remove_older(self._folder, "v", version - KEPT + 1)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """Write bucket `index`, or read it as soon as it is there."""
        path = self._version_folder / f"{'part' if self._entries is None else 'bucket'}-{index + 1:05d}.safetensors"
        header = _header(bucket, self._entries[index] if self._entries is not None else None)
        if self._rank:
            self._wait_for(path, f"v{self._version} may have been replaced by newer ones, or its writer is slow")
            _read(path, header, bucket)
        elif not _holds(path, header, bucket):  # a late one or a resend finds it there, unless it was damaged
            _write(path, [header, bucket.numpy().data])

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Rank 0: the version is whole, and stays readable. Readers have read each bucket already."""
        if self._rank == 0 and self._entries is not None:
            names = {e.name: f"bucket-{i + 1:05d}.safetensors" for i, b in enumerate(self._entries) for e in b}
            size = sum(entry.num_bytes for bucket in self._entries for entry in bucket)
            index = {"metadata": {"total_size": size}, "weight_map": names}
            _write(self._version_folder / INDEX, [json.dumps(index).encode()])

    def leave(self) -> None:
        self._folder = None

    def close(self) -> None:
        """What is on the disk stays: it is the newest version."""
        self._folder = None

    def _wait_for(self, path: Path, hint: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while not _exists(path):
            if time.monotonic() > deadline:
                raise TransportError(f"{path} is not there after {self._patience_s:g} s; {hint}", "slow")
            time.sleep(LOOK_S)


def _remove_older(folder: Path, prefix: str, first: int) -> None:
    """Remove what is numbered below `first`: versions behind the kept ones, or incarnations without a publisher.

    Raises TransportError.
    """
    try:
        found = list(folder.iterdir())
    except FileNotFoundError:
        return  # removed by another program: the next file makes it anew
    except OSError as error:
        raise TransportError(f"{folder}: cannot be listed: {error.strerror}", "full") from error
    for old in found:
        number = old.name.removeprefix(prefix).removesuffix(".change")
        if old.name.startswith(prefix) and number.isdecimal() and int(number) < first:
            shutil.rmtree(old, ignore_errors=True)  # a reader on a network file system may hold a file of it open


def _exists(path: Path) -> bool:
    """Raises TransportError: the folder cannot be looked into."""
    try:
        return path.exists()
    except OSError as error:
        raise TransportError(f"{path}: cannot be read: {error.strerror}", "closed") from error


def _header(bucket: torch.Tensor, entries: Sequence[Entry] | None) -> bytes:
    """What a safetensors file begins with, its data being the bucket as it is."""
    found: list[tuple[str, str, tuple[int, ...], int, int]] = [("change", "U8", (bucket.numel(),), 0, bucket.numel())]
    if entries is not None:
        found = [(e.name, DTYPES[e.dtype], e.shape, e.offset, e.offset + e.num_bytes) for e in entries]
    tensors = {name: {"dtype": kind, "shape": shape, "data_offsets": ends} for name, kind, shape, *ends in found}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file that is there whole or not at all. Raises TransportError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise TransportError(f"{path}: cannot be written: {error.strerror}", "full") from error


def _holds(path: Path, header: bytes, bucket: torch.Tensor) -> bool:
    """Whether a file is there and is exactly this."""
    found = torch.empty_like(bucket)
    with suppress(TransportError):
        _read(path, header, found)
        return torch.equal(found, bucket)
    return False


def _read(path: Path, header: bytes, bucket: torch.Tensor) -> None:
    """Read a file whose header must be exactly this into a bucket."""
    try:
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise TransportError(f"{path}: its header is not that of the update", "corrupt")
            view = bucket.numpy().data
            done = file.readinto(view)
            if done < len(view) or file.read(1):
                raise TransportError(f"{path}: {done} bytes of data or more, not {len(view)}", "corrupt")
    except OSError as error:
        raise TransportError(f"{path}: cannot be read: {error.strerror}", "closed") from error
