"""A mixture of experts in a decoder layer: each token goes to the k experts that its router gives the most weight.

The router's logits and probabilities are float32, of weights in the compute dtype, which an engine has. Tokens are
sorted by expert, so that the experts of a layer are two grouped products whatever their loads.

A token's weight of an expert is multiplied in before the second product, not after it. That is the same sum, and a
backward need not keep what the product made, k hidden states a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from learner.policy.moe.exchange import Exchange
from learner.policy.moe.sorting import Gathered, Summed, by_expert
from learner.policy.tensor_parallel import local_weight


class Experts(torch.nn.Module):
    """Gated experts of one layer, or a rank's block of them."""

    def __init__(self, theirs: Any) -> None:
        """Take over the parameters of transformers' module: [E, 2I, H] and [E, H, I]."""
        super().__init__()
        self.gate_up_proj, self.down_proj, self.activation = theirs.gate_up_proj, theirs.down_proj, theirs.act_fn
        self.products: Callable[..., Tensor] = products
        """May be compiled."""

    def forward(self, tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """[S, H] of tokens [S, H] with weights [S], sorted by expert; those of expert e end at `ends[e]`."""
        up, down = local_weight(self.gate_up_proj).mT, local_weight(self.down_proj).mT
        return self.products(tokens, weights, ends, up, down, self.activation)


def products(
    tokens: Tensor, weights: Tensor, ends: Tensor, up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """See Experts.forward; `up` is [E, H, 2I] and `down` [E, I, H]."""
    gate, value = grouped_mm(tokens, up, offs=ends).float().chunk(2, dim=-1)
    inner = activation(gate) * value * weights[:, None]
    return grouped_mm(inner.to(tokens.dtype), down, offs=ends)


class Mixture(torch.nn.Module):
    """Router and experts of one layer, under the names that transformers gives their parameters.

    What a row brings and what it leaves are tensors of the module and not arguments, for a decoder layer of
    transformers passes none on; `Mixtures` sets and reads them.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.experts, self.gate = Experts(theirs.experts), theirs.gate
        self.top_k, self.normalizes = int(self.gate.top_k), bool(self.gate.norm_topk_prob)
        self.num_experts = len(self.gate.weight)
        self.exchange: Exchange | None = None
        """Where ranks divide the experts among them."""
        self.given: Tensor | None = None
        """[T, k] experts of each token, in place of the router's own choice."""
        self.counted: Tensor | None = None
        """[T] bool, tokens of which overridden choices are counted; all where it is None."""
        self.aux_share: Tensor | None = None
        """0-dim, the factor of the layer's auxiliary loss in the loss of the batch."""
        self.chosen: Tensor | None = None
        """[T, k] int64, filled with the experts that each token went to."""
        self.left = torch.zeros(0)
        """[E + 2] float32, filled with tokens of each expert, the auxiliary loss, and choices that `given` overrode."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] of hidden states."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        probabilities = Logits.apply(tokens, self.gate.weight).softmax(dim=-1)  # type: ignore[no-untyped-call]
        own = probabilities.detach().topk(self.top_k, dim=-1).indices
        experts = own if self.given is None else self.given
        order, places, ends = by_expert(experts.reshape(-1), self.num_experts)
        weights = self._weigh(probabilities, experts, own, ends)
        sorted_tokens = Gathered.apply(tokens, order, places, self.top_k)  # type: ignore[no-untyped-call]
        sorted_weights = Gathered.apply(weights.reshape(-1, 1), order, places, 1)  # type: ignore[no-untyped-call]
        if self.exchange is None:
            made = self.experts(sorted_tokens, sorted_weights[:, 0], ends)
        else:
            made = self.exchange(self.experts, sorted_tokens, sorted_weights[:, 0], ends)
        total: Tensor = Summed.apply(made, order, places, self.top_k)  # type: ignore[no-untyped-call]
        return total.view(hidden.shape)

    def _weigh(self, probabilities: Tensor, experts: Tensor, own: Tensor, ends: Tensor) -> Tensor:
        """[T, k] float32 weights of a token's experts, with the gradient of the auxiliary loss."""
        weights = probabilities.gather(1, experts)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        loads = ends.diff(prepend=ends.new_zeros(1)).float()
        aux = self.num_experts * (loads / len(experts) * probabilities.mean(dim=0)).sum()
        self._leave(experts, own, loads, aux.detach())
        if self.aux_share is None:
            return weights
        carrying: Tensor = WithLoss.apply(weights, self.aux_share * aux)  # type: ignore[no-untyped-call]
        return carrying

    @torch.no_grad()
    def _leave(self, experts: Tensor, own: Tensor, loads: Tensor, aux: Tensor) -> None:
        # written over, not added up: a layer that is recomputed comes here twice
        overridden = torch.zeros_like(aux)
        if self.given is not None:
            differs = (own[:, :, None] != experts[:, None, :]).all(dim=-1)
            overridden = (differs if self.counted is None else differs & self.counted[:, None]).sum().float()
        self.left.copy_(torch.cat([loads, aux[None], overridden[None]]))
        if self.chosen is not None:
            self.chosen.copy_(experts)


class Logits(torch.autograd.Function):
    """[T, E] float32 of the router: 16-bit tokens and weights are multiplied exactly and added up in float32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        if tokens.is_cuda and tokens.dtype != torch.float32:
            return torch.mm(tokens, weight.T, out_dtype=torch.float32)
        return tokens.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        grad = grads[0].to(tokens.dtype)
        of_tokens, of_weight = ctx.needs_input_grad
        return grad @ weight if of_tokens else None, grad.T @ tokens if of_weight else None


class WithLoss(torch.autograd.Function):
    """A value as it is, whose backward is also that of a loss: a layer need not hand its loss to the end."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), device=grads[0].device)
