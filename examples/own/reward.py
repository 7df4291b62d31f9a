"""A reward: score one answer. Copy it, and name it by `reward.function: reward.py:reward`."""

from typing import Any


def reward(sample: dict[str, Any], closeness: float = 0.1) -> dict[str, float]:
    """1 for the right answer, and `closeness` for the share of characters in place; `in_place` becomes a metric."""
    given, wanted = sample["completion"].strip(), sample["ground_truth"]
    in_place = sum(a == b for a, b in zip(given, wanted, strict=False)) / len(wanted)
    return {"score": float(given == wanted) + closeness * in_place, "in_place": in_place}
