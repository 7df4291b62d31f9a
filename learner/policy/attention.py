"""Attention over trajectories that lie one after the other in a single row, without padding.

Two implementations under names of ours, registered with transformers, which passes them what the forward was given:
`cu_seq_lens_q` ([m+1] int32, where each trajectory starts, then the total) and `max_length_q` (the longest one).

    VARLEN   torch's flash attention over rows of unequal length: CUDA, 16 bit
    PADDED   scaled_dot_product_attention over trajectories that are padded here and nowhere else: any device and dtype

Neither is given a mask: a token sees what stands left of it in its own trajectory, and padding stands on the right.
"""

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from configs.learner import LearnerSettings

log = logging.getLogger(__name__)

VARLEN = "slipstream_varlen"
PADDED = "slipstream_padded"

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head sizes that flash attention takes: multiples of 8 up to 256."""


def choose(config: LearnerSettings, model: PretrainedConfig, device: torch.device) -> str:
    """The attention implementation of a run, VARLEN or PADDED: `auto` is VARLEN where that runs.

    Where `varlen` is asked for and the kernel does not run, PADDED takes its place, and the log says why.
    """
    if config.attention == "sdpa":
        return PADDED
    head_dim = int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
    reason = reason_against_varlen(device, config.compute_dtype, head_dim)
    if reason and config.attention == "varlen":
        log.warning("learner.attention: 'varlen' cannot be had here, trajectories are padded instead: %s", reason)
    if reason:
        return PADDED
    AttentionInterface.register(VARLEN, make_varlen())
    return VARLEN


def reason_against_varlen(device: torch.device, compute_dtype: str, head_dim: int) -> str:
    """Why torch's kernel cannot be used, or an empty string."""
    if device.type != "cuda":
        return f"the kernel needs CUDA, the learner runs on {device.type}"
    if compute_dtype not in ("bfloat16", "float16"):
        return f"the kernel needs learner.compute_dtype 'bfloat16' or 'float16', it is {compute_dtype!r}"
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        return f"the kernel takes head sizes in steps of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, the model has {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, {torch.cuda.get_device_name(device)} is older"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return ""


def arguments(starts: Tensor, longest: int) -> dict[str, Any]:
    """What the forward of a transformers model must be given for a row, see learner.rows.Row."""
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def make_varlen() -> Callable[..., tuple[Tensor, None]]:
    """Attention over a packed row by torch's kernel: [1, heads, total, D] to [1, total, heads, D].

    Its signature changed: `is_causal` became a window of no tokens to the right, and grouped heads came later. This is
    looked at here, once, because the compiler of a layer cannot look.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads operators that a CPU run has no use for

    known = inspect.signature(varlen_attn).parameters
    keywords: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    knows_groups = "enable_gqa" in known
    if knows_groups:
        keywords["enable_gqa"] = True

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if abs(scaling * math.sqrt(query.shape[-1]) - 1) > 1e-6:
            raise ValueError(f"attention scale {scaling}: the kernel is used at 1/sqrt({query.shape[-1]}) only")
        if not knows_groups and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        kernel: Any = varlen_attn
        out = kernel(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **keywords)
        return out[None], None

    return attend


def _padded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As _varlen, in plain torch. No shape depends on data, so that it compiles."""
    heads, total, dim = query.shape[1:]
    starts, column = cu_seq_lens_q[:-1, None], torch.arange(max_length_q, device=query.device)
    # what stands in the padding is never seen by a token left of it, and nothing comes back from there
    source = torch.where(column < cu_seq_lens_q[1:, None] - starts, starts + column, 0).flatten()
    place = torch.arange(total, device=query.device)
    trajectory = torch.searchsorted(cu_seq_lens_q[1:], place, right=True)
    back = trajectory * max_length_q + place - cu_seq_lens_q[trajectory]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        """[1, heads, total, D] to [m, heads, longest, D]."""
        return tensor[0].index_select(1, source).reshape(-1, starts.shape[0], max_length_q, dim).transpose(0, 1)

    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(padded(query), padded(key), padded(value), is_causal=True, scale=scaling, enable_gqa=True)
    joined: Tensor = out.transpose(1, 2).reshape(-1, heads, dim).index_select(0, back)
    return joined[None], None


AttentionInterface.register(PADDED, _padded)
