"""The folder through which a rollout server and its schedulers speak about an update.

The server writes one request (msgpack): the tensors of the update as ranges of memory that both sides can map: CUDA
memory by its IPC handle, host memory as a file in shared memory, and what is staged in a scheduler (receiver.py) by its
number there. Each scheduler answers with one reply. Nothing is pickled, and only this user can open the folder.
"""

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgpack
import torch
from safetensors import safe_open

from configs.learner import Lora
from rollout_server.engines.base import EngineError
from slipstream.families.pictures import decoder_of, vision_of
from slipstream.families.record import HEAD, TOWER
from slipstream.weight_files import weight_files
from weight_bus.adapters import SCALE
from weight_bus.digest.definition import MASK
from weight_bus.remote import RemoteUpdate
from weight_bus.staging import DTYPES, NAMES

FOLDER = "SLIPSTREAM_STAGING"
"""Environment variable that tells the schedulers where the folder is."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "slipstream-"
LOCK = "lock"
REQUEST = "request.msgpack"
REPLY, PROOF = "reply", "proof.{rank}.{sequence}.msgpack"
CUDA_HANDLE = ("device", "handle", "size", "offset", "ref_handle", "ref_offset", "event", "event_sync")
Update = Iterable[tuple[str, torch.Tensor]] | RemoteUpdate


class StagingFolder:
    """The server's side. Set the environment before the schedulers start: `os.environ[FOLDER] = str(staging.path)`."""

    def __init__(self, family: str | None = None) -> None:
        """`family` is model.family, of which schedulers take the record."""
        self._family = family
        root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_left_behind(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # mode 0700
        self._lock = _locked(self.path)
        self._sequence = 0
        self._tensors: list[list[Any]] = []
        self._base: list[list[Any]] = []
        self._lora: dict[str, Any] = {}
        self._handles: dict[int, dict[str, Any]] = {}
        self._files: dict[int, tuple[Path, torch.Tensor]] = {}
        """Host memory by its number; a path is never used twice, so that it names what the schedulers have mapped."""

    def write_update(self, update: Update, digests: Mapping[str, int] | None = None) -> None:
        """Describe an update; host memory is copied into shared memory, CUDA memory only named.

        Schedulers go on by themselves once they hold `digests`.
        """
        expected = dict(digests or {})
        if isinstance(update, RemoteUpdate) and update.slices:
            wholes = {e.name: e for its in update.slices for e in its.entries}
            self._tensors = [[e.name, e.dtype, list(e.whole), 0, 0] for e in wholes.values()]
            self._write(load=True, slices=[_slices(its) for its in update.slices], expected=expected)
            return
        if isinstance(update, RemoteUpdate):
            self._tensors = [[e.name, e.dtype, list(e.shape), e.bucket, e.offset] for e in update.entries]
            memory = update.memory
        else:
            self._tensors, memory = self._described(update)
        self._write(load=True, memory=memory, expected=expected)

    def _described(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[list[Any]], list[Any]]:
        """[name, dtype, shape, number of its memory, offset] of each; and the memory."""
        storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        tensors: list[list[Any]] = []
        for name, tensor in named_tensors:
            whole = tensor.detach().contiguous()
            if whole.dtype not in NAMES:
                raise EngineError(f"tensor {name!r} has dtype {whole.dtype}; the engine takes {sorted(DTYPES)}")
            storage = whole.untyped_storage()
            number, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage))
            offset = whole.storage_offset() * whole.element_size()
            tensors.append([name, NAMES[whole.dtype], list(whole.shape), number, offset])
        return tensors, [
            self._cuda(storage) if storage.device.type == "cuda" else self._file(number, storage)
            for number, storage in storages.values()
        ]

    def write_receiver(self, paths: Sequence[Path], config: Mapping[str, Any], host: str, *, export: bool) -> None:
        """Ask for a receiver in each scheduler, which connects to its path; see `receiver.start`."""
        self._write(receive={"sockets": [*map(str, paths)], "config": config, "host": host, "export": export})

    def write_digest(self) -> None:
        """Order digests of the live tensors. Raises EngineError before the first update."""
        if not self._tensors and not self._base:
            raise EngineError("no update has named this model's tensors yet, so there is nothing to digest")
        self._write()

    def name_tensors(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """(name, shape) of what the model holds, so that `write_digest` works before the first update."""
        self._tensors = [[name, "", list(shape), 0, 0] for name, shape in tensors]

    def adapt(self, base: Iterable[tuple[str, tuple[int, ...]]], lora: Lora) -> None:
        """From now on updates are adapters of these tensors (name, shape), which the model holds."""
        self._base = [[name, list(shape)] for name, shape in base]
        self._lora = {"rank": lora.rank, "scale": lora.scale, "projections": list(lora.projections)}
        self._tensors = []

    def replies(self, num_ranks: int) -> list[dict[str, Any]]:
        """Reply of each scheduler to the last request. Raises EngineError where one is missing.

        It has `error`, `seconds` by name, and `slices`: [name, start, elements, digest] of what that rank holds; of a
        load `proven`, whether decoding goes on, `stood`, from when to when it did not (monotonic), and `tokens`, how
        many each request had then. Where `proven` is None, `proofs` have the slices.
        """
        found = []
        for rank in range(num_ranks):
            try:
                reply = msgpack.unpackb((self.path / f"{REPLY}.{rank}.msgpack").read_bytes())
            except (OSError, ValueError) as error:
                raise EngineError(f"scheduler {rank} left no reply to an update: {error}") from error
            if reply["sequence"] != self._sequence:
                raise EngineError(f"scheduler {rank} answered update {reply['sequence']}, not {self._sequence}")
            found.append(reply)
        return found

    def proofs(self, num_ranks: int) -> list[dict[str, Any]]:
        """What those that had nothing to compare with yet have found since: as `replies`; empty while one is missing.

        `settled_s` are the seconds that it took between two forwards.
        """
        paths = [self.path / PROOF.format(rank=rank, sequence=self._sequence) for rank in range(num_ranks)]
        if not all(path.exists() for path in paths):
            return []
        found = [msgpack.unpackb(path.read_bytes()) for path in paths]
        for path in self.path.glob(PROOF.format(rank="*", sequence="*")):
            path.unlink()
        return found

    def digests(self, replies: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Digest of each tensor of the last request, as `added_up`."""
        return added_up((reply["slices"] for reply in replies), self._tensors, self._base, self._lora)

    def mapped_by_all(self) -> None:
        """Unlink the memory once every scheduler has mapped it; mappings keep it."""
        for path in self.path.glob("memory.*"):
            path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _write(self, *, load: bool = False, memory: Sequence[Any] = (), **order: Any) -> None:
        self._sequence += 1
        request = {"sequence": self._sequence, "load": load, "memory": memory, "tensors": self._tensors, **order}
        request["family"] = self._family
        request |= {"base": self._base, "lora": self._lora}
        replace(self.path / REQUEST, request)

    def _cuda(self, storage: torch.UntypedStorage) -> dict[str, Any]:
        # once per buffer: each export adds to a reference count, and the schedulers keep the memory mapped
        pointer = storage.data_ptr()
        if pointer not in self._handles:
            self._handles[pointer] = exported(storage)
        return {"kind": "cuda", **self._handles[pointer]}

    def _file(self, number: int, storage: torch.UntypedStorage) -> dict[str, Any]:
        size = storage.nbytes()
        if number not in self._files or self._files[number][1].numel() != size:
            path = self.path / f"memory.{number}.{self._sequence}"
            self._files[number] = (path, _new_file(path, size))
        path, flat = self._files[number]
        flat.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        return {"kind": "file", "path": str(path), "size": size}


def added_up(
    ranks: Iterable[Iterable[Sequence[Any]]], tensors: Iterable[Any], base: Iterable[Any], lora: Mapping[str, Any]
) -> dict[str, int]:
    """Digest of each tensor of a request: the sum over the schedulers' disjoint slices.

    A tensor whose replicas differ, or whose slices do not cover it, has no digest: it then counts as wrong.
    """
    sizes = {name: math.prod(shape) for name, _, shape, _, _ in tensors}
    sizes |= {name: math.prod(shape) for name, shape in base} | ({SCALE: 1} if lora else {})
    known: dict[tuple[Any, ...], tuple[int, int]] = {}
    sums, wrong = dict.fromkeys(sizes, 0), set[str]()
    for slices in ranks:
        for name, start, count, digest in slices:
            held = count, digest
            if (first := known.setdefault((name, *start), held)) is held:
                sizes[name] -= count
                sums[name] += digest
            elif first != held:
                wrong.add(name)
    return {name: total & MASK for name, total in sums.items() if sizes[name] == 0 and name not in wrong}


def _slices(its: RemoteUpdate) -> dict[str, Any]:
    """What a scheduler has staged for itself."""
    tensors = [[e.name, e.dtype, list(e.shape), e.bucket, e.offset] for e in its.entries]
    return {"tensors": tensors, "memory": its.memory, "starts": [list(e.start) for e in its.entries]}


def _locked(folder: Path) -> IO[bytes]:
    """A file that is locked for as long as this process lives."""
    part = folder / f"{LOCK}.part"
    file = part.open("xb")
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(folder / LOCK)  # only now: no other start may find it without its lock
    return file


def _remove_left_behind(root: Path) -> None:
    """Remove the folders of servers that were killed, which hold memory if that was within an update."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / LOCK).open("rb") as file:  # in use, not ours, or just removed by another
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _new_file(path: Path, size: int) -> torch.Tensor:
    """Flat uint8 over a new file, allocated at once: a missing page is a SIGBUS."""
    if size:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink()
            raise EngineError(
                f"{size / 1e9:.1f} GB of an update do not fit in {path.parent}: {error.strerror}; enlarge it"
                " (docker run --shm-size)"
            ) from error
        finally:
            os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write msgpack; a reader sees the old file or the new one."""
    part = path.with_suffix(".part")
    part.write_bytes(msgpack.packb(content))
    part.replace(path)


def exported(storage: torch.UntypedStorage) -> dict[str, Any]:
    """The CUDA IPC handle of a storage."""
    return dict(zip(CUDA_HANDLE, storage._share_cuda_(), strict=True))  # type: ignore[no-untyped-call]


def in_words(handle: Mapping[str, Any]) -> str:
    """A CUDA IPC handle as a text, which a message can carry."""
    return bytes(msgpack.packb(handle)).hex()


def in_bytes(text: str) -> dict[str, Any]:
    """The inverse of `in_words`."""
    return dict(msgpack.unpackb(bytes.fromhex(text)))


def folder_tensors(folder: Path, *, whole: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor of a Hugging Face folder that an update carries: a vision tower only if `whole`.

    Raises as `weight_files`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied, has_tower = decoder_of(config).get("tie_word_embeddings"), vision_of(config) is not None and not whole
    for file in sorted(set(weight_files(folder, EngineError).values())):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                is_left_out = (tied and name == HEAD) or (has_tower and name.startswith(TOWER))
                if not is_left_out and not name.endswith("rotary_emb.inv_freq"):
                    yield name, tuple(opened.get_slice(name).get_shape())
