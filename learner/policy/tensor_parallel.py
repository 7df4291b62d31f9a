"""Tensor parallelism: ranks of a group divide heads, MLP and vocabulary.

The division is Megatron's (Shoeybi et al. 2019, arXiv 1909.08053), in the styles of torch.distributed.tensor.parallel:
what comes out of q, k, v, gate and up is divided by columns, what goes into o and down by rows, so that a layer sums
over the group twice in the forward and twice in the backward. Between layers every rank has the whole hidden states.
Embedding and output head hold a part of the vocabulary each; logits are never exchanged (learner/policy/logprobs.py).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from slipstream.families.record import DIVIDED
from slipstream.families.sizes import Sizes


def parallelize(transformer: Any, mesh: DeviceMesh) -> None:
    """Divide a transformers model on the meta device over `mesh`, in place."""
    plan = _plan(Sizes.of(transformer.config.to_dict()))
    for layer in transformer.model.layers:
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    embedding = transformer.model.embed_tokens = VocabularyEmbedding(transformer.model.embed_tokens, mesh)
    head = transformer.lm_head
    head.vocabulary = mesh.get_group()
    head.weight = embedding.weight if transformer.config.tie_word_embeddings else _rows_of(head.weight, mesh)


def _plan(sizes: Sizes) -> dict[str, ParallelStyle]:
    """Of a layer. Each rank norms its own heads, so the gradient of such a norm's weight is the sum over the group."""
    whole, styles = Replicate(), dict[str, ParallelStyle]()
    for weight in sizes.layer(has_experts=False):
        module = weight.name.rpartition(".")[0]
        if weight.columns:
            styles[module] = ColwiseParallel() if weight.rows in DIVIDED else RowwiseParallel()
        elif weight.rows == "head":
            styles[module] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        # one input for all products that follow, so that its gradient is summed over the group once
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **styles,
    }


def _rows_of(weight: Tensor, mesh: DeviceMesh) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(weight, mesh, [Sharded(0)], src_data_rank=None))


class VocabularyEmbedding(torch.nn.Module):
    """An embedding whose rows are divided over a group; hidden states are whole."""

    def __init__(self, whole: torch.nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = _rows_of(whole.weight, mesh)
        rows = whole.num_embeddings // mesh.size()
        self.first, self.padding_idx = mesh.get_local_rank() * rows, whole.padding_idx
        self.factor = getattr(whole, "scalar_embed_scale", None)
        """Of Gemma's embedding."""
        self.group = mesh.get_group()

    def forward(self, ids: Tensor) -> Tensor:
        """[..., H] of int64 [...]."""
        weight = local_weight(self.weight)
        mine = ids - self.first
        inside = (mine >= 0) & (mine < len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        rows = torch.nn.functional.embedding(torch.where(inside, mine, 0), weight, padding)
        summed: Tensor = _Sum.apply(torch.where(inside[..., None], rows, 0.0), self.group)  # type: ignore[no-untyped-call]
        return summed if self.factor is None else summed * float(torch.tensor(self.factor, dtype=summed.dtype))


def local_weight(weight: Tensor) -> Tensor:
    """This rank's part of a weight, with its gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Sum(torch.autograd.Function):
    """The sum over a group; its gradient is that of each term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = term.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None
