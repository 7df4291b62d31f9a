"""Context parallelism: ranks divide a row's tokens, and exchange them for heads.

Each rank computes a stretch of the row, the same number of tokens on all. In every layer one all-to-all gives each rank
all tokens of as many heads, the attention of the run goes over the whole row as ever, and a second one gives the
tokens back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). Key/value heads that are fewer than the ranks are
repeated. Logprobs come together again before the loss, so that losses over whole trajectories see them whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "slipstream_context"


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that divide a row, and the attention that each computes over its heads."""

    group: dist.ProcessGroup
    attention: str
    """Name of the implementation, see learner/policy/attention.py."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def stretch(self, tokens: int) -> int:
        """Tokens of a row that each rank computes; the last ranks fill up with padding."""
        return -(-tokens // self.size)

    def part_of(self, tokens: Tensor) -> Tensor:
        """[1, stretch] this rank's part of [1, total]; padding is 0."""
        total = tokens.shape[1]
        each = self.stretch(total)
        padded = torch.nn.functional.pad(tokens, (0, each * self.size - total))
        return padded[:, self.rank * each : (self.rank + 1) * each]

    def own(self, positions: Tensor, total: int) -> Tensor:
        """Indices of the `positions` [n] in this rank's part of a row. Synchronises."""
        return torch.nonzero(positions // self.stretch(total) == self.rank)[:, 0]

    def join(self, values: Tensor, own: Tensor, number: int) -> Tensor:
        """[..., number] from the values [..., len(own)] that each rank has; the gradient goes back to each."""
        joined: Tensor = _Join.apply(values, own, number, self.group)  # type: ignore[no-untyped-call]
        return joined


class _Join(torch.autograd.Function):
    """Values that all ranks share: a gradient is that of any rank, not summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, number: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(*values.shape[:-1], number)
        whole[..., own] = values
        if number:
            dist.all_reduce(whole, group=group)  # the others have 0 there
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None, None]:
        (own,) = ctx.saved_tensors
        return grads[0][..., own], None, None, None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context,
    row_tokens: int,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention over the whole row: [1, heads, stretch, D] to [1, stretch, heads, D]. A collective."""
    ranks, heads = context.size, query.shape[1]
    if (repeats := ranks // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    sizes = [tensor.shape[1] // ranks for tensor in (query, key, value)]
    # [ranks, heads of each, stretch, D]: what goes to a rank lies together, queries, keys and values in one exchange
    outgoing = torch.cat([tensor.reshape(ranks, -1, *tensor.shape[2:]) for tensor in (query, key, value)], dim=1)
    arrived = _exchanged(outgoing, context).transpose(0, 1).flatten(1, 2)[None, :, :row_tokens]
    q, k, v = torch.split(arrived, sizes, dim=1)
    out, _ = ALL_ATTENTION_FUNCTIONS[context.attention](module, q, k, v, attention_mask, **given)
    stretch = context.stretch(row_tokens)
    padded = torch.nn.functional.pad(out[0], (0, 0, 0, 0, 0, ranks * stretch - row_tokens))
    # [ranks, stretch, heads of each, D] by token to [ranks, ...] by head
    back = _exchanged(padded.reshape(ranks, stretch, *padded.shape[1:]), context)
    return back.transpose(0, 1).reshape(1, stretch, heads, -1), None


def _exchanged(tensor: Tensor, context: Context) -> Tensor:
    """Block r of dimension 0 goes to rank r, and what rank r sent here takes its place."""
    return all_to_all_single_autograd(tensor.contiguous(), None, None, context.group)


AttentionInterface.register(NAME, attend)
