"""TRL's asynchronous trainer without a GPU: its attention kernel and its table of peak FLOP/s know GPUs alone.

For tests, examples and small models. `use_cpu()` changes two names in TRL's modules for this process; nothing else of
this package does.
"""

from typing import Any

import torch


def use_cpu() -> None:
    """Give TRL's trainer an attention of torch's own, and no peak FLOP/s. Call it before the trainer is made."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing.tree_attention = tree_attention
    async_grpo_trainer.get_peak_flops_per_device = _unknown


def _unknown(accelerator: Any, dtype: str) -> None:
    """TRL then leaves model FLOPs utilisation out."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What TRL's packed rows attend to, with one dense mask over the row: memory grows with its square.

    Segment i of the row is positions cu_seqlens_q[i] to cu_seqlens_q[i+1]; its keys are those of its path from the
    root, tree_kv_index[cu_seqlens_k[i] : cu_seqlens_k[i+1]], which all lie at or before it.

    Args:
        query: [1, heads, N, d]; `key` and `value` are [1, kv_heads, N, d].

    Returns:
        ([1, N, heads, d], None).

    Raises:
        NotImplementedError: the layer has a sliding window or a soft cap.
    """
    if sliding_window or softcap:
        raise NotImplementedError("examples.trl.on_cpu: no sliding window and no soft cap; use a GPU for this model")
    length, segments = query.shape[2], tree_cu_seqlens_q.numel() - 1
    numbers = torch.arange(segments, device=query.device)
    owner = numbers.repeat_interleave(tree_cu_seqlens_q.diff())
    reach = torch.zeros(segments, length, dtype=torch.bool, device=query.device)
    reach[numbers.repeat_interleave(tree_cu_seqlens_k.diff()), tree_kv_index] = True
    mask = reach[owner].tril()
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return out.transpose(1, 2), None
