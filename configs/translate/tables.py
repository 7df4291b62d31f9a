"""Names of other frameworks: the key here, or why there is none. configs/aliases.py looks names up."""

FRAMEWORKS = ("verl", "slime", "prime-rl", "AReaL", "TRL")
TABLE = """
model.path                           | actor_rollout_ref.model.path | --hf-checkpoint | model.name | actor.path \
    | GRPOTrainer.model
data.train                           | data.train_files | --prompt-data | orchestrator.train.source \
    | train_dataset.path | GRPOTrainer.train_dataset
data.eval                            | data.val_files | --eval-prompt-data | orchestrator.eval.env \
    | valid_dataset.path | GRPOTrainer.eval_dataset
rollout.groups_per_step              | data.train_batch_size | --rollout-batch-size | orchestrator.batch_size \
    | train_dataset.batch_size | -
model.chat_template_options          | data.apply_chat_template_kwargs | --apply-chat-template-kwargs | - | - \
    | chat_template_kwargs
data.train                           | data.custom_cls | - | - | - | -
data.max_prompt_tokens               | data.max_prompt_length | --rollout-max-prompt-len | - | - | max_prompt_length
rollout.max_new_tokens               | data.max_response_length | --rollout-max-response-len | max_completion_tokens \
    | gconfig.max_new_tokens | max_completion_length
rollout.max_new_tokens               | - | - | sampling.max_tokens | - | -
rollout.group_size                   | rollout.n | --n-samples-per-prompt | orchestrator.group_size \
    | gconfig.n_samples | num_generations
environment.function                 | multi_turn.tool_config_path | --custom-generate-function-path | taskset.id \
    | workflow | rollout_func
environment.function                 | - | - | harness.id | - | -
environment.options                  | agent.agent_loop_config_path | --custom-config-path | - | - | -
environment.max_turns                | max_assistant_turns | - | - | max_turns | max_tool_calling_iterations
rollout.engine                       | rollout.name | - | - | - | -
placement.tensor_parallel            | tensor_model_parallel_size | --rollout-num-gpus-per-engine \
    | inference.parallel.tp | - | vllm_tensor_parallel_size
rollout.sglang.mem_fraction_static   | gpu_memory_utilization | --sglang-mem-fraction-static \
    | inference.gpu_memory_utilization | - | vllm_gpu_memory_utilization
rollout.max_running                  | max_num_seqs | --sglang-max-running-requests | max_inflight_rollouts | - | -
learner.max_tokens_per_microbatch    | ppo_max_token_len_per_gpu | --max-tokens-per-gpu | seq_len \
    | max_tokens_per_mb | -
learner.share_prefixes               | use_prefix_grouper | - | - | - | -
learner.deterministic                | fsdp_config.full_determinism | --deterministic-mode | - | - \
    | full_determinism
learner.recompute                    | enable_gradient_checkpointing | --recompute-granularity \
    | trainer.model.ac.mode | - | gradient_checkpointing
learner.mesh.replicate               | - | - | model.dp_replicate | - | -
learner.mesh.tensor                  | actor.megatron.tensor_model_parallel_size | - | model.tp | - | -
learner.mesh.context                 | ulysses_sequence_parallel_size | --context-parallel-size | model.cp | - | -
learner.offload_optimizer            | fsdp_config.optimizer_offload | --optimizer-cpu-offload | optim_cpu_offload \
    | - | -
learner.offload_activations          | enable_activation_offload | - | ac_offloading | - | -
algorithm.clip_low                   | clip_ratio_low | --eps-clip | - | - | epsilon
algorithm.clip_high                  | clip_ratio_high | --eps-clip-high | - | - | epsilon_high
learner.max_grad_norm                | grad_clip | --clip-grad | trainer.optim.max_norm | - | max_grad_norm
learner.max_grad_norm                | optim.clip_grad | - | - | - | -
learner.lora.rank                    | lora_rank | --lora-rank | trainer.model.lora.rank | lora_rank | lora_r
learner.lora.rank                    | - | - | - | - | peft_config.r
learner.lora.alpha                   | lora_alpha | --lora-alpha | trainer.model.lora.alpha | lora_alpha \
    | lora_alpha
learner.lora.targets                 | target_modules | - | trainer.model.lora.target_modules | target_modules \
    | lora_target_modules
learner.lora.targets                 | - | - | - | - | peft_config.target_modules
learner.lr                           | optim.lr | --lr | trainer.optim.lr | - | learning_rate
learner.warmup_steps                 | optim.lr_warmup_steps | --lr-warmup-iters | trainer.scheduler.warmup_steps \
    | - | warmup_steps
learner.schedule                     | optim.lr_scheduler_type | --lr-decay-style | trainer.scheduler.type | - \
    | lr_scheduler_type
algorithm.advantage                  | algorithm.adv_estimator | --advantage-estimator | orchestrator.algorithms | - \
    | -
algorithm.dynamic_sampling           | algorithm.filter_groups.enable | --dynamic-sampling-filter-path \
    | pre_batch_filters | - | -
algorithm.loss                       | policy_loss.loss_mode | - | trainer.loss.type | - | loss_type
algorithm.clip_dual                  | clip_ratio_c | --eps-clip-c | - | c_clip | delta
algorithm.aggregation                | loss_agg_mode | --calculate-per-token-loss | - | - | -
algorithm.correction                 | algorithm.rollout_correction | --use-tis | - | behav_imp_weight_cap \
    | vllm_importance_sampling_correction
algorithm.proximal                   | - | - | - | use_decoupled_loss | -
algorithm.entropy_coef               | entropy_coeff | --entropy-coef | - | - | entropy_coef
algorithm.reference_path             | ref.model.path | --ref-load | - | ref.path | -
algorithm.reference_refresh_steps    | - | --ref-update-interval | - | - | ref_model_sync_steps
algorithm.overlong_buffer            | overlong_buffer.len | - | - | overlong_tokens | -
algorithm.overlong_penalty           | overlong_buffer.penalty_factor | - | - | overlong_penalty_factor | -
algorithm.overlong_buffer            | overlong_buffer_cfg.len | - | - | - | -
algorithm.overlong_penalty           | overlong_buffer_cfg.penalty_factor | - | - | - | -
algorithm.overlong_filter            | - | - | - | mask_no_eos_with_zero | mask_truncated_completions
critic.path                          | critic.model.path | --critic-load | - | - | -
critic.lr                            | critic.optim.lr | --critic-lr | - | - | -
critic.warmup_steps                  | trainer.critic_warmup | --num-critic-only-steps | - | - | -
critic.updates                       | critic.ppo_epochs | - | - | - | -
critic.clip                          | cliprange_value | --value-clip | - | value_eps_clip | -
critic.gamma                         | algorithm.gamma | --gamma | - | discount | -
critic.lam                           | algorithm.lam | --lambd | - | gae_lambda | -
algorithm.kl                         | kl_loss_type | --kl-loss-type | - | - | -
algorithm.kl_coef                    | kl_loss_coef | --kl-loss-coef | - | kl_ctl | beta
algorithm.kl_coef                    | kl_ctrl.kl_coef | - | - | - | -
algorithm.max_flat_drops             | max_num_gen_batches | - | - | - | -
algorithm.correction_high            | rollout_is_threshold | --tis-clip | - | - | vllm_importance_sampling_cap
reward.function                      | custom_reward_function.path | --custom-rm-path | - | - | reward_funcs
reward.model.path                    | reward_model.model.path | - | - | - | reward_model_path
reward.model.path                    | reward_model.model_path | - | - | - | -
reward.model.max_tokens_per_batch    | reward_model.forward_max_token_len_per_gpu | - | - | - | -
replay.async_lag                     | max_off_policy_threshold | - | max_off_policy_steps | max_head_offpolicyness \
    | max_staleness
checkpoint.every_steps               | trainer.save_freq | --save-interval | ckpt.interval | saver.freq_steps \
    | save_steps
evaluation.every_steps               | trainer.test_freq | --eval-interval | eval.interval | evaluator.freq_steps \
    | eval_steps
evaluation.samples                   | val_kwargs.n | --n-samples-per-eval-prompt | eval.rollouts_per_example | - \
    | num_generations_eval
evaluation.samples                   | - | - | eval.group_size | - | -
evaluation.temperature               | val_kwargs.temperature | --eval-temperature | eval.sampling.temperature | - \
    | -
evaluation.max_new_tokens            | - | --eval-max-response-len | eval.sampling.max_completion_tokens | - | -
evaluation.max_new_tokens            | - | - | eval.sampling.max_tokens | - | -
evaluation.num_prompts               | data.val_max_samples | - | eval.num_examples | - | -
checkpoint.keep                      | trainer.max_actor_ckpt_to_keep | - | ckpt.keep_last | - | save_total_limit
checkpoint.best_metric               | - | - | - | - | metric_for_best_model
checkpoint.best_is                   | - | - | - | - | greater_is_better
checkpoint.asynchronous              | - | --async-save | - | - | -
learner.total_steps                  | trainer.total_training_steps | --num-rollout | max_steps | - | max_steps
run.name                             | trainer.experiment_name | --wandb-group | wandb.name | - | run_name
tracking.profile                     | global_profiler.steps | --profile-step-start | - | - | -
tracking.project                     | trainer.project_name | --wandb-project | wandb.project | - | project
tracking.trackers                    | trainer.logger | --use-wandb | - | - | report_to
tracking.save_rollouts_every         | - | - | - | - | log_completions
placement.split                      | trainer.n_gpus_per_node | --rollout-num-gpus | deployment.num_infer_gpus | - \
    | -
placement.split                      | - | --actor-num-gpus-per-node | deployment.num_train_gpus | - | -
rollout.temperature                  | actor_rollout_ref.rollout.temperature | --rollout-temperature \
    | sampling.temperature | - | temperature
weight_bus.transport                 | - | --update-weight-transport | weight_broadcast.type | - | -
run.dir                              | trainer.default_local_dir | --save | output_dir | - | output_dir
run.seed                             | data.seed | --rollout-seed | - | - | seed
model.chat_template                  | - | - | tokenizer.chat_template | - | -
learner.weight_decay                 | optim.weight_decay | --weight-decay | trainer.optim.weight_decay | - \
    | weight_decay
learner.betas                        | optim.betas | --adam-beta1 | trainer.optim.betas1 | - | adam_beta1
learner.betas                        | - | --adam-beta2 | trainer.optim.betas2 | - | adam_beta2
learner.adam_epsilon                 | - | --adam-eps | - | - | adam_epsilon
learner.compile                      | use_torch_compile | - | trainer.model.compile | - | torch_compile
algorithm.dppo_delta                 | - | - | trainer.loss.dppo_mask_high | - | -
algorithm.dppo_kl                    | - | - | trainer.loss.kl_tau | - | -
algorithm.sapo_tau_positive          | - | - | - | - | sapo_temperature_pos
algorithm.sapo_tau_negative          | - | - | - | - | sapo_temperature_neg
algorithm.drop_zero_advantage        | - | - | post_batch_filters | - | -
environment.workers                  | - | - | env.num_workers | - | -
data.shuffle                         | - | --rollout-shuffle | - | - | shuffle_dataset
"""
"""The key here, and its name, or the end of it, in each of FRAMEWORKS."""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]

ONE_UPDATE = "a step is one update and one broadcast here, on rollout.groups_per_step groups; there is nothing to set"
MICRO = "learner.max_tokens_per_microbatch decides how many microbatches a step has"
WHOLE = "answers are sampled from the whole distribution; evaluation.temperature is what there is"
KL = "algorithm.kl, algorithm.kl_in and algorithm.kl_coef decide about the KL term"
LOGPROBS = "behaviour logprobs are recorded and compared always; there is nothing to set"
NODES = "placement.rollout and placement.learner name the devices of each node"
LENGTH = "give the length of a run as learner.total_steps"
DEVIATION = "algorithm.advantage decides: 'grpo' divides by the deviation, 'dr_grpo' does not"
EVAL_WHOLE = "version 0 is evaluated always, unless evaluation.every_steps is 0"
OWN_GPUS = "engines have GPUs of their own and unload nothing; placement.share_gpus shares them"
COLUMNS = "the columns of the rows tell which is the prompt and which the ground truth (docs/howto/data.md)"
DTYPES = "master weights, optimizer and reductions are float32; learner.compute_dtype is that of forward and backward"
KERNELS = "learner.attention and learner.compile decide; 'auto' takes what runs on the GPU"
NO_MOE = "dense models only: there are no expert ranks"
FOLDER = "config.json and the tokenizer of model.path say it"
CHECKPOINTS = "a checkpoint has dcp/ and a Hugging Face folder; --resume and model.path take it"
NO_DROPOUT = "there is no dropout in training"
LOADING = "replay reads rows as they are leased; there is no loader to set"
OVERLONG = "algorithm.overlong_buffer above 0 turns it on"
EVERY_STEP = "every step writes a row to metrics.jsonl"
NOT_HERE = {
    "filter_groups.metric": "algorithm.dynamic_sampling looks at the rewards",
    "use_vllm": "rollout.engine takes sglang or torch",
    "vllm_mode": "placement.split and placement.share_gpus decide where engines run",
    "colocate": "placement.share_gpus lets an engine and the learner share a GPU",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high are the two sides",
    "scale_rewards": DEVIATION,
    "norm_adv_by_std_in_grpo": DEVIATION,
    "disable_grpo_std_normalization": DEVIATION,
    "importance_sampling_level": "algorithm.loss=gspo has the ratio of the whole answer, the others that of a token",
    "bf16": "learner.compute_dtype and rollout.dtype decide; 'auto' is bfloat16 on GPUs",
    "trainer.nnodes": NODES,
    "actor_num_nodes": NODES,
    "deployment.num_train_nodes": NODES,
    "deployment.num_infer_nodes": NODES,
    "deployment.gpus_per_node": NODES,
    "trainer.resume_mode": "python -m learner.main --resume RUN_DIR goes on with a run",
    "resume_from_checkpoint": "python -m learner.main --resume RUN_DIR goes on with a run",
    "resume_step": "python -m learner.main --resume RUN_DIR goes on with a run",
    "rollout.enforce_eager": "rollout.sglang={disable_cuda_graph: true}, as all options of SGLang",
    "inference.model.enforce_eager": "rollout.sglang={disable_cuda_graph: true}, as all options of SGLang",
    "sglang_cuda_graph_max_bs": "rollout.sglang={cuda_graph_max_bs: ...}, as all options of SGLang",
    "total_epochs": LENGTH,
    "num_train_epochs": LENGTH,
    "num_epoch": LENGTH,
    "warmup_ratio": "learner.warmup_steps counts steps",
    "lr_warmup_steps_ratio": "learner.warmup_steps counts steps",
    "reward_kwargs": "options of a function stand beside its weight: reward.function={file.py:name: {option: value}}",
    "custom_reward_function.name": "the name follows the file: reward.function=path/to/file.py:name",
    "reward_weights": "a weight stands beside its function, reward.function={math: 1, format: 0.2}, that of a"
    " reward model is reward.model.weight",
    "reward_manager": "reward.function names the reward; algorithm.overlong_buffer is the shaping of DAPO's manager",
    "rm_type": "reward.function takes math, numeric, regex and others by name: docs/howto/rewards.md",
    "rm_url": "reward.function={remote_model: {url: ..., model: ...}} asks a reward model of another server",
    "reward_model.enable": "reward.model.path turns a reward model on; take reward.function=model for its score alone",
    "use_kl_loss": KL,
    "use_kl_in_reward": KL,
    "kl_ctrl": KL,
    "kl_coef": KL,
    "val_kwargs.do_sample": "evaluation.greedy and evaluation.sampled decide; both may be true",
    "val_kwargs.top_p": WHOLE,
    "val_kwargs.top_k": WHOLE,
    "eval_top_p": WHOLE,
    "eval_top_k": WHOLE,
    "actor_rollout_ref.rollout.top_p": WHOLE,
    "actor_rollout_ref.rollout.top_k": WHOLE,
    "rollout_top_p": WHOLE,
    "rollout_top_k": WHOLE,
    "val_before_train": EVAL_WHOLE,
    "skip_eval_before_train": EVAL_WHOLE,
    "skip_first_step": EVAL_WHOLE,
    "val_only": "learner.total_steps=0 evaluates the model and trains nothing",
    "param_offload": "learner.offload_optimizer and learner.offload_activations are what can leave the GPU",
    "fsdp_cpu_offload": "learner.offload_optimizer and learner.offload_activations are what can leave the GPU",
    "pipeline_model_parallel_size": "there are no pipeline ranks; learner.mesh shards, replicates and divides layers",
    "expert_model_parallel_size": NO_MOE,
    "expert_tensor_parallel_size": NO_MOE,
    "trainer.model.ep": NO_MOE,
    "push_to_hub": "upload checkpoints/step_N/hf, a Hugging Face folder",
    "load": CHECKPOINTS,
    "loss_scale_factor": "algorithm.aggregation=constant divides by rollout.max_new_tokens",
    "adv_tau": "the advantage is taken as it is; change learner.lr instead",
    "gibberish": "no such filter; algorithm.overlong_filter and dynamic_sampling are those there are",
}
"""What other frameworks set and this one has no key for, with the reason."""
NOT_NEEDED = {
    "ppo_mini_batch_size": ONE_UPDATE,
    "ppo_epochs": ONE_UPDATE,
    "global_batch_size": ONE_UPDATE,
    "num_steps_per_rollout": ONE_UPDATE,
    "trigger_parameter_sync_step": ONE_UPDATE,
    "update_weights_interval": ONE_UPDATE,
    "weight_sync_steps": ONE_UPDATE,
    "num_iterations": ONE_UPDATE,
    "steps_per_generation": ONE_UPDATE,
    "gradient_accumulation_steps": MICRO,
    "per_device_train_batch_size": MICRO,
    "per_device_eval_batch_size": MICRO,
    "ppo_micro_batch_size": MICRO,
    "ppo_micro_batch_size_per_gpu": MICRO,
    "micro_batch_size": MICRO,
    "log_prob_micro_batch_size": MICRO,
    "log_prob_micro_batch_size_per_gpu": MICRO,
    "log_prob_max_token_len_per_gpu": MICRO,
    "log_prob_use_dynamic_bsz": MICRO,
    "use_dynamic_bsz": MICRO,
    "use_dynamic_batch_size": MICRO,
    "balance_data": MICRO,
    "calculate_log_probs": LOGPROBS,
    "get_mismatch_metrics": LOGPROBS,
    "filter_overlong_prompts": "a prompt above data.max_prompt_tokens is left out and counted; there is nothing to set",
    "data.truncation": "a prompt above data.max_prompt_tokens is left out and counted; there is nothing to set",
    "overlong_buffer.enable": OVERLONG,
    "overlong_buffer_cfg.enable": OVERLONG,
    "sandbox_fusion.url": "reward.function=code runs programs in a sandbox of this machine; no service is needed",
    "use_remove_padding": "rows are never padded; there is nothing to set",
    "hybrid_engine": OWN_GPUS,
    "free_cache_engine": OWN_GPUS,
    "load_format": OWN_GPUS,
    "layered_summon": OWN_GPUS,
    "vllm_enable_sleep_mode": OWN_GPUS,
    "ref.fsdp_config.param_offload": "a reference model is divided over the learner's ranks",
    "fsdp_config.grad_offload": DTYPES,
    "rollout.mode": "an engine always serves many requests at once",
    "prompt_key": COLUMNS,
    "input_key": COLUMNS,
    "label_key": COLUMNS,
    "reward_fn_key": COLUMNS,
    "return_raw_chat": COLUMNS,
    "remove_unused_columns": COLUMNS,
    "apply_chat_template": "messages go through the chat template, text does not",
    "orchestrator.renderer": "what a turn sampled is sent back as its token ids; there is no renderer to choose",
    "sequence_parallel": "learner.mesh.tensor divides what lies between the layers, too",
    "recompute_method": "learner.recompute decides",
    "recompute_num_layers": "learner.recompute decides",
    "gradient_checkpointing_kwargs": "learner.recompute decides",
    "attention_dropout": NO_DROPOUT,
    "hidden_dropout": NO_DROPOUT,
    "disable_dropout": NO_DROPOUT,
    "accumulate_allreduce_grads_in_fp32": DTYPES,
    "attention_softmax_in_fp32": DTYPES,
    "use_precision_aware_optimizer": DTYPES,
    "optimization_dtype": DTYPES,
    "reduce_dtype": DTYPES,
    "overlap_cpu_optimizer_d2h_h2d": DTYPES,
    "attention_backend": KERNELS,
    "trainer.model.attn": KERNELS,
    "trainer.model.impl": KERNELS,
    "use_liger_kernel": KERNELS,
    "optimizer": "AdamW is the optimizer",
    "trainer.optim.type": "AdamW is the optimizer",
    "actor.strategy": "FSDP2 is what there is",
    "processing_class": FOLDER,
    "model_init_kwargs": FOLDER,
    "peft_config.task_type": FOLDER,
    "peft_config.bias": FOLDER,
    "inference.model.max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens make the context",
    "vllm_max_model_length": "data.max_prompt_tokens and rollout.max_new_tokens make the context",
    "max_num_batched_tokens": "rollout.sglang={chunked_prefill_size: ...}, as all options of SGLang",
    "enable_chunked_prefill": "rollout.sglang={chunked_prefill_size: ...}, as all options of SGLang",
    "megatron_to_hf_mode": CHECKPOINTS,
    "save_strategy": "checkpoint.every_steps decides",
    "eval_strategy": "evaluation.every_steps decides",
    "logging_steps": EVERY_STEP,
    "logging_first_step": EVERY_STEP,
    "log.level": EVERY_STEP,
    "dataloader_num_workers": LOADING,
    "data.val_batch_size": LOADING,
    "data.dataloader_num_workers": LOADING,
    "math_verify_max_workers": "reward.workers is the number of reward processes",
    "math_verify_timeout": "reward.timeout_s, and seconds of the reward `math`",
}
"""What other frameworks set and this one needs no key for, with the reason."""
WITHOUT = {**NOT_HERE, **NOT_NEEDED}
