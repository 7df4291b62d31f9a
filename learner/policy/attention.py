"""Attention over trajectories that lie one after the other in a single row, without padding.

Two implementations under names of ours, registered with transformers, which passes them what the forward was given:
`cu_seq_lens_q` ([w+1] int32, where each trajectory starts, then the total), `max_length_q` (the longest one), and
`prefixes` of a row in which answers share their prompts (learner/prefixes.py).

    VARLEN   torch's flash attention over rows of unequal length: CUDA, 16 bit
    PADDED   scaled_dot_product_attention over trajectories that are padded here and nowhere else: any device and dtype

Neither is given a mask: a token sees what stands left of it in its own trajectory, in layers with a window its own and
the window's last tokens before it, and padding stands on the right. Scores are multiplied by the family's scale, and
PADDED caps them where the family does.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from configs.errors import PackageMissing
from configs.learner import LearnerSettings
from learner.policy.divisibility import problem_with_kernel
from learner.policy.memory import PLACES_PER_TOKEN
from learner.policy.pretrained import PolicyError
from learner.prefixes import Prefixes, attend, lay_side_by_side
from learner.rows import Row
from slipstream.families.sizes import heads_of, keys_of
from slipstream.families.table import family_of

log = logging.getLogger(__name__)

VARLEN = "slipstream_varlen"
PADDED = "slipstream_padded"

WITHOUT_MEANING = frozenset(
    {"cu_seq_lens_k", "max_length_k", "position_ids", "use_cache", "is_causal", "output_attentions", "cache_position"}
)
"""Arguments of transformers that change nothing here: a row has no cache, and every token sees what is left of it."""
WARNED_ROWS = set[str]()


def choose(config: LearnerSettings, model: PretrainedConfig, device: torch.device) -> str:
    """The attention implementation of a run, VARLEN or PADDED: `auto` is VARLEN where that runs.

    Where a GPU is there or `varlen` is asked for and the kernel does not run, PADDED takes its place, and the log says
    why.

    Raises:
        ConfigError: prompts are to be shared, and the kernel lets their answers see other tokens than theirs.
    """
    if config.attention == "sdpa":
        return PADDED
    keys = keys_of(model.to_dict())
    reason = reason_against_varlen(device, config, heads_of(keys).size)
    if not reason and keys.get(cap := family_of(keys).caps[0]) is not None:
        reason = f"the kernel does not cap scores, as the model's {cap} wants"
    if reason and (config.attention == "varlen" or device.type == "cuda"):
        log.warning(
            "learner.attention: each trajectory is padded to the longest of its row, which takes memory and time: %s",
            reason,
        )
    if reason:
        return PADDED
    kernel = make_varlen()
    if config.share_prefixes is not False and (found := _seen(kernel, config.compute_dtype, device)) != SEEN:
        raise PackageMissing(
            f"learner.share_prefixes: {config.share_prefixes!r} needs a kernel that aligns its causal mask to the last"
            f" query and key; that of torch {torch.__version__} lets tokens see {found} where it should be {SEEN};"
            " take learner.share_prefixes=false, or learner.attention=sdpa"
        )
    AttentionInterface.register(VARLEN, kernel)
    return VARLEN


SEEN = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]
"""Positions that each token sees in a row of one prompt with two answers, each of two tokens."""


def _seen(kernel: Callable[..., tuple[Tensor, None]], dtype: str, device: torch.device) -> list[list[int]]:
    """SEEN as the kernel has it: equal weights, and values that name their position."""
    laid = lay_side_by_side([np.arange(4, dtype=np.int32)] * 2, [2, 2], wanted=True)
    assert laid.prefixes is not None
    total, dim = len(laid.ids), 64
    same = torch.zeros(1, 1, total, dim, dtype=getattr(torch, dtype), device=device)
    names = torch.eye(total, dim, dtype=same.dtype, device=device)[None, None]
    starts = torch.from_numpy(laid.starts.astype(np.int32)).to(device)
    given = {"cu_seq_lens_q": starts, "max_length_q": laid.longest, "prefixes": laid.prefixes.to(device)}
    out, _ = kernel(None, same, same, names, None, scaling=dim**-0.5, **given)
    return [torch.nonzero(row > 0.1)[:, 0].tolist() for row in out[0, :, 0]]


def reason_against_varlen(device: torch.device, config: LearnerSettings, head_dim: int) -> str:
    """Why torch's kernel cannot be used, or an empty string."""
    if device.type != "cuda":
        return f"the kernel needs CUDA, the learner runs on {device.type}"
    if problem := problem_with_kernel(config, head_dim):
        return problem
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, {torch.cuda.get_device_name(device)} is older"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return ""


def arguments(row: Row) -> dict[str, Any]:
    """Keyword arguments of a transformers model for a row, beside tokens and positions."""
    starts, longest = row.starts, row.longest
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return given | {"prefixes": row.prefixes}


def warn_of_padding(row: Row, attention: str) -> None:
    """Say once where a row on a GPU has more padded places than the memory budget counts."""
    places, tokens = (len(row.starts) - 1) * row.longest, row.input_ids.shape[1]
    if attention == PADDED and row.input_ids.is_cuda and places > PLACES_PER_TOKEN * tokens and not WARNED_ROWS:
        WARNED_ROWS.add(attention)
        log.warning(
            "attention pads a row of %d tokens to %d places, and the memory budget counts %d a token; lower"
            " learner.max_tokens_per_microbatch where memory runs out", tokens, places, PLACES_PER_TOKEN,
        )  # fmt: skip


def check_understood(given: Mapping[str, Any]) -> None:
    """Refuse what a model family asks of its attention and these implementations do not do.

    Raises:
        PolicyError: names the argument, such as `s_aux`, and its value.
    """
    for name, value in given.items():
        if name in WITHOUT_MEANING or value is None or (name == "dropout" and value == 0.0):
            continue
        shown = value if isinstance(value, int | float) else "a tensor of it"
        raise PolicyError(
            f"model.path: the model's attention needs {name} ({shown}), which the learner does not compute, so its"
            " logprobs would be wrong; take a model without it"
        )


def make_varlen() -> Callable[..., tuple[Tensor, None]]:
    """Attention over a packed row by torch's kernel: [1, heads, total, D] to [1, total, heads, D].

    Its signature changed: `is_causal` became a window of no tokens to the right, and grouped heads and a scale came
    later. This is looked at here, once, because the compiler of a layer cannot look.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads operators that a CPU run has no use for

    known = frozenset(inspect.signature(varlen_attn).parameters)

    def varlen(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        prefixes: Prefixes | None = None,
        sliding_window: int | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        check_understood(given)
        window = -1 if sliding_window is None else sliding_window - 1
        is_plain = window == -1 and abs(scaling * math.sqrt(query.shape[-1]) - 1) < 1e-6
        if not (is_plain or known >= {"window_size", "scale"}):
            raise PolicyError(
                f"learner.attention: the model has windows or an attention scale of its own ({scaling}), which the"
                f" kernel of torch {torch.__version__} does not have; take a newer torch, or learner.attention=sdpa"
            )
        wanted = {"is_causal": True, "window_size": (window, 0), "scale": scaling, "enable_gqa": True}
        options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
        if "enable_gqa" not in known and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))

        def segments(
            q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor | None, longest: int, longest_key: int
        ) -> Tensor:
            """[tokens, heads, D], in and out; the kernel aligns its mask to the last key."""
            ends = (starts, starts if key_starts is None else key_starts, longest, longest_key)
            kernel: Any = varlen_attn
            out: Tensor = kernel(q, k, v, *ends, **options)
            return out

        return attend(segments, q, k, v, cu_seq_lens_q, max_length_q, prefixes, dim=0)[None], None

    return varlen


def _padded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    prefixes: Prefixes | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """As varlen, in plain torch. No shape depends on data, so that it compiles."""
    check_understood(given)
    product = functools.partial(_product, scale=scaling, softcap=softcap)

    def segments(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor | None, longest: int, longest_key: int
    ) -> Tensor:
        return _pad_and_attend(q, k, v, starts, key_starts, longest, longest_key, sliding_window, product)

    out = attend(segments, query[0], key[0], value[0], cu_seq_lens_q, max_length_q, prefixes, dim=1)
    return out[None], None


def _pad_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor | None,
    longest: int,
    longest_key: int,
    window: int | None,
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """[heads, tokens, D] to [tokens, heads, D], see learner.prefixes.Kernel."""
    heads, total, dim = query.shape
    place = torch.arange(total, device=query.device)
    segment = torch.searchsorted(starts[1:], place, right=True)
    back = segment * longest + place - starts[segment]
    source = _source(starts, longest)
    key_source = source if key_starts is None else _source(key_starts, longest_key)
    mask = _seen_keys(starts, key_starts, longest, longest_key, window)

    def padded(tensor: Tensor, source: Tensor, longest: int) -> Tensor:
        """[heads, tokens, D] to [segments, heads, longest, D]."""
        return tensor.index_select(1, source).reshape(-1, starts.shape[0] - 1, longest, dim).transpose(0, 1)

    q, k, v = padded(query, source, longest), *(padded(t, key_source, longest_key) for t in (key, value))
    out = product(q, k, v, mask)
    joined: Tensor = out.transpose(1, 2).reshape(-1, heads, dim).index_select(0, back)
    return joined


def _seen_keys(
    starts: Tensor, key_starts: Tensor | None, longest: int, longest_key: int, window: int | None
) -> Tensor | None:
    """Keys that each query sees, [..., longest, longest_key] bool; None where those are all up to its own place."""
    if window is not None and window >= longest_key:
        window = None
    if key_starts is None and window is None:
        return None
    row, column = (torch.arange(length, device=starts.device) for length in (longest, longest_key))
    last = row[:, None]
    if key_starts is not None:  # what pads a query sees keys as well: a softmax of nothing has no gradient
        last = (last + (key_starts.diff() - starts.diff())[:, None, None, None]).clamp(max=longest_key - 1)
    return column <= last if window is None else (column <= last) & (column > last - window)


def _product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None) -> Tensor:
    """Attention of [segments, heads, tokens, D], causal without a mask; with `softcap` its scores are held at once."""
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = softcap * torch.tanh(q @ k.mT * (scale / softcap)).float()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def _source(starts: Tensor, longest: int) -> Tensor:
    """[segments * longest] which token stands in each place after padding.

    What stands in the padding is never seen by a token left of it, and nothing comes back from there.
    """
    begin, column = starts[:-1, None], torch.arange(longest, device=starts.device)
    return torch.where(column < starts[1:, None] - begin, begin + column, 0).flatten()


AttentionInterface.register(PADDED, _padded)
