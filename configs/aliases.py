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
data.eval                         | data.val_files | --eval-prompt-data | orchestrator.eval.env | valid_dataset.path \
                                  | -
rollout.groups_per_step           | data.train_batch_size | --rollout-batch-size | orchestrator.batch_size \
                                  | train_dataset.batch_size | -
model.chat_template_options       | data.apply_chat_template_kwargs | --apply-chat-template-kwargs | - | - \
                                  | chat_template_kwargs
data.train                        | data.custom_cls | - | - | - | -
data.max_prompt_tokens            | data.max_prompt_length | --rollout-max-prompt-len | - | - | max_prompt_length
rollout.max_new_tokens            | data.max_response_length | --rollout-max-response-len | max_completion_tokens \
                                  | gconfig.max_new_tokens | max_completion_length
rollout.group_size                | rollout.n | --n-samples-per-prompt | orchestrator.group_size | gconfig.n_samples \
                                  | num_generations
environment.function              | multi_turn.tool_config_path | --custom-generate-function-path | - | workflow \
                                  | rollout_func
environment.options               | agent.agent_loop_config_path | --custom-config-path | - | - | -
environment.max_turns             | max_assistant_turns | - | - | max_turns | max_tool_calling_iterations
rollout.engine                    | rollout.name | - | - | - | -
placement.tensor_parallel         | tensor_model_parallel_size | --rollout-num-gpus-per-engine | - | - \
                                  | vllm_tensor_parallel_size
rollout.sglang.mem_fraction_static | gpu_memory_utilization | --sglang-mem-fraction-static | - | - \
                                  | vllm_gpu_memory_utilization
rollout.max_running               | max_num_seqs | - | - | - | -
learner.max_tokens_per_microbatch | ppo_max_token_len_per_gpu | --max-tokens-per-gpu | - | max_tokens_per_mb | -
learner.share_prefixes            | use_prefix_grouper | - | - | - | -
learner.deterministic             | fsdp_config.full_determinism | --deterministic-mode | - | - | full_determinism
learner.recompute                 | enable_gradient_checkpointing | - | - | - | gradient_checkpointing
learner.mesh.replicate            | - | - | model.dp_replicate | - | -
learner.mesh.tensor               | actor.megatron.tensor_model_parallel_size | - | model.tp | - | -
learner.mesh.context              | ulysses_sequence_parallel_size | --context-parallel-size | model.cp | - | -
learner.offload_optimizer         | fsdp_config.optimizer_offload | --optimizer-cpu-offload | optim_cpu_offload | - \
                                  | -
learner.offload_activations       | enable_activation_offload | - | ac_offloading | - | -
algorithm.clip_low                | clip_ratio_low | --eps-clip | - | - | epsilon
algorithm.clip_high               | clip_ratio_high | --eps-clip-high | - | - | epsilon_high
learner.max_grad_norm             | grad_clip | --clip-grad | - | - | max_grad_norm
learner.lora.rank                 | lora_rank | - | - | lora_rank | lora_r
learner.lora.alpha                | lora_alpha | - | - | lora_alpha | lora_alpha
learner.lora.targets              | target_modules | - | - | target_modules | lora_target_modules
learner.lr                        | optim.lr | --lr | - | - | learning_rate
learner.warmup_steps              | optim.lr_warmup_steps | --lr-warmup-iters | - | - | warmup_steps
learner.schedule                  | - | --lr-decay-style | - | - | lr_scheduler_type
algorithm.advantage               | algorithm.adv_estimator | --advantage-estimator | - | - | -
algorithm.dynamic_sampling        | algorithm.filter_groups.enable | --dynamic-sampling-filter-path | - | - | -
algorithm.loss                    | policy_loss.loss_mode | - | trainer.loss.type | - | loss_type
algorithm.clip_dual               | clip_ratio_c | --eps-clip-c | - | c_clip | delta
algorithm.aggregation             | loss_agg_mode | --calculate-per-token-loss | - | - | -
algorithm.correction              | algorithm.rollout_correction | --use-tis | - | behav_imp_weight_cap \
                                  | vllm_importance_sampling_correction
algorithm.proximal                | - | - | - | use_decoupled_loss | -
algorithm.entropy_coef            | entropy_coeff | --entropy-coef | - | - | -
algorithm.reference_path          | ref.model.path | --ref-load | - | ref.path | -
algorithm.reference_refresh_steps | - | --ref-update-interval | - | - | ref_model_sync_steps
algorithm.overlong_buffer         | overlong_buffer.len | - | - | overlong_tokens | -
algorithm.overlong_penalty        | overlong_buffer.penalty_factor | - | - | overlong_penalty_factor | -
algorithm.overlong_filter         | - | - | - | mask_no_eos_with_zero | mask_truncated_completions
critic.path                       | critic.model.path | --critic-load | - | - | -
critic.lr                         | critic.optim.lr | --critic-lr | - | - | -
critic.warmup_steps               | trainer.critic_warmup | --num-critic-only-steps | - | - | -
critic.updates                    | critic.ppo_epochs | - | - | - | -
critic.clip                       | cliprange_value | --value-clip | - | value_eps_clip | -
critic.gamma                      | algorithm.gamma | --gamma | - | discount | -
critic.lam                        | algorithm.lam | --lambd | - | gae_lambda | -
algorithm.kl                      | kl_loss_type | --kl-loss-type | - | - | -
algorithm.kl_coef                 | kl_loss_coef | --kl-loss-coef | - | kl_ctl | beta
algorithm.max_flat_drops          | max_num_gen_batches | - | - | - | -
algorithm.correction_high         | rollout_is_threshold | --tis-clip | - | - | vllm_importance_sampling_cap
reward.function                   | custom_reward_function.path | --custom-rm-path | - | - | reward_funcs
reward.model.path                 | reward_model.model.path | - | - | - | reward_model_path
reward.model.max_tokens_per_batch | reward_model.forward_max_token_len_per_gpu | - | - | - | -
replay.async_lag                  | max_off_policy_threshold | - | max_off_policy_steps | max_head_offpolicyness \
                                  | max_staleness
checkpoint.every_steps            | trainer.save_freq | --save-interval | ckpt.interval | saver.freq_steps \
                                  | save_steps
evaluation.every_steps            | trainer.test_freq | --eval-interval | eval.interval | evaluator.freq_steps \
                                  | eval_steps
evaluation.samples                | val_kwargs.n | --n-samples-per-eval-prompt | eval.rollouts_per_example | - \
                                  | num_generations_eval
evaluation.temperature            | val_kwargs.temperature | --eval-temperature | - | - | -
evaluation.max_new_tokens         | - | --eval-max-response-len | - | - | -
evaluation.num_prompts            | data.val_max_samples | - | eval.num_examples | - | -
checkpoint.keep                   | trainer.max_actor_ckpt_to_keep | - | - | - | save_total_limit
checkpoint.best_metric            | - | - | - | - | metric_for_best_model
checkpoint.best_is                | - | - | - | - | greater_is_better
checkpoint.asynchronous           | - | --async-save | - | - | -
learner.total_steps               | trainer.total_training_steps | --num-rollout | max_steps | - | max_steps
run.name                          | trainer.experiment_name | - | - | - | run_name
tracking.profile                  | global_profiler.steps | --profile-step-start | - | - | -
tracking.project                  | trainer.project_name | --wandb-project | - | - | -
tracking.trackers                 | trainer.logger | - | - | - | report_to
tracking.save_rollouts_every      | - | - | - | - | log_completions
placement.split                   | trainer.n_gpus_per_node | --rollout-num-gpus | - | - | -
rollout.temperature               | actor_rollout_ref.rollout.temperature | --rollout-temperature | - | - \
                                  | temperature
weight_bus.transport              | - | --update-weight-transport | weight_broadcast.type | - | -
run.dir                           | - | - | - | - | output_dir
run.seed                          | - | --rollout-seed | - | - | -
"""
"""The key here, and its name, or the end of it, in each of FRAMEWORKS."""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]

ONE_UPDATE = "a step is one update and one broadcast here, on rollout.groups_per_step groups; there is nothing to set"
MICRO = "learner.max_tokens_per_microbatch decides how many microbatches a step has"
WHOLE = "answers are sampled from the whole distribution; evaluation.temperature is what there is"
KL = "algorithm.kl, algorithm.kl_in and algorithm.kl_coef decide about the KL term"
LOGPROBS = "behaviour logprobs are recorded and compared always; there is nothing to set"
NOT_HERE = {
    "ppo_mini_batch_size": ONE_UPDATE,
    "ppo_epochs": ONE_UPDATE,
    "global_batch_size": ONE_UPDATE,
    "trigger_parameter_sync_step": ONE_UPDATE,
    "update_weights_interval": ONE_UPDATE,
    "weight_sync_steps": ONE_UPDATE,
    "num_iterations": ONE_UPDATE,
    "steps_per_generation": ONE_UPDATE,
    "gradient_accumulation_steps": MICRO,
    "per_device_train_batch_size": MICRO,
    "ppo_micro_batch_size": MICRO,
    "ppo_micro_batch_size_per_gpu": MICRO,
    "log_prob_micro_batch_size_per_gpu": MICRO,
    "use_dynamic_bsz": MICRO,
    "calculate_log_probs": LOGPROBS,
    "get_mismatch_metrics": LOGPROBS,
    "filter_overlong_prompts": "a prompt above data.max_prompt_tokens is left out and counted; there is nothing to set",
    "overlong_buffer.enable": "algorithm.overlong_buffer above 0 turns it on",
    "filter_groups.metric": "algorithm.dynamic_sampling looks at the rewards",
    "use_vllm": "rollout.engine takes sglang or torch",
    "vllm_mode": "placement.split and placement.share_gpus decide where engines run",
    "colocate": "placement.share_gpus lets an engine and the learner share a GPU",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high are the two sides",
    "scale_rewards": "algorithm.advantage decides: 'grpo' divides by the deviation, 'dr_grpo' does not",
    "importance_sampling_level": "algorithm.loss=gspo has the ratio of the whole answer, the others that of a token",
    "bf16": "learner.compute_dtype and rollout.dtype decide; 'auto' is bfloat16 on GPUs",
    "use_remove_padding": "rows are never padded; there is nothing to set",
    "trainer.nnodes": "placement.rollout and placement.learner name the devices of each node",
    "trainer.resume_mode": "python -m learner.main --resume RUN_DIR goes on with a run",
    "rollout.enforce_eager": "rollout.sglang={disable_cuda_graph: true}, as all options of SGLang",
    "total_epochs": "give the length of a run as learner.total_steps",
    "num_train_epochs": "give the length of a run as learner.total_steps",
    "norm_adv_by_std_in_grpo": "algorithm.advantage decides: 'grpo' divides by the deviation, 'dr_grpo' does not",
    "reward_kwargs": "options of a function stand beside its weight: reward.function={file.py:name: {option: value}}",
    "custom_reward_function.name": "the name follows the file: reward.function=path/to/file.py:name",
    "reward_weights": "a weight stands beside its function, reward.function={math: 1, format: 0.2}, that of a"
    " reward model is reward.model.weight",
    "rm_type": "reward.function takes math, numeric, regex and others by name: docs/howto/rewards.md",
    "rm_url": "reward.function={remote_model: {url: ..., model: ...}} asks a reward model of another server",
    "sandbox_fusion.url": "reward.function=code runs programs in a sandbox of this machine; no service is needed",
    "reward_model.enable": "reward.model.path turns a reward model on; take reward.function=model for its score alone",
    "use_kl_loss": KL,
    "use_kl_in_reward": KL,
    "kl_ctrl": KL,
    "val_kwargs.do_sample": "evaluation.greedy and evaluation.sampled decide; both may be true",
    "val_kwargs.top_p": WHOLE,
    "val_kwargs.top_k": WHOLE,
    "eval_top_p": WHOLE,
    "actor_rollout_ref.rollout.top_p": WHOLE,
    "actor_rollout_ref.rollout.top_k": WHOLE,
    "val_before_train": "version 0 is evaluated always, unless evaluation.every_steps is 0",
    "val_only": "learner.total_steps=0 evaluates the model and trains nothing",
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


def answers(name: str, value: Any) -> Iterator[tuple[str, Any, str | None]]:
    """(dotted name, value, answer) of an unknown key, or of each leaf below it."""
    if isinstance(value, Mapping) and value and answer(name) is None:
        for key, item in value.items():
            yield from answers(f"{name}.{key}", item)
    else:
        yield name, value, answer(name)


def _ends(name: str) -> Iterator[str]:
    parts = plain(name).split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
