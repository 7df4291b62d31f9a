"""How tokens add up to the loss of a batch: the weight of each token.

Weights are made from the whole batch before it is cut into microbatches, so neither microbatches nor ranks change what
a token counts (counting within a microbatch gives short answers more than their share).
"""

import numpy as np
from numpy.typing import NDArray


def token_weights(kind: str, loss_tokens: NDArray[np.int32], *, constant: int) -> NDArray[np.float32]:
    """[N] weight of each token of each trajectory; the loss is the weighted sum over tokens.

    Args:
        kind: `token`, mean over all tokens of the batch (DAPO); `sequence`, mean over trajectories of the mean over
            their tokens (GRPO, GSPO); `constant`, mean over trajectories of the sum of their tokens over `constant`
            (Dr. GRPO).
        loss_tokens: [N] tokens in the loss of the trajectories in the batch; 0 for one that is left out.
        constant: divisor, tokens; rollout.max_new_tokens in a run.
    """
    tokens = loss_tokens.astype(np.float64)
    trajectories = max(1, int((tokens > 0).sum()))
    match kind:
        case "token":
            weights = np.full(len(tokens), 1 / max(1.0, tokens.sum()))
        case "sequence":
            weights = 1 / (trajectories * np.maximum(tokens, 1))
        case _:
            weights = np.full(len(tokens), 1 / (trajectories * constant))
    return np.where(tokens > 0, weights, 0.0).astype(np.float32)
