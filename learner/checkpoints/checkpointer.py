"""Checkpoints: everything a resumed learner needs, and a Hugging Face folder of the same weights.

    checkpoints/step_N/
        dcp/         float32 parameters and AdamW moments, sharded (torch.distributed.checkpoint)
        hf/          the same parameters, for everyone else; adapters merged
        adapter/     with LoRA: the adapters for peft. dcp/ has no more than they
        critic/, reference/   what else the run trains or refreshes (learner/beside/saving.py)
        state.json   step, digests, tensor layout, package versions, and what the caller gave (replay's cursor)
        COMPLETE     written last: names and sizes of all files; without it the folder does not count

A checkpoint may be loaded on another number of ranks. The learner itself draws no random numbers (dropout is off,
sampling and data order are seeded per lease), so no generator state is kept.
"""

import io
import json
import logging
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from configs import Config
from learner.beside.saving import Part
from learner.checkpoints.adapter import describe_base, problem_with_base, write_adapter_folder
from learner.checkpoints.export import sync_file, write_hf_folder, write_json
from learner.checkpoints.folders import incomplete, latest_complete, numbered, step_of
from learner.optimizer import MOMENTS, Optimizer
from learner.policy.model import Policy
from learner.policy.sharding import digests
from weight_bus.digest import combined

FORMAT = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")

log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or loaded; names the folder and the cause."""


class Checkpointer:
    """The checkpoints of one run: runs/<name>/checkpoints/step_N. Methods but `kept` are collectives."""

    def __init__(self, config: Config, policy: Policy, optimizer: Optimizer, parts: Sequence[Part] = ()) -> None:
        self._config, self._policy, self._optimizer, self._parts = config, policy, optimizer, parts
        self._run_dir = Path(config.run_dir)
        self._parent = self._run_dir / "checkpoints"

    def save(self, step: int, *, replay: dict[str, Any], guards: Mapping[str, Any] | None = None) -> Path:
        """Write the checkpoint of `step`, then delete all but the newest checkpoint.keep.

        Args:
            step: the last that was made.
            replay: its cursor, from rank 0.
            guards: their state, the same on all ranks.

        Raises:
            CheckpointError: writing failed on some rank; raised on all of them.
        """
        folder, policy = self._parent / f"step_{step}", self._policy
        with _together(policy, folder, "cleared"):
            if policy.rank == 0 and folder.exists():  # a save that a crash cut short
                (folder / "COMPLETE").unlink(missing_ok=True)
                shutil.rmtree(folder)
        own = _describe(policy, self._optimizer)
        with _together(policy, folder, "written"):
            tensors = _tensors(policy, self._optimizer)
            dcp_save(tensors, checkpoint_id=folder / "dcp", process_group=policy.group)
        for part in self._parts:
            with _together(policy, folder, "written"):
                part.save(folder)
        with _together(policy, folder, "written"):
            write_hf_folder(policy, policy.source, folder / "hf", "float32")
        if policy.lora is not None:
            with _together(policy, folder, "written"):
                write_adapter_folder(policy, folder / "adapter")
        with _together(policy, folder, "completed"):
            if policy.rank == 0:
                _check_shards(folder)
                state = {"step": step, "version": step, "seed": self._config.run.seed, "replay": replay}
                state |= {"guards": guards} if guards is not None else {}
                write_json(folder / "state.json", {**state, **own})
                _complete(folder)
                _prune(folder.parent, self._config.checkpoint.keep)
        return folder

    def kept(self) -> list[int]:
        """Steps of the complete checkpoints, the newest first."""
        return [step_of(folder) for folder in numbered(self._parent) if not incomplete(folder)]

    def resume(self) -> dict[str, Any] | None:
        """`load` the newest complete checkpoint, or return None; logs the incomplete ones."""
        found: Path | None = None
        if self._policy.rank == 0:
            found, passed_over = latest_complete(self._run_dir)
            for line in passed_over:
                log.warning("%s", line)
        step = torch.tensor(step_of(found) if found else -1, device=self._policy.device)
        dist.broadcast(step, group=self._policy.group, group_src=0)
        return self.load(self._parent / f"step_{int(step)}") if int(step) >= 0 else None

    def load(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimizer in place; returns step, version, seed and replay's cursor.

        Raises:
            CheckpointError: the folder is incomplete, of another format or architecture, or what was loaded does not
                have the digests that were saved.
        """
        policy, optimizer = self._policy, self._optimizer
        with _together(policy, folder, "loaded"):
            reason = incomplete(folder)
            if reason:
                raise CheckpointError(f"checkpoint {folder} is incomplete: {reason}")
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            if state.get("format") != FORMAT:
                found = state.get("format")
                raise CheckpointError(f"checkpoint {folder} has format {found}, this version reads {FORMAT}")
            base_problem = problem_with_base(state, policy)
            if base_problem:
                raise CheckpointError(f"checkpoint {folder} {base_problem}")
            _check_layout(folder, state["layout"], policy)
        with _together(policy, folder, "loaded"):
            try:
                dcp_load(_tensors(policy, optimizer), checkpoint_id=folder / "dcp", process_group=policy.group)
            except CheckpointException as error:
                why = f"{_unreadable(folder, error)}; {_remedy(folder)}"
                raise CheckpointError(f"checkpoint {folder}: {why}") from error
        for part in self._parts:
            with _together(policy, folder, "loaded"):
                part.load(folder)
        optimizer.set_steps(state["optimizer_steps"])
        optimizer.scale.load(state.get("loss_scale"))
        found = _describe(policy, optimizer)
        for key in ("parameter_digest", "optimizer_digest"):
            if found[key] != state[key]:
                raise CheckpointError(
                    f"checkpoint {folder}: {key} is {found[key]} after loading, {state[key]} was saved;"
                    f" {_damaged(folder) or 'its files are readable'}; {_remedy(folder)}"
                )
        return {key: value for key, value in state.items() if key not in found}


def _check_shards(folder: Path) -> None:
    """Raises CheckpointError when another rank's shards are not visible here."""
    stored = FileSystemReader(folder / "dcp").read_metadata().storage_data
    away = sorted({f.relative_path for f in stored.values() if not (folder / "dcp" / f.relative_path).is_file()})
    if away:
        raise CheckpointError(f"{folder}: dcp/{away[0]} is not here; run.dir must be shared by all learner nodes")


def _unreadable(folder: Path, error: CheckpointException) -> str:
    """Which file of the checkpoint could not be read, and why."""
    cause, frames = next(iter(error.failures.values()))
    no_index = "metadata" in str(cause) or any(frame.name == "read_metadata" for frame in frames)
    damage = "dcp/.metadata is damaged" if no_index else _damaged(folder)
    return damage or f"dcp/ could not be read ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"


def _damaged(folder: Path) -> str:
    """The first damaged file, found by the CRC stored with each tensor; empty for none."""
    for index, place in FileSystemReader(folder / "dcp").read_metadata().storage_data.items():
        with (folder / "dcp" / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            part = io.BytesIO(file.read(place.length))
        try:
            with zipfile.ZipFile(part) as members:
                damaged = members.testzip() is not None
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
            damaged = True
        if damaged:
            return f"dcp/{place.relative_path} is damaged at {index.fqn}"
    return ""


def _remedy(folder: Path) -> str:
    """How to continue without this checkpoint."""
    older = [other for other in numbered(folder.parent) if step_of(other) < step_of(folder) and not incomplete(other)]
    there = older[0].name if older else "the initial model, if the journal has every step"
    return f"restore it from a copy, or move {folder.name} away: then --resume goes on from {there}"


def _tensors(policy: Policy, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Tensors for DCP; they share memory with the parameters and moments."""
    tensors = {f"model.{shard.name}": policy.as_global(shard) for shard in policy.shards()}
    for kind in MOMENTS:
        tensors |= {f"optimizer.{kind}.{shard.name}": policy.as_global(shard) for shard in optimizer.moments(kind)}
    return tensors


def _describe(policy: Policy, optimizer: Optimizer) -> dict[str, Any]:
    """What state.json says of the weights and moments (a collective)."""
    moments = [shard for kind in MOMENTS for shard in optimizer.moments(kind)]
    moments = [replace(shard, name=f"{i}.{shard.name}") for i, shard in enumerate(moments)]
    return {
        "format": FORMAT,
        "parameter_digest": policy.parameter_digest(),
        "optimizer_digest": combined(digests(moments, torch.float32, policy.group)),
        "optimizer_steps": optimizer.num_steps,
        "loss_scale": optimizer.scale.state(),
        "layout": [[name, list(shape)] for name, _, shape in policy.layout("float32")],
        **describe_base(policy),
        "packages": {name: version(name) for name in PACKAGES},
    }


def _check_layout(folder: Path, saved: list[list[Any]], policy: Policy) -> None:
    mine = {name: list(shape) for name, _, shape in policy.layout("float32")}
    theirs = {name: shape for name, shape in saved}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of another architecture: {name} is {theirs.get(name)} there"
                f" and {mine.get(name)} in {policy.source}"
            )


@contextmanager
def _together(policy: Policy, folder: Path, done: str) -> Iterator[None]:
    """Raise a failure of one rank on all ranks, instead of leaving the others waiting."""
    cause: BaseException | None = None
    try:
        yield
    except (OSError, ValueError, KeyError, CheckpointError, CheckpointException) as error:
        cause = error
    failed = torch.tensor([cause is not None], dtype=torch.int32, device=policy.device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=policy.group)
    if isinstance(cause, CheckpointError):
        raise cause
    if cause is not None:
        raise CheckpointError(f"checkpoint {folder} could not be {done}: {cause}") from cause
    if int(failed):
        raise CheckpointError(f"checkpoint {folder} could not be {done} on another rank; its log says why")


def _complete(folder: Path) -> None:
    inside = sorted(folder.rglob("*"))
    for path in (*inside, folder):
        sync_file(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in inside if path.is_file()}
    write_json(folder / "COMPLETE", {"files": sizes})
    sync_file(folder)
    sync_file(folder.parent)


def _prune(parent: Path, keep: int) -> None:
    complete = [folder for folder in numbered(parent) if (folder / "COMPLETE").is_file()]
    for folder in complete[keep:]:
        # First the mark: a crash in the middle must not leave a folder that looks complete.
        (folder / "COMPLETE").unlink()
        shutil.rmtree(folder)
