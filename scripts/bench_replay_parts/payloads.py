"""Groups that are made before the measurement: random, all different, of lognormal lengths."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay import messages as m
from scripts.bench_replay_parts.settings import TEXT_BYTES_PER_TOKEN, VOCAB_SIZE, Load, random_text

Int32 = NDArray[np.int32]
TOOL_SHARE = 0.25
"""Answers in which a fifth of the tokens, in one span, came from an environment."""
TRUNCATED = "length"
COMPLETE = "stop"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group without what its lease decides: the id, the attempt and the versions."""

    prompt_ids: Int32
    lengths: Int32
    token_ids: Int32
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    young: Int32
    """1 for tokens that were sampled after the weights changed during the answer, else 0."""
    rewards: NDArray[np.float32]
    texts: list[str]
    finish_reasons: list[str]

    @property
    def num_tokens(self) -> int:
        """Of all its answers."""
        return int(self.token_ids.size)

    def group(self, lease: m.Lease, version: int) -> m.Group:
        """The answer to a lease by a server that holds `version`: its tokens are of that version or the one before."""
        oldest = max(lease.min_version, version - 1)
        return m.Group(
            pass_=lease.pass_,
            index=lease.index,
            attempt=lease.attempt,
            finish_reasons=self.finish_reasons,
            texts=self.texts,
            reward_metrics={"reward/seconds": 0.01},
            generate_s=1.0,
            data_source="bench",
            prompt_ids=self.prompt_ids,
            lengths=self.lengths,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            versions=np.int32(oldest) + self.young * np.int32(version - oldest),
            rewards=self.rewards,
        )


def prepare(load: Load) -> list[Prepared]:
    """`load.pool` groups; the same load gives the same groups."""
    rng = np.random.default_rng([load.seed, 1])
    return [_one(load, rng) for _ in range(load.pool)]


def _one(load: Load, rng: np.random.Generator) -> Prepared:
    drawn = load.median * np.exp(load.sigma * rng.standard_normal(load.group_size))
    lengths = np.clip(drawn, 1, load.cap).astype(np.int32)
    total = int(lengths.sum())
    return Prepared(
        prompt_ids=rng.integers(0, VOCAB_SIZE, load.prompt, dtype=np.int32),
        lengths=lengths,
        token_ids=rng.integers(0, VOCAB_SIZE, total, dtype=np.int32),
        loss_mask=np.concatenate([_mask(int(n), rng) for n in lengths]),
        logprobs=-rng.standard_exponential(total, dtype=np.float32),
        young=np.concatenate([_after(int(n), int(rng.integers(0, n + 1))) for n in lengths]),
        rewards=rng.random(load.group_size, dtype=np.float32),
        texts=[random_text(rng, int(n) * TEXT_BYTES_PER_TOKEN) for n in lengths],
        finish_reasons=[TRUNCATED if n == load.cap else COMPLETE for n in lengths],
    )


def _mask(length: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    mask = np.ones(length, dtype=np.uint8)
    if rng.random() < TOOL_SHARE:
        start = int(rng.integers(0, length))
        mask[start : start + length // 5] = 0
    return mask


def _after(length: int, switch: int) -> Any:
    return (np.arange(length) >= switch).astype(np.int32)
