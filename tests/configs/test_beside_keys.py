"""Keys of critic, reference model and overlong shaping: what is refused, and with which words."""

import pytest

from configs import Config, ConfigError, load
from configs.algorithm import LOSSES

KL = ["algorithm.kl=k3"]
KL_REWARD = [*KL, "algorithm.kl_in=reward", "algorithm.advantage=rloo"]
BF16 = "rollout.dtype=bfloat16"
GSPO = ["algorithm.loss=gspo", BF16]
GAE = ["algorithm.advantage=gae"]
NCCL = ["placement.device=cuda", "weight_bus.backend=nccl", "placement.rollout=node0:0-1", "placement.learner=node0:2"]


REFUSED = [
    (
        ["algorithm.overlong_buffer=11"],
        ["algorithm.overlong_buffer", "11", "rollout.max_new_tokens 10", "such as 2"],
    ),
    (["algorithm.kl_in=reward"], ["algorithm", "'reward' without an estimator"]),
    (["algorithm.kl=k1"], ["kl: 'k1' with kl_in 'loss'", "gradient of 0", "'k2' or 'k3', or kl_in 'reward'"]),
    ([*KL_REWARD, "algorithm.dynamic_sampling=true"], ["kl_in", "'reward' with dynamic_sampling"]),
    ([*KL_REWARD, "algorithm.advantage=maxrl"], ["kl_in", "'maxrl'", "rewards >= 0", "dr_grpo"]),
    (["algorithm.overlong_buffer=2", "algorithm.advantage=maxrl"], ["overlong_buffer", "2", "'maxrl'"]),
    ([*GAE, "algorithm.dynamic_sampling=true"], ["'gae' with dynamic_sampling", "dynamic_sampling=false"]),
    ([*GAE, "critic.warmup_steps=80"], ["critic.warmup_steps", "80 of learner.total_steps 80"]),
    (["algorithm.reference_refresh_steps=5"], ["reference_refresh_steps", "set algorithm.kl to k2 or k3"]),
    (["algorithm.reference_path=/x"], ["reference_path", "set algorithm.kl to k2 or k3"]),
    (["critic.path=/x"], ["critic.path", "'/x'", "algorithm.advantage=gae"]),
    (["algorithm.clip_dual=0.5"], ["clip_dual", "0.5", "negative advantage", "such as 3"]),
    (["algorithm.veto_high=1"], ["veto_high: 1", "every answer", "such as 100"]),
    (
        ["algorithm.correction=icepop", "algorithm.correction_low=5"],
        ["correction_low", "5 and 2", "both sides of 1"],
    ),
    (
        ["algorithm.correction=geometric_mis", "algorithm.correction_high=0.999"],
        ["correction_high", "0.99 and 0.999"],
    ),
    (["algorithm.correction_high=2"], ["correction_high: 2", "correction 'none'", "correction_high=null"]),
    (
        ["algorithm.loss=policy_gradient", "algorithm.correction=token_tis", "algorithm.correction_low=0.5"],
        ["correction_low: 0.5", "'token_tis'", "'icepop'"],
    ),
    (
        ["algorithm.loss=policy_gradient", "algorithm.proximal=log_linear", "algorithm.correction=token_tis"],
        ["proximal: 'log_linear'", "loss 'policy_gradient'", "take proximal 'behaviour'", "loss 'ppo_clip'"],
    ),
    (["algorithm.loss=sapo", "algorithm.clip_low=0.1"], ["clip_low: 0.1", "'sapo'", "clip_low=null"]),
    (["algorithm.loss=cispo", "algorithm.clip_low=0.1"], ["clip_low: 0.1", "'cispo'"]),
    (["algorithm.loss=gspo", "algorithm.clip_dual=3"], ["clip_dual: 3", "'gspo'", "clip_dual=0"]),
    ([*KL, "algorithm.kl_in=reward"], ["kl_in", "'grpo'", "'dr_grpo'", "'rloo'", "kl_in 'loss'"]),
    (GSPO, ["algorithm.clip_low: 0.0003", "0.0004", "16-bit", "algorithm.clip_high to 0.02", "proximal=current"]),
    ([*GSPO, "algorithm.clip_low=0.02", "algorithm.clip_high=0.004"], ["clip_high 0.004", "at least 0.01"]),
    (
        ["learner.collective_deadline_s=30", "placement.split=1:2"],
        ["collective_deadline_s: 30", "weight_bus.deadline_s 30", "take 60"],
    ),
    ([*GSPO[:1], "learner.compute_dtype=bfloat16"], ["algorithm.clip_low: 0.0003"]),
    (
        ["algorithm.advantage=reinforce++", "rollout.group_size=1", "algorithm.dynamic_sampling=true"],
        ["rollout.group_size: 1", "dynamic_sampling=false"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_what_cannot_be_right_is_refused_with_key_value_and_way_out(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*GAE, "rollout.group_size=1"],
        [*KL_REWARD, *GAE],
        ["algorithm.loss=my.py:loss", "algorithm.clip_low=0.1", "algorithm.clip_dual=3"],
        ["algorithm.loss=my.py:loss", "algorithm.correction=token_tis"],
        [*GSPO, "algorithm.clip_low=0.02", "algorithm.clip_high=0.02"],
        [*GSPO, "algorithm.proximal=current", "algorithm.correction=token_tis"],
        [*GSPO, "algorithm.i_know_this_is_biased=true"],
        ["algorithm.loss=cispo", "algorithm.clip_high=4"],
        ["algorithm.kl=k1", "algorithm.kl_in=reward", "algorithm.advantage=dr_grpo"],
        ["algorithm.correction=icepop", "algorithm.correction_low=0.2", "algorithm.correction_high=5"],
    ],
)
def test_what_can_work_is_accepted(overrides: list[str]) -> None:
    assert isinstance(load("quickstart", overrides), Config)


@pytest.mark.parametrize("preset", ["quickstart", "gsm8k-qwen3-0.6b-2gpu"])
@pytest.mark.parametrize("loss", LOSSES)
def test_another_loss_has_its_own_clip_in_every_preset(preset: str, loss: str) -> None:
    changes = [f"algorithm.loss={loss}", "algorithm.i_know_this_is_biased=true"]
    assert load(preset, changes).algorithm.clip == LOSSES[loss].clip
