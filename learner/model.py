"""The policy in training: a Hugging Face model sharded by FSDP2, with float32 master weights.

Each decoder layer is one FSDP unit and the root another, over a one-dimensional mesh (also of size 1, so that
one rank runs the same code as many). Gradients are summed over ranks, not averaged: the loss is already divided
by the tokens of the whole batch.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded
from torch.utils.checkpoint import checkpoint

from configs import Config
from learner import attention
from learner.logprobs import head_logprobs
from learner.packing import Microbatch
from learner.pretrained import allocate, build_empty, fill, read_config, weight_files
from learner.sharding import DTYPES, Shard, digester, digests, gather, local_of, shard_of
from weight_bus.digest import Digester, combined

KEEP_GATHERED_BYTES = 256 * 1024 * 1024
"""Models below this size stay gathered between forward and backward: memory is no concern, round trips are."""

WHOLE_GRADIENT_BYTES = 2 * 1024**3
"""Up to this size every rank adds up whole float32 gradients, and they are summed over ranks once a step. Larger ones
are summed over ranks after each microbatch, so that a rank keeps its shard only: more traffic, but those of 8B
parameters would be 33 GB on every GPU."""


class Policy:
    """Weights, forward and gather. All ranks call collective methods, in one order."""

    def __init__(self, model: Any, source: Path, mesh: DeviceMesh, device: torch.device) -> None:
        self.model = model
        self.source = source
        """The Hugging Face folder that the weights, the tokenizer and config.json came from."""
        self.device = device
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.unpadded = model.config._attn_implementation in attention.PACKED
        """Which layout of microbatches `token_logprobs` takes, see learner.packing."""
        self._digesters: dict[str, tuple[list[int], Digester]] = {}
        """By dtype: where the shards lay, and what digests them there."""
        self._shards_gradients = sum(p.numel() for p in model.parameters()) * 4 > WHOLE_GRADIENT_BYTES
        model.kept_logprobs = functools.partial(_kept_logprobs, model)
        register_fsdp_forward_method(model, "kept_logprobs")

    def token_logprobs(self, microbatch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob (with gradient) and entropy (without) of each target in the loss, 0 elsewhere. A collective.

        Returns:
            Two float32 tensors of the shape of the mask.
        """
        row, in_loss = microbatch.row, microbatch.mask > 0
        if (row is not None) != self.unpadded:
            raise ValueError(f"microbatches must be packed with unpadded={self.unpadded} for this policy's attention")
        if row is None:
            kept, keywords = torch.nn.functional.pad(in_loss, (0, 1)).flatten().nonzero()[:, 0], {}
        else:
            kept, keywords = row.kept, attention.arguments(row.starts, row.longest) | {"position_ids": row.position_ids}
        targets = microbatch.targets[in_loss]
        found = self.model.kept_logprobs(microbatch.input_ids, kept, targets, temperature, **keywords)
        nothing = torch.zeros_like(microbatch.mask)
        logprobs, entropy = (nothing.masked_scatter(in_loss, values) for values in found)
        return logprobs, entropy

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by HF name, in the order used everywhere; tied ones once."""
        # After a forward without a backward the modules still hold gathered copies. Those are no parameters.
        for unit in self._units:
            unit.reshard()
        yield from self.model.named_parameters()

    def shards(self) -> list[Shard]:
        """This rank's rows of each parameter, sharing memory."""
        return [shard_of(name, p, self.rank, self.world_size) for name, p in self.named_parameters()]

    def as_global(self, shard: Shard) -> torch.Tensor:
        """The logical tensor of a shard as torch.distributed.checkpoint knows it, sharing memory."""
        stride = torch.empty(shard.shape, device="meta").stride()
        return DTensor.from_local(
            shard.local, self.mesh, [Sharded(0)], run_check=False, shape=torch.Size(shard.shape), stride=stride
        )

    def sync_gradients(self, *, last: bool) -> None:
        """Let the next backward sum gradients over ranks if it is the step's last, or see WHOLE_GRADIENT_BYTES."""
        for unit in self._units:
            unit.set_requires_gradient_sync(last or self._shards_gradients, recurse=False)

    def local_gradients(self) -> list[torch.Tensor]:
        """This rank's rows of each parameter's gradient, sharing memory.

        Raises:
            RuntimeError: a parameter has none; the forward did not use it, or there was no backward.
        """
        gradients = {name: parameter.grad for name, parameter in self.named_parameters()}
        if missing := [name for name, gradient in gradients.items() if gradient is None]:
            raise RuntimeError(f"{missing[0]} has no gradient")
        return [local_of(gradient) for gradient in gradients.values() if gradient is not None]

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def layout(self, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of everything that named_full_tensors yields, as weight_bus.manifest.plan takes it."""
        return [(name, dtype, tuple(p.shape)) for name, p in self.named_parameters()]

    def named_full_tensors(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by HF name in the wire dtype, on every rank. A collective: exhaust it.

        With tied embeddings model.embed_tokens.weight is sent and lm_head.weight left out. Memory is bounded by
        learner.sharding.GATHER_BYTES; the tensors are copies, safe to keep.
        """
        yield from gather(self.shards(), DTYPES[dtype], self.group)

    def shard_digests(self, dtype: str) -> dict[str, int]:
        """weight_bus.digest.slice_digest of each whole tensor in `dtype`, without a gather. A collective."""
        shards = self.shards()
        places = [shard.local.data_ptr() for shard in shards]
        known = self._digesters.get(dtype)
        if known is None or known[0] != places:
            known = self._digesters[dtype] = (places, digester(shards, DTYPES[dtype]))
        return digests(shards, DTYPES[dtype], self.group, known[1])

    def parameter_digest(self) -> str:
        """One digest of the float32 master weights, equal at every world size. A collective."""
        return combined(self.shard_digests("float32"))


def build_policy(config: Config, mesh: DeviceMesh, device: torch.device) -> Policy:
    """Load model.path onto the device and shard it over the one-dimensional mesh. A collective.

    Raises:
        PolicyError: the folder, its weights or its model family cannot be trained.
    """
    folder = Path(config.model.path)
    model_config = read_config(folder)
    files = weight_files(folder)
    model = build_empty(model_config, attention.choose(config.learner, model_config, device))
    if config.learner.recompute:
        _recompute(model)
    _shard(model, mesh, DTYPES[config.learner.compute_dtype])
    allocate(model, model_config, device)
    policy = Policy(model, folder, mesh, device)
    fill(policy.shards(), files, folder)
    return policy


def _recompute(model: Any) -> None:
    """Keep of each decoder layer its input only; the backward runs its forward again.

    Around the forward itself, inside FSDP's hooks: the names of parameters stay, and it works in evaluation mode, which
    transformers' own switch does not. There is no dropout, so no random state needs to be kept.
    """
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _shard(model: Any, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Make FSDP units; on the meta device, so that nothing is allocated yet."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    size = sum(p.numel() for p in model.parameters()) * compute_dtype.itemsize
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=size > KEEP_GATHERED_BYTES)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        # Sum instead of mean; gloo has no pre-multiplied sum, so the plain one is asked for by name.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _kept_logprobs(
    model: Any, input_ids: torch.Tensor, kept: torch.Tensor, targets: torch.Tensor, temperature: float, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy [n] at the positions `kept` [n] of the flattened input_ids.

    A forward of the root unit, whose weights it uses directly: the output head sees these positions and no other.
    FSDP casts floating-point arguments of a forward to the compute dtype; there are none.
    """
    hidden = model.model(input_ids=input_ids, use_cache=False, **keywords).last_hidden_state
    return head_logprobs(hidden.flatten(0, 1)[kept], model.lm_head.weight, targets, temperature)
