"""Names of other frameworks, answered with the key here: verl, slime, prime-rl, AReaL and TRL.

Accepting them would make two names for one thing; a suggestion by spelling misleads (`rollout.n` looks like
`rollout.sglang`). So an unknown key is looked up here first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

FRAMEWORKS = {
    "verl": {
        "actor_rollout_ref.model.path": "model.path",
        "data.train_files": "data.train",
        "data.val_files": "data.eval",
        "data.train_batch_size": "rollout.groups_per_step",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_new_tokens",
        "rollout.n": "rollout.group_size",
        "rollout.name": "rollout.engine",
        "tensor_model_parallel_size": "placement.tensor_parallel",
        "gpu_memory_utilization": "rollout.sglang.mem_fraction_static",
        "max_num_seqs": "rollout.max_running",
        "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
        "enable_gradient_checkpointing": "learner.recompute",
        "clip_ratio_low": "algorithm.clip_low",
        "clip_ratio_high": "algorithm.clip_high",
        "grad_clip": "learner.max_grad_norm",
        "optim.lr": "learner.lr",
        "algorithm.adv_estimator": "algorithm.advantage",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
        "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
        "algorithm.rollout_correction": "algorithm.loss",
        "custom_reward_function.path": "reward.function",
        "max_off_policy_threshold": "replay.async_lag",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.test_freq": "evaluation.every_steps",
        "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
        "trainer.total_training_steps": "learner.total_steps",
        "trainer.experiment_name": "run.name",
        "trainer.project_name": "tracking.wandb_project",
        "trainer.n_gpus_per_node": "placement.split",
    },
    "slime": {
        "--hf-checkpoint": "model.path",
        "--prompt-data": "data.train",
        "--eval-prompt-data": "data.eval",
        "--n-samples-per-prompt": "rollout.group_size",
        "--rollout-batch-size": "rollout.groups_per_step",
        "--rollout-max-response-len": "rollout.max_new_tokens",
        "--rollout-max-prompt-len": "data.max_prompt_tokens",
        "--rollout-temperature": "rollout.temperature",
        "--rollout-num-gpus-per-engine": "placement.tensor_parallel",
        "--max-tokens-per-gpu": "learner.max_tokens_per_microbatch",
        "--eps-clip": "algorithm.clip_low",
        "--eps-clip-high": "algorithm.clip_high",
        "--use-tis": "algorithm.loss",
        "--custom-rm-path": "reward.function",
        "--num-rollout": "learner.total_steps",
        "--save-interval": "checkpoint.every_steps",
        "--eval-interval": "evaluation.every_steps",
        "--update-weight-transport": "weight_bus.transport",
    },
    "prime-rl": {
        "model.name": "model.path",
        "orchestrator.train.source": "data.train",
        "orchestrator.group_size": "rollout.group_size",
        "orchestrator.batch_size": "rollout.groups_per_step",
        "max_completion_tokens": "rollout.max_new_tokens",
        "max_off_policy_steps": "replay.async_lag",
        "max_steps": "learner.total_steps",
        "ckpt.interval": "checkpoint.every_steps",
        "weight_broadcast.type": "weight_bus.transport",
    },
    "AReaL": {
        "actor.path": "model.path",
        "train_dataset.path": "data.train",
        "train_dataset.batch_size": "rollout.groups_per_step",
        "gconfig.n_samples": "rollout.group_size",
        "gconfig.max_new_tokens": "rollout.max_new_tokens",
        "max_tokens_per_mb": "learner.max_tokens_per_microbatch",
        "use_decoupled_loss": "algorithm.loss",
        "max_head_offpolicyness": "replay.async_lag",
        "saver.freq_steps": "checkpoint.every_steps",
    },
    "TRL": {
        "num_generations": "rollout.group_size",
        "max_completion_length": "rollout.max_new_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "epsilon": "algorithm.clip_low",
        "epsilon_high": "algorithm.clip_high",
        "learning_rate": "learner.lr",
        "gradient_checkpointing": "learner.recompute",
        "max_staleness": "replay.async_lag",
        "save_steps": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep",
        "eval_steps": "evaluation.every_steps",
        "output_dir": "run.dir",
        "run_name": "run.name",
    },
}
"""By framework: its name, or the end of it, to the key here."""

ONE_UPDATE = "a step is one update and one broadcast here, on rollout.groups_per_step groups; there is nothing to set"
NO_KL = "there is no KL term here"
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
    "use_kl_loss": NO_KL,
    "kl_loss_coef": NO_KL,
    "kl_coef": NO_KL,
    "beta": NO_KL,
}
"""What other frameworks set and this one has no key for, with the reason."""


def plain(name: str) -> str:
    """A name as a file would have it: options without their dashes."""
    return name.lstrip("-").replace("-", "_")


ALIASES = {plain(name): key for names in FRAMEWORKS.values() for name, key in names.items()}


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
