"""Groups and evaluation results that replay accepts, with whatever a test wants to be different."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from replay import messages as m


def make_group(lengths: Sequence[int], **fields: Any) -> m.Group:
    """A group of answers of these lengths."""
    n, total = len(lengths), sum(lengths)
    values: dict[str, Any] = {
        "pass_": 0,
        "index": 0,
        "attempt": 1,
        "finish_reasons": ["stop"] * n,
        "reward_metrics": {},
        "generate_s": 0.1,
        "data_source": "t",
        "prompt_ids": np.array([1, 2, 3], dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "token_ids": np.full(total, 5, dtype=np.int32),
        "loss_mask": np.ones(total, dtype=np.uint8),
        "logprobs": np.full(total, -1.0, dtype=np.float32),
        "versions": np.zeros(total, dtype=np.int32),
        "rewards": np.array([1.0] + [0.0] * (n - 1), dtype=np.float32),
    }
    return m.Group(**values | fields)


def make_result(version: int, *, greedy: bool = True, n: int = 1, reward: float = 1.0) -> m.EvaluationResult:
    """Scores of `n` prompts."""
    return m.EvaluationResult(
        version=version,
        greedy=greedy,
        seconds=1.0,
        texts=["a"] * n,
        finish_reasons=["stop"] * n,
        rewards=np.full(n, reward, dtype=np.float32),
        lengths=np.ones(n, dtype=np.int32),
    )
