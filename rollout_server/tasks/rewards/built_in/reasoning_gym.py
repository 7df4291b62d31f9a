"""Reward `reasoning_gym`: the family's own score_answer, for rows of data.train `reasoning_gym:FAMILY`.

The row names family, seed and index, and the same entry is made from them again: what a family compares with does not
always survive as text and numbers.
"""

import functools
import json
from typing import Any

from replay.data.formats.generated import make_dataset
from rollout_server.tasks.rewards import Sample

try:  # here and not in a call: it takes seconds, and calls have reward.timeout_s
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError("install the extra: pip install 'slipstream-rl[reasoning-gym]'") from error

SOURCE = "reasoning_gym"


def reward(sample: Sample) -> float:
    """Score, 0 to 1, of what stands in the last <answer></answer> of the answer, or of the answer as a whole.

    Raises:
        ValueError: the row is not of a reasoning_gym source.
    """
    recipe = sample["extra_info"].get(SOURCE)
    if not isinstance(recipe, dict):
        raise ValueError(
            "extra_info has no 'reasoning_gym'; the reward 'reasoning_gym' judges rows of data.train"
            " reasoning_gym:FAMILY alone (of several datasets: choose a reward by data_source)"
        )
    options = json.dumps(recipe["options"], sort_keys=True)  # as text, because lists are no key of a cache
    dataset = _dataset(recipe["family"], recipe["seed"], recipe["level"], options)
    tagged = extract_answer(sample["completion"])
    answer = sample["completion"].strip() if tagged is None else tagged
    return float(dataset.score_answer(answer, _entry(dataset, recipe["index"])))


@functools.lru_cache(maxsize=16)
def _dataset(family: str, seed: int, level: int | None, options: str) -> Any:
    return make_dataset(family, seed, level, json.loads(options))


@functools.lru_cache(maxsize=64)
def _entry(dataset: Any, index: int) -> Any:
    return dataset[index]
