"""Attention over trajectories that lie one after the other in a single row, without padding.

Two implementations under names of ours, registered with transformers, which passes them what the forward was given:
`cu_seq_lens_q` ([n+1] int32, where each trajectory starts, then the total) and `max_length_q` (the longest one).

    VARLEN   torch's flash attention over rows of unequal length: CUDA, 16 bit
    LOOP     scaled_dot_product_attention, one trajectory at a time: any device and dtype, and slow

Neither is given a mask: a token sees what stands left of it in its own trajectory.
"""

import functools
import inspect
import itertools
import logging
import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from configs.learner import LearnerSettings

log = logging.getLogger(__name__)

PADDED = "sdpa"
VARLEN = "slipstream_varlen"
LOOP = "slipstream_packed_sdpa"
PACKED = (VARLEN, LOOP)

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head sizes that flash attention takes: multiples of 8 up to 256."""


def choose(config: LearnerSettings, model: PretrainedConfig, device: torch.device) -> str:
    """The attention implementation of a run: PADDED, VARLEN or LOOP.

    `auto` is VARLEN where that runs and padding elsewhere. `varlen` is an unpadded row in any case: where the kernel
    does not run, LOOP takes its place, and the log says why.
    """
    if config.attention == "sdpa":
        return PADDED
    head_dim = int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
    reason = reason_against_varlen(device, config.compute_dtype, head_dim)
    if not reason:
        return VARLEN
    if config.attention == "auto":
        return PADDED
    log.warning("learner.attention: 'varlen' goes through trajectories one by one here, which is slow: %s", reason)
    return LOOP


def reason_against_varlen(device: torch.device, compute_dtype: str, head_dim: int) -> str:
    """Why torch's kernel cannot be used, or an empty string."""
    if device.type != "cuda":
        return f"the kernel needs CUDA, the learner runs on {device.type}"
    if compute_dtype != "bfloat16":
        return f"the kernel needs learner.compute_dtype 'bfloat16', it is {compute_dtype!r}"
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        return f"the kernel takes head sizes in steps of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, the model has {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, {torch.cuda.get_device_name(device)} is older"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return ""


def arguments(starts: Tensor, longest: int) -> dict[str, Any]:
    """What the forward of a transformers model must be given for a row, see learner.packing.Row."""
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def _varlen(
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
    """Attention over a packed row: [1, heads, total, D] to [1, total, heads, D]."""
    attend, keywords, knows_groups = _kernel()
    if not math.isclose(scaling, query.shape[-1] ** -0.5):
        raise ValueError(f"attention scale {scaling}: the kernel is used at 1/sqrt({query.shape[-1]}) only")
    if not knows_groups and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = attend(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **keywords)
    return out[None], None


@functools.cache
def _kernel() -> tuple[Any, dict[str, Any], bool]:
    """The kernel, the keywords that make it causal, and whether it groups key heads.

    Its signature changed: `is_causal` became a window of no tokens to the right, and grouped heads came later.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads operators that a CPU run has no use for

    known = inspect.signature(varlen_attn).parameters
    keywords: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        keywords["enable_gqa"] = True
    return varlen_attn, keywords, "enable_gqa" in known


def _loop(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """As _varlen, in plain torch."""
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = []
    for begin, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (tensor[:, :, begin:end] for tensor in (query, key, value))
        parts.append(attend(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(VARLEN, _varlen)
AttentionInterface.register(LOOP, _loop)
