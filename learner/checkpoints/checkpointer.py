"""Checkpoints: everything a resumed learner needs, and a Hugging Face folder of the same weights.

    checkpoints/step_N/
        dcp/         float32 parameters and AdamW moments, sharded (torch.distributed.checkpoint)
        hf/          the same parameters in checkpoint.hf_dtype, for everyone else; adapters merged
        adapter/     with LoRA: the adapters for peft. dcp/ has no more than they
        critic/, reference/, teachers/NAME/   what else the run trains or refreshes (parts.py)
        state.json   step, digests, tensor layout, package versions, and what the caller gave (replay's cursor)
        COMPLETE     written last: names and sizes of all files; without it the folder does not count

`start` copies to host memory, and a thread of each rank writes while training goes on. The threads have a process group
of their own; the ranks agree in `settle`, on the main thread, that all have written. Training waits for what
is beside the policy.

A checkpoint may be loaded on another number of ranks. The learner itself draws no random numbers (dropout is off,
sampling and data order are seeded per lease), so no generator state is kept.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from configs import Config
from learner.checkpoints import damage
from learner.checkpoints.agreement import Outcome, Said, exchange, together
from learner.checkpoints.export import describe_base, problem_with_base, write_adapter_folder, write_hf_folder
from learner.checkpoints.folders import (
    MARK,
    bytes_in,
    incomplete,
    latest_complete,
    mark_complete,
    step_of,
    weights_only,
    write_json,
)
from learner.checkpoints.folders import CheckpointError as CheckpointError
from learner.checkpoints.parts import (
    HostMemory,
    Part,
    Tensors,
    check_layout,
    describe,
    for_dcp,
    load_part,
    problem_with_parts,
    save_part,
    tensors_of,
)
from learner.checkpoints.retention import Best, clear, delete, prune
from learner.layout import DTYPES, Shard
from learner.optimizer import Optimizer
from learner.policy import lora
from learner.policy.model import Policy
from slipstream.runtime.disk import RETRY_S, check_room, until_room
from slipstream.runtime.hang import expired
from slipstream.runtime.progress import Progress

FORMAT = 1
PACKAGES = ("torch", "transformers", "safetensors", "numpy")
OWN = ("format", "packages", "base", "parameter_digest", "optimizer_digest", "optimizer_steps", "layout")
"""Keys of state.json that the caller of `load` does not need."""
TURN_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint that is complete."""

    step: int
    folder: Path
    kept: list[int]
    """Steps that a run can go on from, the newest first; rank 0 knows them."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a checkpoint is made of. Training does not touch it, unless it waits."""

    step: int
    folder: Path
    tensors: Tensors
    whole: dict[str, torch.Tensor]
    """The same for DCP, sharing memory."""
    frozen: list[Shard]
    """What adapters are beside, which no step changes; none without LoRA."""
    digest: str
    state: dict[str, Any]


class _Written(NamedTuple):
    """What became of it: steps kept, bytes, and when; the first two on rank 0."""

    kept: list[int]
    num_bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    content: _Content
    started: float
    copied: float
    future: Future[_Written]

    def state(self, deadline: float) -> Said:
        """What this rank tells the others of it."""
        if not self.future.done():
            return Said(Outcome.LATE if time.monotonic() >= deadline else Outcome.GOES_ON)
        error = self.future.exception()
        return Said(Outcome.DONE) if error is None else Said(Outcome.FAILED, str(error))


class Checkpointer:
    """The checkpoints of one run: runs/<name>/checkpoints/step_N. Its methods are collectives."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        optimizer: Optimizer,
        beside: Mapping[str, Part] | None = None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`beside` is what else the run trains or refreshes, such as a critic; `meanwhile` runs in each turn of a
        wait, on every rank."""
        self._config, self._policy, self._settings = config, policy, config.checkpoint
        self._part, self._optimizer, self._beside = Part(policy, optimizer), optimizer, beside or {}
        self._parent = Path(config.run_dir) / "checkpoints"
        self._memory, self._meanwhile = HostMemory(), meanwhile
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: _Writing | None = None
        self._tried = 0.0
        """When the one that is written was begun last: checkpoint.deadline_s counts from then."""
        self.best = Best(config.checkpoint)
        """Which checkpoints are kept for their evaluation; on rank 0."""

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """Of the policy's ranks, for host memory, and for one thread at a time."""
        return self._group_of(self._policy.group)

    @cached_property
    def _copy(self) -> dist.ProcessGroup:
        """The same of those that hold one copy of the model together."""
        return self._group if self._policy.meshes.replicas == 1 else self._group_of(self._policy.meshes.replica)

    def _group_of(self, others: dist.ProcessGroup) -> dist.ProcessGroup:
        ranks, limit = dist.get_process_group_ranks(others), timedelta(seconds=self._settings.deadline_s)
        apart = len(ranks) < dist.get_world_size()  # of the first copy of the model alone
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=apart)
        return group

    @property
    def is_writing(self) -> bool:
        """A checkpoint was started, and the ranks have not agreed yet that it is complete."""
        return self._writing is not None

    def start(self, step: int, *, replay: Mapping[str, Any], digest: str = "", **more: Any) -> None:
        """Copy the state of `step`, and write it in the background.

        Without checkpoint.asynchronous the caller waits by `settle`, which has a deadline and shows replay a sign.

        Args:
            step: that the weights are of.
            replay: its cursor (rank 0's counts).
            digest: what the weights were committed with; the copy must have it. Empty is not compared.
            more: values for JSON that `load` gives back.

        Raises:
            CheckpointError: another part or the folder could not be written; raised on all ranks.
            RuntimeError: the one before is not settled.
        """
        if self._writing is not None:
            raise RuntimeError(f"checkpoint {step} starts while {self._writing.content.step} is written; settle first")
        started, policy, folder = time.monotonic(), self._policy, self._parent / f"step_{step}"
        with together(self._group, folder, "cleared"):
            if policy.rank == 0 and folder.exists():  # a save that a crash cut short, or of policies that are lost
                delete(folder)
        for name, part in self._beside.items():
            until_room(partial(self._save, part, folder / name), folder, self._meanwhile)
        tensors = self._memory.copy(tensors_of(self._part))
        own = {"step": step, "version": step, "seed": self._config.run.seed, "replay": replay}
        own |= describe_base(policy)
        content = _Content(
            step, folder, tensors, for_dcp(self._policy, tensors), policy.frozen(), digest, {**own, **more}
        )
        copied = self._tried = time.monotonic()
        self._writing = _Writing(content, started, copied, self._thread.submit(self._write, content))

    def _save(self, part: Part, folder: Path) -> None:
        with together(self._group, folder.parent, "written"):
            save_part(folder, part)

    def settle(self, *, wait: bool) -> Report | None:
        """The checkpoint that was started, once all ranks have written it; None without one, or while it is written.

        With `wait`, for checkpoint.deadline_s from its start at most, and for room on a full disk without end. Ranks
        decide alike.

        Raises:
            CheckpointError: a rank could not write, or takes longer than the deadline; names folder, rank and cause.
        """
        if self._writing is None:
            return None
        writing, goes_on = self._writing, True
        while goes_on:
            deadline = self._tried + self._settings.deadline_s
            if wait:
                self._meanwhile()
            # in short turns: a rank must not wait in a collective for another one's disk
            futures.wait([writing.future], timeout=max(0.0, min(deadline - time.monotonic(), TURN_S)) if wait else 0)
            said = exchange(writing.state(deadline), self._policy.group, self._policy.device)
            self._raise_what_failed(writing, said)
            goes_on = any(its.outcome is Outcome.GOES_ON for its in said)
            if goes_on and not wait:
                return None
        self._writing = None
        content, written = writing.content, writing.future.result()
        metrics = {
            "checkpoint/step": content.step,
            "checkpoint/copy_seconds": writing.copied - writing.started,
            "checkpoint/seconds": written.at - writing.started,
            "checkpoint/bytes": written.num_bytes,
        }
        return Report(content.step, content.folder, written.kept, metrics)

    def _raise_what_failed(self, writing: _Writing, said: list[Said]) -> None:
        folder, deadline_s = writing.content.folder, self._settings.deadline_s
        error = writing.future.exception() if writing.future.done() else None
        for rank, (outcome, text) in enumerate(said):
            if outcome is Outcome.LATE:
                key = "checkpoint.deadline_s"
                report = expired(str(folder), owed_by=(f"learner-{rank}",), waited_s=deadline_s, key=key)
                raise CheckpointError(
                    f"checkpoint {folder}: rank {rank} has not written it within {deadline_s:g} s ({key}); is the disk"
                    f" of run.dir slow, or gone?{report} [slow]"
                )
            if outcome is Outcome.FAILED:
                if isinstance(error, CheckpointError):
                    raise error
                raise CheckpointError(f"checkpoint {folder}: rank {rank} failed: {text}") from error

    def tidy(self) -> None:
        """Delete what need not stay, by all evaluations that have come; rank 0 alone, while nothing is written.

        Raises:
            OSError: a folder could not be deleted.
        """
        prune(self._parent, self.best)

    def _write(self, content: _Content) -> _Written:
        """On a thread of its own, with groups of its own: nothing here may touch what training uses."""
        return until_room(partial(self._try, content), content.folder, partial(self._clear, content.folder))

    def _clear(self, folder: Path) -> None:
        """Leave the room to others until it is tried again; what is beside the policy stays."""
        with together(self._group, folder, "cleared"):
            if self._policy.rank == 0:
                (folder / MARK).unlink(missing_ok=True)
                for name in ("dcp", "hf", "adapter"):
                    shutil.rmtree(folder / name, ignore_errors=True)
        self._tried = time.monotonic() + RETRY_S

    def _try(self, content: _Content) -> _Written:
        folder, self._tried = content.folder, time.monotonic()
        trained = sum(shard.numel for shard in self._policy.layout.shards(content.tensors.weights))
        total = trained * torch.float32.itemsize * (1 + len(content.tensors.moments))
        exported = DTYPES[self._settings.hf_dtype].itemsize
        total += (trained + sum(shard.numel for shard in content.frozen)) * exported
        with together(self._group, folder, "written"):
            if self._policy.rank == 0:
                check_room(folder.parent, total)
        what = f"writing checkpoint {folder.name}"
        with Progress(what, total=total / 1e9, unit="GB", measure=lambda: bytes_in(folder) / 1e9):
            return self._write_all(content)

    def _write_all(self, content: _Content) -> _Written:
        policy, group, folder = self._policy, self._group, content.folder
        own = describe(content.tensors, policy.layout, group, policy.frozen_digests)
        if content.digest not in ("", own["parameter_digest"]):
            raise CheckpointError(
                f"checkpoint {folder}: the copy has parameter_digest {own['parameter_digest']}, step {content.step} was"
                f" committed with {content.digest}; weights changed while they were copied"
            )
        with together(group, folder, "written"):
            dcp_save(content.whole, checkpoint_id=folder / "dcp", process_group=group)
        with together(group, folder, "written"):
            if policy.meshes.in_first_replica:
                weights = policy.layout.shards(content.tensors.weights)
                self._write_for_others(folder, weights, content.frozen)
        kept: list[int] = []
        num_bytes = 0
        with together(group, folder, "completed"):
            if policy.rank == 0:
                damage.check_shared(folder)
                about = {"format": FORMAT, "packages": {name: version(name) for name in PACKAGES}}
                write_json(folder / "state.json", {**content.state, **about, **own})
                num_bytes = mark_complete(folder)
                kept = prune(folder.parent, self.best)
        return _Written(kept, num_bytes, time.monotonic())

    def _write_for_others(self, folder: Path, weights: list[Shard], frozen: list[Shard]) -> None:
        """hf/, and adapter/ with LoRA. A collective of those that hold one copy of the model. Raises OSError."""
        policy, whole = self._policy, weights
        if policy.lora is not None:
            write_adapter_folder(policy.layout, weights, policy.lora, policy.source, folder / "adapter", self._copy)
            whole = list(lora.merged(policy.layout, frozen, weights, policy.lora, self._copy))
        write_hf_folder(policy.layout, whole, policy.source, folder / "hf", self._settings.hf_dtype, self._copy)

    def resume(self) -> dict[str, Any] | None:
        """`load` the newest complete checkpoint, or return None; clears folders that a kill has left half written."""
        found: Path | None = None
        with together(self._group, self._parent, "cleared"):
            if self._policy.rank == 0:
                found, passed_over = latest_complete(Path(self._config.run_dir))
                for line in passed_over:
                    log.warning("%s", line)
                clear(self._parent)
        step = torch.tensor(step_of(found) if found else -1, device=self._policy.device)
        dist.broadcast(step, group=self._policy.group, group_src=0)
        return self.load(self._parent / f"step_{int(step)}") if int(step) >= 0 else None

    def load(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimizers in place; returns step, version, seed, replay's cursor and `start`'s values.

        Raises:
            CheckpointError: the folder is incomplete, of another format or architecture, or what was loaded does not
                have the digests that were saved.
        """
        with together(self._group, folder, "loaded"):
            reason = incomplete(folder) or ("it has weights only" if weights_only(folder) else "")
            if reason:
                raise CheckpointError(f"checkpoint {folder} is incomplete: {reason}")
            state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            if state.get("format") != FORMAT:
                found = state.get("format")
                raise CheckpointError(f"checkpoint {folder} has format {found}, this version reads {FORMAT}")
            if problem := problem_with_base(state, self._policy) or problem_with_parts(folder, self._config):
                raise CheckpointError(f"checkpoint {folder} {problem}")
            check_layout(folder, state["layout"], self._policy)
        tensors = tensors_of(self._part)
        with together(self._group, folder, "loaded"), Progress(f"loading checkpoint {folder.name}"):
            try:
                dcp_load(for_dcp(self._policy, tensors), checkpoint_id=folder / "dcp", process_group=self._group)
            except CheckpointException as error:
                why = f"{damage.unreadable(folder, error)}; {damage.remedy(folder)}"
                raise CheckpointError(f"checkpoint {folder}: {why}") from error
        for name, part in self._beside.items():
            with together(self._group, folder, "loaded"):
                load_part(folder, name, part)
        self._check_loaded(folder, state)
        return {key: value for key, value in state.items() if key not in OWN}

    def _check_loaded(self, folder: Path, saved: Mapping[str, Any]) -> None:
        self._optimizer.set_steps(saved["optimizer_steps"])
        found = describe(tensors_of(self._part), self._policy.layout, self._policy.group, self._policy.frozen_digests)
        for key in ("parameter_digest", "optimizer_digest"):
            if found[key] != saved[key]:
                raise CheckpointError(
                    f"checkpoint {folder}: {key} is {found[key]} after loading, {saved[key]} was saved;"
                    f" {damage.damaged(folder) or 'its files are readable'}; {damage.remedy(folder)}"
                )
