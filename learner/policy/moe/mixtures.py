"""All mixtures of a model: what a row brings to them, and what they measure over an update."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from learner.policy.moe.exchange import Exchange
from learner.policy.moe.mixture import Mixture
from learner.rows import BatchError, Row


class Mixtures:
    """The mixtures of a model by decoder layer; `Policy.forward` begins each row here."""

    def __init__(self, by_layer: Mapping[int, Mixture], num_layers: int, aux_coef: float) -> None:
        self.by_layer, self._num_layers, self._aux_coef = by_layer, num_layers, aux_coef
        one = next(iter(by_layer.values()))
        self.num_experts, self.top_k = one.num_experts, one.top_k
        self.records = False
        """Whether `chosen` is kept of each row."""
        self._counted: Tensor | None = None
        """[T] bool of the row, tokens whose next is in the loss: of these overridden choices are counted."""
        self._left: Tensor | None = None
        """[layers with experts, E + 2] of the row, see Mixture.left."""
        self._sums: Tensor | None = None
        """The same over rows, float64, and a last column: given choices."""

    @classmethod
    def adopt(cls, transformer: Any, aux_coef: float) -> "Mixtures | None":
        """Put a Mixture in place of each of transformers' on the meta device; None where the model has none.

        Args:
            transformer: a causal language model of transformers.
            aux_coef: algorithm.router_aux_loss_coef.
        """
        by_layer = {}
        for number, layer in enumerate(transformer.model.layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp = by_layer[number] = Mixture(layer.mlp)
        return cls(by_layer, len(transformer.model.layers), aux_coef) if by_layer else None

    def divide(self, mesh: DeviceMesh) -> None:
        """Leave each rank of the mesh its block of the experts of every layer; on the meta device."""
        exchange = Exchange(mesh)
        for mixture in self.by_layer.values():
            mixture.exchange = exchange
            for name, whole in list(mixture.experts.named_parameters()):
                block = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                setattr(mixture.experts, name, torch.nn.Parameter(block, requires_grad=whole.requires_grad))

    def begin(self, row: Row) -> None:
        """Set what the forward of this row needs.

        Raises:
            BatchError: the row's routing does not fit it or the model.
        """
        tokens, device = row.input_ids.shape[1], row.input_ids.device
        routing, shape = row.routing, (tokens, self._num_layers, self.top_k)
        if routing is not None and tuple(routing.shape) != shape:
            raise BatchError(
                f"microbatch {row.number}: has routing of {tuple(routing.shape)} tokens, layers and experts, where"
                f" the row and the model have {shape}"
            )
        if self._left is None:
            self._left = torch.zeros(len(self.by_layer), self.num_experts + 2, device=device)
        self._counted = None
        if routing is not None:  # the last token of a trajectory was never read, and was given what stands before it
            self._counted = torch.zeros(tokens, dtype=torch.bool, device=device).index_fill_(0, row.kept, True)
        share = self._aux_coef / len(self.by_layer) * row.weights.sum() if self._aux_coef else None
        for left, (layer, mixture) in zip(self._left, self.by_layer.items(), strict=True):
            mixture.given = None if routing is None else routing[:, layer].long()
            mixture.chosen = torch.empty(tokens, self.top_k, dtype=torch.int64, device=device) if self.records else None
            mixture.aux_share, mixture.left, mixture.counted = share, left, self._counted

    @property
    def chosen(self) -> Tensor:
        """[T, layers, k] int64, where the tokens of the last row went: `Row.routing` for the same again.

        Layers without experts have zeros. `records` was set before that row.
        """
        found = {layer: mixture.chosen for layer, mixture in self.by_layer.items() if mixture.chosen is not None}
        absent = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(layer, absent) for layer in range(self._num_layers)], dim=1)

    def add(self, row: Row) -> None:
        """Count in what the row's forward has left; a row without trajectories counts nothing."""
        assert self._left is not None, "begin comes before"
        left = torch.nn.functional.pad(self._left.double(), (0, 1))
        left[:, -3] *= row.weights.sum()
        if self._counted is not None:
            left[:, -1] = self._counted.sum() * self.top_k
        if not len(row.lengths):
            left.zero_()
        self._sums = left if self._sums is None else self._sums + left

    def take(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Measurements over the rows since the last call, of all ranks. A collective."""
        sums, self._sums = self._sums, None
        assert sums is not None, "an update has at least one row"
        dist.all_reduce(sums, group=group)
        loads, (aux, overridden, given) = sums[:, :-3], sums[:, -3:].mean(dim=0).tolist()
        violation = loads.max(dim=1).values / loads.mean(dim=1).clamp(min=1e-9) - 1
        return {
            "moe_updates": 1.0,
            "moe_violation": float(violation.mean()),
            "moe_violation_max": float(violation.max()),
            "moe_idle": float((loads == 0).double().mean()),
            "moe_aux": aux,
            "moe_overridden": overridden,
            "moe_given": given,
        }
