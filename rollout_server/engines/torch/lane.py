"""A lane: one set of weights, the answers that it decodes, and their KV cache.

Lanes share the model and nothing else, so an evaluation on pinned weights neither sees an update nor takes rows from
live requests.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_server.engines.base import Scored
from rollout_server.engines.torch.model import KVCache, TorchModel
from rollout_server.engines.torch.rows import Request, RowTable
from rollout_server.engines.torch.sampling import choose, uniforms
from rollout_server.engines.torch.weights import LiveWeights
from slipstream.families.experts import Experts

MAX_PREFILL_TOKENS = 2048
"""Padded prompt tokens of one forward; bounds its memory, and how long an update waits for it: with 16,384 longer than
weight_bus.deadline_s, for an evaluation of a model of 135M parameters (AVX2, float32)."""


class DecodeLane:
    """Continuous batching by the decode thread; others read `rows` under `lock`."""

    def __init__(
        self,
        model: TorchModel,
        weights: LiveWeights,
        version: int,
        *,
        max_running: int,
        max_context: int,
        lock: threading.Lock,
        experts: Experts | None = None,
    ) -> None:
        self.model = model
        self.weights = weights
        self.version = version
        self.rows = RowTable(max_running=max_running, max_context=max_context, experts=experts)
        self.cache = KVCache(model.spec, weights.dtype, max_rows=max_running, max_length=max_context)
        self.generated_tokens = 0
        self.prefilled_prompts = 0
        self._lock = lock

    def step(self, *, may_admit: bool) -> None:
        """Start what waits if that is worth it, then decode a token of every answer."""
        if may_admit and self.rows.ready_to_admit():
            self._admit()
        if self.rows.running:
            self._decode()

    def _admit(self) -> None:
        """Prefill what waits, as far as there is room."""
        first = self.rows.running
        with self._lock:
            prompts, prompt_of_row = self.rows.admit(MAX_PREFILL_TOKENS)
        last, longest = self.rows.running, max(len(prompt) for prompt in prompts)
        self.cache.reserve(last, longest + 1)
        self.cache.clear(first, last)
        looks = [self.rows.answers[first + prompt_of_row.index(number)].request.look for number in range(len(prompts))]
        routed: list[torch.Tensor] = []
        logits = self.model.prefill(
            self.weights, self.cache, prompts, first_row=first, prompt_of_row=prompt_of_row, looks=looks, routed=routed
        )
        if self.rows.routing is not None:
            of_prompts = torch.stack(routed, dim=1).view(len(prompts), -1, *self.rows.routing.shape[2:]).numpy()
            for row, number in enumerate(prompt_of_row, start=first):
                size = len(prompts[number])
                self.rows.routing[row, :size] = of_prompts[number, :size]
        self.prefilled_prompts += len(prompts)
        self._sample(first, logits[torch.tensor(prompt_of_row)])

    def _decode(self) -> None:
        rows, n = self.rows, self.rows.running
        positions = rows.length[:n] - 1
        self.cache.reserve(n, int(positions.max()) + 1)
        routed: list[torch.Tensor] = []
        logits = self.model.decode(self.weights, self.cache, rows.token[:n], positions, rows.shift[:n], routed)
        if rows.routing is not None:
            rows.routing[np.arange(n), positions] = torch.stack(routed, dim=1).numpy()
        self._sample(0, logits)

    def _sample(self, start: int, logits: torch.Tensor) -> None:
        rows, stop = self.rows, start + logits.shape[0]
        counters = rows.length[start:stop] - rows.prompt_length[start:stop]
        tokens, logprobs = choose(
            logits,
            temperature=rows.temperature[start:stop],
            greedy=rows.greedy[start:stop],
            uniform=uniforms(rows.key[start:stop], counters),
        )
        with self._lock:
            rows.record(start, tokens, logprobs, self.version)
            ended = rows.ended()
            self.generated_tokens += len(tokens)
        if len(ended):
            self._remove(ended, aborted=False)

    def _remove(self, ended: NDArray[np.int64], *, aborted: bool) -> None:
        with self._lock:
            longest = int(self.rows.length[: self.rows.running].max())
            source, target = self.rows.remove(ended, aborted=aborted)
        if len(source):
            self.cache.move(source, target, min(longest, self.cache.length))

    def recompute(self) -> None:
        """Compute the KV of all running answers anew, under the weights as they are now."""
        rows = self.rows
        at_once = max(1, MAX_PREFILL_TOKENS // int(rows.length[: rows.running].max(initial=1)))
        for first in range(0, rows.running, at_once):
            last = min(first + at_once, rows.running)
            # The last token of a row is fed by its next decode step.
            known = [rows.ids[row, : rows.length[row] - 1] for row in range(first, last)]
            looks = [answer.request.look for answer in rows.answers[first:last]]
            self.cache.clear(first, last)
            self.model.prefill(
                self.weights, self.cache, known, first_row=first, prompt_of_row=list(range(last - first)), looks=looks
            )

    def route(self, request: Request) -> None:
        """Give prefixes that have ended a routing, for they come without; in memory of its own."""
        for index, answer in request.done.items():
            known = np.concatenate([request.prompt, answer.token_ids])[:-1]
            routed: list[torch.Tensor] = []
            cache = KVCache(self.model.spec, self.weights.dtype, max_rows=1, max_length=len(known))
            cache.reserve(1, len(known))
            given: dict[str, Any] = {"first_row": 0, "prompt_of_row": [0], "looks": [request.look], "routed": routed}
            self.model.prefill(self.weights, cache, [known], **given)
            assert self.rows.routing is not None
            routing = torch.stack(routed, dim=1).numpy().astype(self.rows.routing.dtype)
            request.done[index] = replace(answer, routing=routing)

    def score(
        self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, temperature: float, top: int
    ) -> Scored:
        """As `Engine.score`, some sequences after the other."""
        at_once = max(1, MAX_PREFILL_TOKENS // max(ids.size for ids in sequences))
        parts = [
            self.model.score(
                self.weights, sequences[n : n + at_once], firsts[n : n + at_once], temperature=temperature, top=top
            )
            for n in range(0, len(sequences), at_once)
        ]
        logprobs, ids, likeliest = (torch.cat(part).flatten().numpy() for part in zip(*parts, strict=True))
        return Scored(version=self.version, logprobs=logprobs, ids=ids.astype(np.int32), top=likeliest)

    def abort(self, request: Request | None = None) -> None:
        """End one request, or all of them, now; answers come back with what they have."""
        with self._lock:
            self.rows.drop_waiting(request)
        running = self.rows.rows_of(request)
        if len(running):
            self._remove(running, aborted=True)
