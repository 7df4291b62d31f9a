"""TRL's adapter (examples/trl): replay's batches become its samples, and what does not agree is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs import Config, ConfigError, load
from examples.trl.agreement import agreed, trl_arguments
from examples.trl.samples import samples_of
from tests.learner.recorded import batch_of, random_step

GROUPS, MEMBERS = 4, 4
SIZE = GROUPS * MEMBERS


def config(*overrides: str) -> Config:
    small = ["placement.split=1:1", "rollout.groups_per_step=4", "rollout.group_size=4", "learner.total_steps=10"]
    return load("quickstart", [*small, *overrides])


def arguments(**changed: Any) -> SimpleNamespace:
    given = trl_arguments(config(), per_device_train_batch_size=4)
    return SimpleNamespace(**{**given, "world_size": 1, "process_index": 0, **changed})


def test_a_batch_becomes_samples_token_for_token() -> None:
    trajectories = random_step(3, num_groups=GROUPS, group_size=MEMBERS)
    batch = batch_of(trajectories, 3)
    advantages = np.linspace(-1, 1, SIZE, dtype=np.float32)
    samples = samples_of(batch, advantages, num_groups=GROUPS, size=SIZE)
    for number, (given_, sample) in enumerate(zip(trajectories, samples, strict=True)):
        prompt, mask = len(given_.prompt_ids), given_.loss_mask
        assert sample.input_ids.tolist() == given_.prompt_ids + given_.response_ids
        assert sample.completion_mask.tolist() == [0] * prompt + mask
        expected = [0.0] * prompt + [p if m else 0.0 for p, m in zip(given_.logprobs, mask, strict=True)]
        assert sample.old_log_probs.tolist() == pytest.approx(expected)
        oldest = min(v for v, m in zip(given_.versions, mask, strict=True) if m)
        assert (sample.model_version, sample.metrics["sample/lag_max"]) == (oldest + 1, 2 - oldest)
        assert sample.advantage == pytest.approx(advantages[number])
        assert sample.group_id == 2 * GROUPS + given_.group
        assert sample.metrics["reward"] == pytest.approx(given_.reward)


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({"max_steps": -1}, [], "max_steps: -1"),
        ({"gradient_accumulation_steps": 4}, [], "gradient_accumulation_steps is 4, the configuration says 5"),
        ({"temperature": 0.5}, [], "temperature is 0.5, the configuration says 1.0"),
        ({"token_budget": 512}, [], "token_budget is 512"),
        ({"weight_sync_steps": 2}, [], "weight_sync_steps is 2"),
        ({"max_staleness": 0}, [], "max_staleness is 0, less than replay.async_lag 1"),
        ({}, ["placement.split=1:2"], "2 learner ranks"),
        ({}, ["learner.lora.rank=4"], "learner.lora.rank: 4, so that engines would wait for adapters"),
        ({}, ["algorithm.advantage=gae"], "follows from forwards over the tokens"),
    ],
)
def test_what_does_not_agree_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agreed(config(*overrides), arguments(**changed))
