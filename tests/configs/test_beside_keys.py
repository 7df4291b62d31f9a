"""Keys of critic, reference model and overlong shaping: what is refused, and with which words."""

import pytest

from configs import Config, ConfigError, load

KL = ["algorithm.kl=k3"]
KL_REWARD = [*KL, "algorithm.kl_in=reward"]
GAE = ["algorithm.advantage=gae"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.overlong_buffer=11"],
            ["algorithm.overlong_buffer", "11", "rollout.max_new_tokens 10", "such as 2"],
        ),
        (["algorithm.kl_in=reward"], ["algorithm", "'reward' without an estimator"]),
        ([*KL_REWARD, "algorithm.dynamic_sampling=true"], ["kl_in", "'reward' with dynamic_sampling"]),
        ([*KL_REWARD, "algorithm.advantage=maxrl"], ["kl_in", "'maxrl'", "rewards >= 0", "dr_grpo"]),
        (["algorithm.overlong_buffer=2", "algorithm.advantage=maxrl"], ["overlong_buffer", "2", "'maxrl'"]),
        ([*GAE, "algorithm.dynamic_sampling=true"], ["'gae' with dynamic_sampling", "dynamic_sampling=false"]),
        ([*GAE, "critic.warmup_steps=80"], ["critic.warmup_steps", "80 of learner.total_steps 80"]),
        (["algorithm.reference_refresh_steps=5"], ["reference_refresh_steps", "set algorithm.kl to k1, k2 or k3"]),
        (["algorithm.reference_path=/x"], ["reference_path", "set algorithm.kl to k1, k2 or k3"]),
        (["critic.path=/x"], ["critic.path", "'/x'", "algorithm.advantage=gae"]),
        (["placement.critic=node0:7"], ["placement.critic", "'node0:7'", "nothing", "algorithm.advantage"]),
        ([*KL, "placement.reference=node0:2"], ["placement", "node0:2 is given to both", "learner", "reference"]),
        ([*KL, "placement.reference=node1:0"], ["placement.reference", "node1", "no learner rank"]),
        ([*KL, "placement.reference=gpu"], ["placement", "'gpu'", "not of the form"]),
    ],
)
def test_what_cannot_be_right_is_refused_with_key_value_and_way_out(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*GAE, "rollout.group_size=1"],
        [*GAE, *KL_REWARD, "placement.critic=node0:3-4", "placement.reference=node0:5"],
    ],
)
def test_what_can_work_is_accepted(overrides: list[str]) -> None:
    assert isinstance(load("quickstart", overrides), Config)
