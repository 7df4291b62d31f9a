"""The folder through which a rollout server and its schedulers speak about an update.

The server writes one request (msgpack): the tensors of the update as ranges of memory that both sides can map:
CUDA memory by its IPC handle, host memory as a file in shared memory, and what is staged in a scheduler
(update/receiver.py) by its number there. Each scheduler answers with one reply. Nothing is
pickled, and nobody but this user can open the folder.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import safe_open

from rollout_server.engines.base import EngineError
from weight_bus.remote import RemoteUpdate
from weight_bus.staging import DTYPES, NAMES

FOLDER = "SLIPSTREAM_STAGING"
"""Environment variable that tells the schedulers where the folder is."""
REQUEST = "request.msgpack"
CUDA_HANDLE = ("device", "handle", "size", "offset", "ref_handle", "ref_offset", "event", "event_sync")
IN_BYTES = ("handle", "ref_handle", "event")
Update = Iterable[tuple[str, torch.Tensor]] | RemoteUpdate


@dataclass(frozen=True, slots=True)
class Reply:
    """What one scheduler says of an update."""

    rank: int
    error: str
    slices: Mapping[str, tuple[tuple[int, ...], int, int]]
    """name -> (start, elements, digest) of the part that this rank holds."""
    seconds: Mapping[str, float]


class StagingFolder:
    """The server's side. Set the environment before the schedulers start: `os.environ[FOLDER] = str(staging.path)`."""

    def __init__(self) -> None:
        shared_memory = Path("/dev/shm")
        root = str(shared_memory) if os.access(shared_memory, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="slipstream-", dir=root))  # mode 0700
        self._sequence = 0
        self._tensors: list[list[Any]] = []
        self._handles: dict[int, dict[str, Any]] = {}
        self._files: list[torch.Tensor] = []
        self._inodes: dict[int, int] = {}

    def write_update(self, update: Update, version: int) -> None:
        """Describe an update; host memory is copied into shared memory, CUDA memory only named."""
        if isinstance(update, RemoteUpdate):
            self._tensors = [[e.name, e.dtype, list(e.shape), e.bucket, e.offset] for e in update.entries]
            self._write({"version": version, "load": True, "memory": update.memory})
        else:
            self._write_tensors(update, version)

    def _write_tensors(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        tensors: list[list[Any]] = []
        kept = []
        for name, tensor in named_tensors:
            whole = tensor.detach().contiguous()
            if whole.dtype not in NAMES:
                raise EngineError(f"tensor {name!r} has dtype {whole.dtype}; the engine takes {sorted(DTYPES)}")
            kept.append(whole)
            storage = whole.untyped_storage()
            number, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage))
            offset = whole.storage_offset() * whole.element_size()
            tensors.append([name, NAMES[whole.dtype], list(whole.shape), number, offset])
        memory = [
            self._cuda(storage) if storage.device.type == "cuda" else self._file(number, storage)
            for number, storage in storages.values()
        ]
        self._tensors = tensors
        self._write({"version": version, "load": True, "memory": memory})

    def write_receiver(self, path: Path, config: Mapping[str, Any], host: str, *, export: bool) -> None:
        """Ask for a receiver that connects to `path`; see `receiver.start`."""
        order = {"socket": str(path), "config": config, "host": host, "export": export}
        self._write({"version": -1, "load": False, "memory": [], "receive": order})

    def write_digest(self) -> None:
        """Order digests of the live tensors. Raises EngineError before the first update."""
        if not self._tensors:
            raise EngineError("no update has named this model's tensors yet, so there is nothing to digest")
        self._write({"version": -1, "load": False, "memory": []})

    def name_tensors(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        """(name, dtype, shape) of the model, so that `write_digest` works before the first update."""
        self._tensors = [[name, dtype, list(shape), 0, 0] for name, dtype, shape in tensors]

    def replies(self, num_ranks: int) -> list[Reply]:
        """Replies of all schedulers to the last request.

        Raises:
            EngineError: a scheduler has not answered this request.
        """
        found = []
        for rank in range(num_ranks):
            try:
                reply = msgpack.unpackb((self.path / f"reply.{rank}.msgpack").read_bytes())
            except (OSError, ValueError) as error:
                raise EngineError(f"scheduler {rank} left no reply to an update: {error}") from error
            if reply["sequence"] != self._sequence:
                raise EngineError(f"scheduler {rank} answered update {reply['sequence']}, not {self._sequence}")
            slices = {name: (tuple(start), count, digest) for name, start, count, digest in reply["slices"]}
            found.append(Reply(rank, reply["error"], slices, reply["seconds"]))
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of each tensor of the last request."""
        return {name: tuple(shape) for name, _, shape, _, _ in self._tensors}

    def mapped_by_all(self) -> None:
        """Unlink the memory once every scheduler has mapped it; mappings keep it."""
        for path in self.path.glob("memory.*"):
            path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, request: dict[str, Any]) -> None:
        self._sequence += 1
        body = msgpack.packb({"sequence": self._sequence, "tensors": self._tensors, **request})
        part = self.path / f"{REQUEST}.part"
        part.write_bytes(body)
        part.replace(self.path / REQUEST)

    def _cuda(self, storage: torch.UntypedStorage) -> dict[str, Any]:
        # once per buffer: each export adds to a reference count, and the schedulers keep the memory mapped
        pointer = storage.data_ptr()
        if pointer not in self._handles:
            handle = storage._share_cuda_()  # type: ignore[no-untyped-call]
            self._handles[pointer] = dict(zip(CUDA_HANDLE, handle, strict=True))
        return {"kind": "cuda", **self._handles[pointer]}

    def _file(self, number: int, storage: torch.UntypedStorage) -> dict[str, Any]:
        size = storage.nbytes()
        path = self.path / f"memory.{number}"
        if number == len(self._files):
            self._files.append(torch.empty(0, dtype=torch.uint8))
        if self._files[number].numel() != size:
            path.unlink(missing_ok=True)  # whoever has the old one mapped keeps it until it maps the new one
            self._files[number] = _new_file(path, size)
            self._inodes[number] = path.stat().st_ino
        self._files[number].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        return {"kind": "file", "path": str(path), "size": size, "inode": self._inodes[number]}


def _new_file(path: Path, size: int) -> torch.Tensor:
    """Flat uint8 over a new file, allocated at once: a missing page would be a SIGBUS."""
    if size:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise EngineError(
                f"{size / 1e9:.1f} GB of an update do not fit in {path.parent}: {error.strerror}; enlarge it"
                " (docker run --shm-size)"
            ) from error
        finally:
            os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def in_words(handle: Mapping[str, Any]) -> dict[str, Any]:
    """A CUDA IPC handle without bytes, so that a message can carry it."""
    return {field: value.hex() if field in IN_BYTES else value for field, value in handle.items()}


def in_bytes(handle: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `in_words`."""
    return {field: bytes.fromhex(value) if field in IN_BYTES else value for field, value in handle.items()}


def combine(replies: Iterable[Reply], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Digest of each tensor: the sum over the schedulers' disjoint slices.

    A tensor whose replicas differ, or whose slices do not cover it, has no digest: it then counts as wrong.
    """
    parts: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
    wrong: set[str] = set()
    for reply in replies:
        for name, (start, count, digest) in reply.slices.items():
            known = parts.setdefault(name, {}).setdefault(start, (count, digest))
            if known != (count, digest):
                wrong.add(name)
    digests = {}
    for name, slices in parts.items():
        if name not in wrong and sum(count for count, _ in slices.values()) == math.prod(shapes[name]):
            digests[name] = sum(digest for _, digest in slices.values()) & ((1 << 64) - 1)
    return digests


def folder_tensors(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor of a Hugging Face folder that a model holds."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied = bool(described.get("tie_word_embeddings"))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq"):
                    yield name, "", tuple(opened.get_slice(name).get_shape())
