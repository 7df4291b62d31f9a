"""Reward `exact`: the ground truth to the letter, ended by the policy itself."""

from rollout_server.tasks.rewards import Sample


def reward(sample: Sample) -> float:
    """1.0 for the text of the ground truth with finish reason `stop`, else 0.0.

    Numbers as ground truth are compared as Python writes them.

    Raises:
        ValueError: the row has no ground truth that is text or a number.
    """
    truth = sample["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise ValueError(f"ground_truth is {truth!r}; the reward 'exact' needs text or a number in every row")
    return float(sample["finish_reason"] == "stop" and sample["completion"] == str(truth))
