"""The forward of the torch engine on fused weights: batched prefill, batched decode, KV cache.

Shapes: n rows (running answers), P prompts, T cached positions, H query heads, K KV heads, D head_dim. The running
answers are always rows 0..n-1 of the cache, so that the decode step reads it through views and never gathers.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rollout_server.engines.torch.family import ModelSpec
from rollout_server.engines.torch.rows import Look
from rollout_server.engines.torch.weights import Layer, LiveWeights

LENGTH_BUCKET = 16
SCORED_ROWS = 64
"""Tokens whose logits are there at once while they are scored."""
Routed = list[torch.Tensor] | None


def _bucketed(length: int) -> int:
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class KVCache:
    """Keys and values [layer, 2, row, K, T, D]; doubles up to its limits."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, max_rows: int, max_length: int) -> None:
        self._max_rows = max_rows
        self._max_length = _bucketed(max_length)
        self.data = torch.zeros((spec.num_layers, 2, 0, spec.num_kv_heads, 0, spec.head_dim), dtype=dtype)

    @property
    def length(self) -> int:
        """Positions that fit now."""
        return self.data.shape[4]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; what is cached stays."""
        layers, two, held_rows, heads, held_length, dim = self.data.shape
        if rows <= held_rows and length <= held_length:
            return
        new_rows = held_rows if rows <= held_rows else min(self._max_rows, max(rows, 2 * held_rows))
        wanted = max(_bucketed(length), 2 * held_length)
        new_length = held_length if length <= held_length else min(self._max_length, wanted)
        data = torch.zeros((layers, two, new_rows, heads, new_length, dim), dtype=self.data.dtype)
        data[:, :, :held_rows, :, :held_length] = self.data
        self.data = data

    def clear(self, start: int, stop: int) -> None:
        """Zero rows [start, stop): a left-over NaN times a masked weight is NaN."""
        self.data[:, :, start:stop].zero_()

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        """Copy the first `length` positions of the rows `source` to the rows `target`."""
        view = self.data[..., :length, :]
        view[:, :, torch.from_numpy(target)] = view[:, :, torch.from_numpy(source)]


class TorchModel:
    """Stateless forward; one model serves live and pinned weights, which are arguments."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, max_context: int) -> None:
        self.spec = spec
        self._rows_per_kv = spec.num_heads // spec.num_kv_heads
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), spec.inv_freq)
        cos, sin = angles.cos() * spec.rope_scaling, angles.sin() * spec.rope_scaling
        # rotate_half(x) * sin is (x2, x1) * (-sin, sin): the sign lives in the table, one op less per layer.
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def decode(
        self,
        weights: LiveWeights,
        cache: KVCache,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        shift: NDArray[np.int64],
        routed: Routed = None,
    ) -> torch.Tensor:
        """One token for every running row; its KV is written at its position.

        Args:
            tokens: [n] last token of each row, rows 0..n-1 of the cache.
            positions: [n] where each of them lies.
            shift: [n] what its rotary position is more; below 0 after pictures.
            routed: gets the experts [n, k] of each layer, zeros of one that has none.

        Returns:
            float32 logits [n, V].
        """
        n, heads, kv_heads, dim = len(tokens), self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        length = min(cache.length, _bucketed(int(positions.max()) + 1))
        position = torch.from_numpy(positions)
        x = F.embedding(torch.from_numpy(tokens), weights.embed)
        turned = position + torch.from_numpy(shift)
        cos, sin = self._cos[turned].unsqueeze(1), self._sin[turned].unsqueeze(1)
        hidden = torch.arange(length) > position.unsqueeze(1)
        mask = torch.zeros(n, length, dtype=x.dtype).masked_fill_(hidden, float("-inf")).view(n, 1, 1, length)
        slots = torch.arange(n * kv_heads).view(n, kv_heads) * cache.length + position.unsqueeze(1)
        slots = slots.view(-1)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = cache.data[index, 0], cache.data[index, 1]
            keys.view(-1, dim).index_copy_(0, slots, k.reshape(-1, dim))
            values.view(-1, dim).index_copy_(0, slots, v.reshape(-1, dim))
            # The query heads that share a KV head stand in as its query positions: no copy of K and V per head.
            mixed = F.scaled_dot_product_attention(
                q.view(n, kv_heads, self._rows_per_kv, dim), keys[:n, :, :length], values[:n, :, :length], mask
            )
            x = self._after_attention(layer, x, mixed.reshape(n, heads * dim), routed)
        return self._logits(weights, x)

    def prefill(
        self,
        weights: LiveWeights,
        cache: KVCache,
        prompts: list[NDArray[np.int32]],
        *,
        first_row: int,
        prompt_of_row: list[int],
        looks: Sequence[Look | None],
        routed: Routed = None,
    ) -> torch.Tensor:
        """Write the KV of P whole prompts to the rows from `first_row` on.

        Args:
            prompts: padded here on the right (causal attention never looks there).
            first_row: row of the first answer.
            prompt_of_row: which prompt each row gets; answers to one prompt share its forward.
            looks: pictures of each prompt.
            routed: gets the experts [P * longest, k] of each layer, zeros of one that has none.

        Returns:
            float32 logits [P, V] after the last token of each prompt.
        """
        longest, last_row = max(map(len, prompts)), first_row + len(prompt_of_row)
        source = torch.tensor(prompt_of_row)

        def keep(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            cache.data[index, 0, first_row:last_row, :, :longest] = k[source]
            cache.data[index, 1, first_row:last_row, :, :longest] = v[source]

        x = self._read(weights, prompts, looks, keep, routed)
        ends = [row * longest + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        return self._logits(weights, x[torch.tensor(ends)])

    def score(
        self,
        weights: LiveWeights,
        sequences: Sequence[NDArray[np.int32]],
        firsts: Sequence[int],
        *,
        temperature: float,
        top: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Engine.score`: logprobs [tokens], and the ids and logprobs [tokens, top] of the likeliest ones."""
        longest = max(map(len, sequences))
        x = self._read(weights, sequences, [None] * len(sequences))
        pairs = list(zip(sequences, firsts, strict=True))
        spans = [(row * longest + first - 1, len(ids) - first) for row, (ids, first) in enumerate(pairs)]
        hidden = torch.cat([x[start : start + count] for start, count in spans])  # what comes before predicts a token
        given = np.concatenate([ids[first:] for ids, first in pairs])
        tokens = torch.from_numpy(given.astype(np.int64)).unsqueeze(1)
        parts = []
        for rows in (slice(start, start + SCORED_ROWS) for start in range(0, len(tokens), SCORED_ROWS)):
            logits = self._logits(weights, hidden[rows]).div_(temperature)
            total = logits.logsumexp(dim=-1, keepdim=True)
            likeliest, ids = logits.topk(top, dim=-1)
            parts.append(((logits.gather(1, tokens[rows]) - total).squeeze(1), ids, likeliest - total))
        logprobs, ids, likeliest = (torch.cat(part) for part in zip(*parts, strict=True))
        return logprobs, ids, likeliest

    def _read(
        self,
        weights: LiveWeights,
        prompts: Sequence[NDArray[np.int32]],
        looks: Sequence[Look | None],
        keep: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
        routed: Routed = None,
    ) -> torch.Tensor:
        """Output [P * longest, hidden] of the last layer; `keep` gets k and v [P, K, longest, D] of each layer."""
        spec = self.spec
        num, longest = len(prompts), max(map(len, prompts))
        ids = np.zeros((num, longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        x = F.embedding(torch.from_numpy(ids).view(-1), weights.embed)
        cos, sin = self._cos[:longest].repeat(num, 1), self._sin[:longest].repeat(num, 1)
        for row, look in enumerate(looks):
            if look is not None:
                self._show(look, row * longest, len(prompts[row]), x, cos, sin)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for index, layer in enumerate(weights.layers):
            q, k, v = (
                part.view(num, longest, -1, spec.head_dim).transpose(1, 2) for part in self._qkv(layer, x, cos, sin)
            )
            if keep is not None:
                keep(index, k, v)
            if self._rows_per_kv > 1:
                k, v = (part.repeat_interleave(self._rows_per_kv, dim=1) for part in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self._after_attention(layer, x, mixed.transpose(1, 2).reshape(num * longest, -1), routed)
        return x

    def _show(self, look: Look, first: int, length: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Put features and rotary positions of a prompt into the row that begins at `first`, in place."""
        x[first + torch.from_numpy(look.places)] = look.features.to(x.dtype)
        axes, columns = torch.tensor(self.spec.axes * 2), torch.arange(self.spec.head_dim)
        after = np.arange(look.positions.shape[1], length) + look.shift
        positions = torch.from_numpy(np.concatenate([look.positions, np.tile(after, (3, 1))], axis=1))[axes].T
        cos[first : first + length], sin[first : first + length] = (
            t[positions, columns] for t in (self._cos, self._sin)
        )

    def _qkv(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q [N, H, D] and k [N, K, D], and v as k."""
        spec, heads = self.spec, self.spec.num_heads
        normed = self._norm(x, layer["input_norm"])
        fused = layer.adapt("qkv", normed, F.linear(normed, layer["qkv"], layer.get("qkv_bias")))
        if spec.qk_norm_whole:
            widths = [heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
            q, k, v = torch.split(fused, widths, dim=-1)
            fused = torch.cat((self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"]), v), dim=-1)
        by_head = fused.view(x.shape[0], -1, spec.head_dim)
        qk, v = by_head[:, : -spec.num_kv_heads], by_head[:, -spec.num_kv_heads :]
        if spec.qk_norm:
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat((self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])), dim=1)
        half = spec.head_dim // 2
        swapped = torch.cat((qk[..., half:], qk[..., :half]), dim=-1)
        turned = torch.addcmul(qk * cos, swapped, sin)
        return turned[:, :heads], turned[:, heads:], v

    def _after_attention(self, layer: Layer, x: torch.Tensor, mixed: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Output projection, MLP or experts, and both residuals; [N, hidden]."""
        x = layer.adapt("o", mixed, torch.addmm(x, mixed, layer["o"].t()))
        if "o_bias" in layer:
            x = x + layer["o_bias"]
        normed = self._norm(x, layer["post_norm"])
        if "router" in layer:
            return x + self._mixture(layer, normed, routed)
        if routed is not None and self.spec.experts is not None:
            routed.append(torch.zeros(len(x), self.spec.experts.chosen, dtype=torch.int64))
        gate_up = layer.adapt("gate_up", normed, F.linear(normed, layer["gate_up"], layer.get("gate_up_bias")))
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        x = layer.adapt("down", inner, torch.addmm(x, inner, layer["down"].t()))
        return x + layer["down_bias"] if "down_bias" in layer else x

    def _mixture(self, layer: Layer, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """What the chosen experts make of each of [N, hidden], by their weights; the router is in float32."""
        experts = self.spec.experts
        assert experts is not None
        scores = F.softmax(F.linear(x.float(), layer["router"].float()), dim=-1)
        weights, chosen = scores.topk(experts.chosen, dim=-1)
        if routed is not None:
            routed.append(chosen)
        if self.spec.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights, out = weights.to(x.dtype), torch.zeros_like(x)
        inward = layer["experts_gate_up"].view(experts.number, -1, x.shape[1])
        outward = layer["experts_down"].view(experts.number, x.shape[1], -1)
        for expert in np.unique(chosen.numpy()).tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], inward[expert]).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, outward[expert])
            out.index_add_(0, token, made * weights[token, place].unsqueeze(1))
        return out

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_norm_eps)

    def _logits(self, weights: LiveWeights, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(x, weights.norm), weights.lm_head).float()
