"""Reward `length`: answers of so many tokens cost nothing; shorter and longer ones cost up to 1."""

from rollout_server.tasks.rewards import Sample


def reward(sample: Sample, max_tokens: int, min_tokens: int = 0, buffer: int = 0) -> float:
    """0.0 between the two, else down to -1.0; the stop token counts.

    Past max_tokens the cost is that of DAPO (2503.14476, equation 13), with the buffer above the limit and not below.
    """
    length = sample["num_tokens"]
    if length < min_tokens:
        return length / min_tokens - 1.0
    return -min(1.0, max(0, length - max_tokens) / buffer) if buffer else -float(length > max_tokens)
