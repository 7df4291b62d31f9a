"""Names of other frameworks, answered with the key here: verl, slime, prime-rl, AReaL and TRL.

Accepting them would make two names for one thing; a suggestion by spelling misleads (`rollout.n` looks like
`rollout.sglang`). So an unknown key is looked up here first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

FRAMEWORKS = ("verl", "slime", "prime-rl", "AReaL", "TRL")
TABLE = """
model.path                        | actor_rollout_ref.model.path | --hf-checkpoint | model.name | actor.path | -
data.train                        | data.train_files | --prompt-data | orchestrator.train.source \
                                  | train_dataset.path | -
data.eval                         | data.val_files | --eval-prompt-data | - | - | -
rollout.groups_per_step           | data.train_batch_size | --rollout-batch-size | orchestrator.batch_size \
                                  | train_dataset.batch_size | -
data.max_prompt_tokens            | data.max_prompt_length | --rollout-max-prompt-len | - | - | max_prompt_length
rollout.max_new_tokens            | data.max_response_length | --rollout-max-response-len | max_completion_tokens \
                                  | gconfig.max_new_tokens | max_completion_length
rollout.group_size                | rollout.n | --n-samples-per-prompt | orchestrator.group_size \
                                  | gconfig.n_samples | num_generations
rollout.engine                    | rollout.name | - | - | - | -
placement.tensor_parallel         | tensor_model_parallel_size | --rollout-num-gpus-per-engine | - | - | -
rollout.sglang.mem_fraction_static | gpu_memory_utilization | - | - | - | -
rollout.max_running               | max_num_seqs | - | - | - | -
learner.max_tokens_per_microbatch | ppo_max_token_len_per_gpu | --max-tokens-per-gpu | - | max_tokens_per_mb | -
learner.recompute                 | enable_gradient_checkpointing | - | - | - | gradient_checkpointing
algorithm.clip_low                | clip_ratio_low | --eps-clip | - | - | epsilon
algorithm.clip_high               | clip_ratio_high | --eps-clip-high | - | - | epsilon_high
learner.max_grad_norm             | grad_clip | - | - | - | -
learner.lr                        | optim.lr | - | - | - | learning_rate
algorithm.advantage               | algorithm.adv_estimator | - | - | - | -
algorithm.dynamic_sampling        | algorithm.filter_groups.enable | - | - | - | -
algorithm.loss                    | policy_loss.loss_mode | - | trainer.loss.type | - | loss_type
algorithm.clip_dual               | clip_ratio_c | --eps-clip-c | - | c_clip | delta
algorithm.aggregation             | loss_agg_mode | - | - | - | -
algorithm.correction              | algorithm.rollout_correction | --use-tis | - | behav_imp_weight_cap | -
algorithm.proximal                | - | - | - | use_decoupled_loss | -
algorithm.entropy_coef            | entropy_coeff | --entropy-coef | - | - | -
algorithm.kl                      | kl_loss_type | --kl-loss-type | - | - | -
algorithm.kl_coef                 | kl_loss_coef | --kl-loss-coef | - | kl_ctl | beta
reward.function                   | custom_reward_function.path | --custom-rm-path | - | - | -
reward.model.path                 | reward_model.model.path | - | - | - | reward_model_path
reward.model.weight               | - | - | - | - | reward_weights
reward.model.max_tokens_per_batch | reward_model.forward_max_token_len_per_gpu | - | - | - | -
replay.async_lag                  | max_off_policy_threshold | - | max_off_policy_steps | max_head_offpolicyness \
                                  | max_staleness
checkpoint.every_steps            | trainer.save_freq | --save-interval | ckpt.interval | saver.freq_steps | save_steps
evaluation.every_steps            | trainer.test_freq | --eval-interval | - | - | eval_steps
checkpoint.keep                   | trainer.max_actor_ckpt_to_keep | - | - | - | save_total_limit
learner.total_steps               | trainer.total_training_steps | --num-rollout | max_steps | - | -
run.name                          | trainer.experiment_name | - | - | - | run_name
tracking.wandb_project            | trainer.project_name | - | - | - | -
placement.split                   | trainer.n_gpus_per_node | - | - | - | -
rollout.temperature               | - | --rollout-temperature | - | - | -
weight_bus.transport              | - | --update-weight-transport | weight_broadcast.type | - | -
run.dir                           | - | - | - | - | output_dir
"""
"""The key here, and its name, or the end of it, in each of FRAMEWORKS."""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]

ONE_UPDATE = "a step is one update and one broadcast here, on rollout.groups_per_step groups; there is nothing to set"
KL = "algorithm.kl, algorithm.kl_in and algorithm.kl_coef decide about the KL term"
NOT_HERE = {
    "ppo_mini_batch_size": ONE_UPDATE,
    "ppo_epochs": ONE_UPDATE,
    "global_batch_size": ONE_UPDATE,
    "trigger_parameter_sync_step": ONE_UPDATE,
    "update_weights_interval": ONE_UPDATE,
    "weight_sync_steps": ONE_UPDATE,
    "gradient_accumulation_steps": "learner.max_tokens_per_microbatch decides how many microbatches a step has",
    "per_device_train_batch_size": "learner.max_tokens_per_microbatch decides how many microbatches a step has",
    "total_epochs": "give the length of a run as learner.total_steps",
    "num_train_epochs": "give the length of a run as learner.total_steps",
    "norm_adv_by_std_in_grpo": "algorithm.advantage decides: 'grpo' divides by the deviation, 'dr_grpo' does not",
    "reward_model.enable": "reward.model.path turns a reward model on; take reward.function=model for its score alone",
    "use_kl_loss": KL,
    "use_kl_in_reward": KL,
    "kl_ctrl": KL,
}
"""What other frameworks set and this one has no key for, with the reason."""


def plain(name: str) -> str:
    """A name as a file would have it: options without their dashes."""
    return name.lstrip("-").replace("-", "_")


ALIASES = {plain(name): key for key, *names in ROWS for name in names if name != "-"}


def target_of(name: str) -> str | None:
    """The key here for a foreign name or option, such as `--n-samples-per-prompt`; by its longest known end."""
    return next((ALIASES[end] for end in _ends(name) if end in ALIASES), None)


def answer(name: str) -> str | None:
    """What to say about a foreign name, or None."""
    for end in _ends(name):
        if end in ALIASES:
            return f"it is {ALIASES[end]} here"
        if end in NOT_HERE:
            return NOT_HERE[end]
    return None


def answers(name: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """(dotted name, answer) of an unknown key, or of each leaf below it."""
    if isinstance(value, Mapping) and value and answer(name) is None:
        for key, item in value.items():
            yield from answers(f"{name}.{key}", item)
    else:
        yield name, answer(name)


def _ends(name: str) -> Iterator[str]:
    parts = plain(name).split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
