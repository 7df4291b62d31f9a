"""Settings whose meaning here depends on others of the same file: GPUs, rewards, environments; batches.py."""

from collections.abc import Callable, Mapping
from typing import Any

from configs.translate import batches
from configs.translate.batches import Given
from configs.translate.settings import Foreign
from configs.translate.values import (
    AS_ITS_TYPE,
    K1_IN_LOSS,
    KL_TERMS,
    Here,
    has_k1_in_loss,
    kl_coefficient,
    kl_estimator,
    nothing,
    shares_gpus,
)  # fmt: skip

DIVIDED = "there both sides take turns on the same {count}; `slipstream plan` finds the best split"
REWARDS = {"math": "math", "dapo": "math", "deepscaler": "math", "gsm8k": "numeric"}
"""Graders of slime, by the reward here that judges alike."""
SINGLE_TURN = {"math-env": "math", "math_env": "math", "hendrycks-math": "math", "gsm8k": "math", "gsm8k-v1": "math"}
"""Environments of prime-rl that are a question and an answer, by the reward here."""
Convert = Callable[[Foreign, Given, Any], Here | None]


def _split(foreign: Foreign, given: Given, value: Any) -> Here:
    """Both sides' GPUs, from whichever settings the framework has for them."""
    if foreign.framework == "prime-rl":
        rollout, train = (int(foreign.value(f"num_{side}_gpus", default=1)) for side in ("infer", "train"))
        return Here({"placement.split": f"{rollout}:{train}"})
    if foreign.framework == "slime" and not shares_gpus(foreign):
        rollout = int(foreign.value("rollout_num_gpus", default=1))
        return Here({"placement.split": f"{rollout}:{int(foreign.value('actor_num_gpus_per_node', default=1))}"})
    tensor = int(foreign.value("rollout.tensor_model_parallel_size", "rollout_num_gpus_per_engine", default=1))
    return divided(int(value), tensor)


def divided(gpus: int, tensor: int) -> Here:
    """The split of GPUs that both sides shared, in engines of `tensor` GPUs."""
    if gpus <= tensor:
        pairs = {"placement.share_gpus": True, "rollout.sglang.mem_fraction_static": 0.35}
        count = "one GPU" if gpus == 1 else f"all {gpus} GPUs"
        return Here({"placement.split": f"{gpus}:{gpus}", **pairs}, f"{count} for both sides, at the same time")
    rollout = max(tensor, gpus // 2 // tensor * tensor)
    return Here({"placement.split": f"{rollout}:{gpus - rollout}"}, DIVIDED.format(count=f"{gpus} GPUs"))


def _nodes(foreign: Foreign, given: Given, value: Any) -> Here:
    if value in (1, None):
        return nothing("one node")
    return Here({}, f"{value} nodes: --set placement.learner=... and placement.rollout=... (docs/launching.md)")


def _colocate(foreign: Foreign, given: Given, value: Any) -> Here:
    return nothing("placement.split divides the GPUs, placement.share_gpus has one serve both sides")


def _clip(foreign: Foreign, given: Given, value: Any) -> Here:
    sides = {"low": foreign.value("clip_ratio_low"), "high": foreign.value("clip_ratio_high")}
    pairs = {f"algorithm.clip_{side}": value for side, own in sides.items() if own is None}
    return Here(pairs) if pairs else nothing("clip_ratio_low and clip_ratio_high are given, and count")


def _kl_switch(place: str) -> Convert:
    _, factor = KL_TERMS[place]

    def convert(foreign: Foreign, given: Given, value: Any) -> Here:
        coefficient, estimator = kl_coefficient(foreign, place), kl_estimator(foreign, place)
        if not value:
            return nothing("off there and here")
        if not coefficient:
            return nothing("its factor is 0, which has no gradient; algorithm.kl would compute a reference model")
        if place == "loss" and has_k1_in_loss(foreign):
            return nothing(AS_ITS_TYPE) if foreign.value("kl_loss_type") is not None else Here({}, K1_IN_LOSS)
        if estimator is None:
            return Here({}, "algorithm.kl takes k1, k2 and k3, none of which is the estimator there")
        default = {} if foreign.value(factor) is not None else {"algorithm.kl_coef": coefficient}
        return Here({"algorithm.kl": estimator, "algorithm.kl_in": place, **default})

    return convert


def _kl_penalty(foreign: Foreign, given: Given, value: Any) -> Here:
    is_on = kl_coefficient(foreign, "reward")
    return nothing("the estimator, as in use_kl_in_reward" if is_on else "no KL term in the reward there")


def _mesh_tensor(foreign: Foreign, given: Given, value: Any) -> Here:
    return Here({"learner.mesh.tensor": value}) if value != 1 else nothing("1: every rank has whole layers")


def _one(what: str) -> Convert:
    """Settings that are nothing at the value 1, and have no counterpart above."""
    return lambda foreign, given, value: nothing(f"1: {what}") if value in (1, 1.0) else None


def _off(what: str) -> Convert:
    """Settings that are nothing when they are off, and have no counterpart above."""
    return lambda foreign, given, value: None if value else nothing(f"off: {what}")


def _behind(*switch: str) -> Convert:
    """Settings that count only where a switch is on, under one of its names; unset, it is off."""
    off = f"{switch[0]} is off there"
    return lambda foreign, given, value: None if foreign.is_on(*switch) else nothing(off)


def _on(what: str) -> Convert:
    """The same of settings that are nothing when they are on."""
    return lambda foreign, given, value: nothing(what) if value else None


def _whole_distribution(*values: float | None) -> Convert:
    """Bounds of sampling that leave nothing out; others have no counterpart."""
    return lambda foreign, given, value: nothing("the whole distribution, as always here") if value in values else None


TOP_P, TOP_K = _whole_distribution(1, None), _whole_distribution(-1, 0, None)


def _val_sampled(foreign: Foreign, given: Given, value: Any) -> Here:
    """verl's temperature of an evaluation is 0 where the file has none, which is greedy whatever do_sample says."""
    return Here({"evaluation.sampled": _is_val_sampled(foreign)})


def _is_val_sampled(foreign: Foreign) -> bool:
    return bool(foreign.value("val_kwargs.do_sample")) and foreign.value("val_kwargs.temperature", default=0) != 0


def _val_samples(foreign: Foreign, given: Given, value: Any) -> Here | None:
    is_greedy = foreign.value("val_kwargs.do_sample") is not None and not _is_val_sampled(foreign)
    return nothing("greedy answers to a prompt are alike") if is_greedy and value != 1 else None


def _drops(foreign: Foreign, given: Given, value: Any) -> Here | None:
    if not foreign.value("filter_groups.enable"):
        return nothing("filter_groups.enable is off there")
    return None if value > 0 else Here({}, f"{value}: no bound there; algorithm.max_flat_drops is one, 4 by default")


def _strategy(key: str) -> Convert:
    """When the trainers of transformers save or evaluate."""

    def convert(foreign: Foreign, given: Given, value: Any) -> Here:
        if value == "no":
            return Here({key: 0})
        return nothing(f"{key} decides") if value == "steps" else Here({}, f"{key} counts steps; there is no {value!r}")

    return convert


def _unless_off(strategy: str) -> Convert:
    return lambda foreign, given, value: nothing(f"{strategy} is 'no'") if foreign.value(strategy) == "no" else None


def _undivided(foreign: Foreign, given: Given, value: Any) -> Here:
    if value and foreign.value("advantage_estimator") is None:
        return Here({"algorithm.advantage": "dr_grpo"}, "grpo by default there, without the deviation")
    return nothing("decides between grpo and dr_grpo, as in --advantage-estimator")


def _importance(foreign: Foreign, given: Given, value: Any) -> Here | None:
    kinds = {"token": "token_tis", "sequence": "sequence_tis"}
    if value is None:
        return nothing("no correction there")
    return Here({"algorithm.proximal": "current", "algorithm.correction": kinds[value]}) if value in kinds else None


def _ranks_of_a_row(foreign: Foreign, given: Given, value: Any) -> Here | None:
    """verl has it twice, for the actor and in its engine, of which one may have been left at 1."""
    is_left = value == 1 and foreign.values_differ("ulysses_sequence_parallel_size")
    return nothing("given twice, and the other counts") if is_left else None


# ---- rewards -----------------------------------------------------------------------------------------------


def _custom_reward(foreign: Foreign, given: Given, value: Any) -> Here:
    if value is None:
        return nothing("none there")
    name = foreign.value("custom_reward_function.name", default="compute_score")
    return Here({"reward.function": f"{value}:{name}"}, "a function with verl's arguments, as it is")


def _reward_name(foreign: Foreign, given: Given, value: Any) -> Here:
    return nothing(
        "stands behind the file's path, as above" if foreign.value("custom_reward_function.path") else "unused"
    )


def _grader(foreign: Foreign, given: Given, value: Any) -> Here | None:
    return Here({"reward.function": REWARDS[value]}) if value in REWARDS else None


def _slime_reward(foreign: Foreign, given: Given, value: Any) -> Here:
    module, _, function = str(value).rpartition(".")
    return Here(
        {"reward.function": f"{module}:{function}"}, "slime passes (args, sample); here it is reward(sample), a dict"
    )


def _functions(foreign: Foreign, given: Given, value: Any) -> Here:
    weights = foreign.value("reward_weights") or [1.0] * len(value)
    if len(value) == 1 and weights[0] == 1:
        return Here({"reward.function": value[0]}, "a function with TRL's arguments, as it is")
    return Here(
        {"reward.function": dict(zip(value, weights, strict=False))}, "functions with TRL's arguments, as they are"
    )


def _weights(foreign: Foreign, given: Given, value: Any) -> Here:
    return nothing("beside the functions, as in reward_funcs")


def _advantage_scale(foreign: Foreign, given: Given, value: Any) -> Here | None:
    if value in (True, "group"):
        return Here({"algorithm.advantage": "grpo"})
    return Here({"algorithm.advantage": "dr_grpo"}, "without the deviation") if value in (False, "none") else None


def _level(foreign: Foreign, given: Given, value: Any) -> Here | None:
    if value == "token":
        return nothing("ratios are those of tokens, unless algorithm.loss is gspo")
    return Here({"algorithm.loss": "gspo"}) if value == "sequence" else None


# ---- environments ------------------------------------------------------------------------------------------


def _environment(foreign: Foreign, given: Given, value: Any) -> Here:
    if value in SINGLE_TURN:
        return Here({"reward.function": SINGLE_TURN[value]}, "one question, one answer: no environment is needed")
    pairs = {"environment.function": "verifiers", "environment.options": {"taskset": {"id": value}}}
    return Here(pairs, f"its tasks are the rows: data.train verifiers:{value} (extra `verifiers`)")


def _dataset(side: str) -> Convert:
    key, split = {"train": ("data.train", "train"), "eval": ("data.eval", "test")}[side]

    def convert(foreign: Foreign, given: Given, value: Any) -> Here:
        at = f"orchestrator.{side}.env"
        subset = foreign.value(f"{at}.args.dataset_subset", f"{at}.taskset.dataset_subset")
        part = foreign.value(f"{at}.args.dataset_split", f"{at}.taskset.dataset_split", default=split)
        query = "&".join([*([f"name={subset}"] if subset else []), f"split={part}"])
        return Here(
            {key: f"datasets:{value}?{query}"}, "a hub's name (extra `datasets`), or a file: docs/howto/data.md"
        )

    return convert


def _beside(what: str) -> Convert:
    return lambda foreign, given, value: nothing(what)


def _context(foreign: Foreign, given: Given, value: Any) -> Here:
    """prime-rl counts prompt and answer together."""
    answer = foreign.value("train.sampling.max_completion_tokens", "train.sampling.max_tokens")
    if answer is None or int(answer) >= int(value):
        return Here({"rollout.max_new_tokens": int(value)}, "prompt and answer together there; the answer alone here")
    return Here({"data.max_prompt_tokens": int(value) - int(answer)}, "prompt and answer together there: what is left")


def _packed(foreign: Foreign, given: Given, value: Any) -> Here:
    return Here({"learner.max_tokens_per_microbatch": int(value)}, "the length that answers are packed to")


TOGETHER: Mapping[str, Mapping[str, Convert]] = {
    "verl": {
        "data.train_batch_size": batches.batch,
        "total_epochs": batches.epochs,
        "optim.lr_warmup_steps": batches.warmup_steps,
        "lr_warmup_steps_ratio": batches.warmup_ratio,
        "trainer.n_gpus_per_node": _split,
        "trainer.nnodes": _nodes,
        "actor.clip_ratio": _clip,
        "use_kl_loss": _kl_switch("loss"),
        "use_kl_in_reward": _kl_switch("reward"),
        "custom_reward_function.path": _custom_reward,
        "custom_reward_function.name": _reward_name,
        "norm_adv_by_std_in_grpo": _beside("decides between grpo and dr_grpo, as in algorithm.adv_estimator"),
        "actor_rollout_ref.rollout.top_p": TOP_P,
        "actor_rollout_ref.rollout.top_k": TOP_K,
        "val_kwargs.top_p": TOP_P,
        "val_kwargs.top_k": TOP_K,
        "actor.fsdp_config.param_offload": _off("parameters stay on the GPU, as here"),
        "val_before_train": _on("version 0 is evaluated here, too"),
        "ppo_epochs": batches.updates,
        "ppo_mini_batch_size": batches.mini_batch,
        "overlong_buffer.len": _behind("overlong_buffer.enable"),
        "overlong_buffer.penalty_factor": _behind("overlong_buffer.enable"),
        "overlong_buffer_cfg.len": _behind("overlong_buffer_cfg.enable"),
        "overlong_buffer_cfg.penalty_factor": _behind("overlong_buffer_cfg.enable"),
        "reward_model.enable": _off("no reward model"),
        "reward_model.model.path": _behind("reward_model.enable"),
        "reward_model.model_path": _behind("reward_model.enable"),
        "reward_model.forward_max_token_len_per_gpu": _behind("reward_model.enable"),
        "val_kwargs.do_sample": _val_sampled,
        "val_kwargs.n": _val_samples,
        "kl_penalty": _kl_penalty,
        "max_num_gen_batches": _drops,
        "rollout_correction.rollout_is": _importance,
        "rollout_is_threshold": _behind("rollout_is"),
        "multi_turn.tool_config_path": _behind("multi_turn.enable"),
        "multi_turn.max_assistant_turns": _behind("multi_turn.enable"),
        "multi_turn.enable": _off("one turn"),
        "ulysses_sequence_parallel_size": _ranks_of_a_row,
    },
    "slime": {
        "num_epoch": batches.epochs,
        "actor_num_gpus_per_node": _split,
        "rollout_num_gpus": _split,
        "actor_num_nodes": _nodes,
        "colocate": _colocate,
        "use_kl_loss": _kl_switch("loss"),
        "rm_type": _grader,
        "custom_rm_path": _slime_reward,
        "tensor_model_parallel_size": _mesh_tensor,
        "pipeline_model_parallel_size": _one("no pipeline ranks"),
        "expert_model_parallel_size": _one("no expert ranks"),
        "expert_tensor_parallel_size": _one("no expert ranks"),
        "disable_grpo_std_normalization": _undivided,
        "tis_clip": _behind("use_tis"),
        "ref_update_interval": _behind("use_kl_loss"),
        "rollout_top_p": TOP_P,
        "rollout_top_k": TOP_K,
        "num_steps_per_rollout": batches.updates,
        "global_batch_size": batches.mini_batch,
        "eval_top_p": TOP_P,
    },
    "prime-rl": {
        "orchestrator.batch_size": batches.batch,
        "deployment.num_infer_gpus": _split,
        "deployment.num_train_gpus": _split,
        "train.env.id": _environment,
        "train.env.taskset.id": _environment,
        "train.env.args.dataset_name": _dataset("train"),
        "train.env.taskset.dataset_name": _dataset("train"),
        "train.env.args.dataset_subset": _beside("part of data.train"),
        "train.env.taskset.dataset_subset": _beside("part of data.train"),
        "train.env.args.dataset_split": _beside("part of data.train"),
        "train.env.name": _beside("metrics go by the names of data.train"),
        "eval.env.id": _beside("evaluations have the reward or environment of training"),
        "eval.env.taskset.id": _beside("evaluations have the reward or environment of training"),
        "eval.env.args.dataset_name": _dataset("eval"),
        "eval.env.taskset.dataset_name": _dataset("eval"),
        "eval.env.args.dataset_subset": _beside("part of data.eval"),
        "eval.env.taskset.dataset_subset": _beside("part of data.eval"),
        "eval.env.args.dataset_split": _beside("part of data.eval"),
        "eval.env.name": _beside("metrics go by the names of data.eval"),
        "trainer.model.seq_len": _packed,
        "seq_len": _context,
        "dp_replicate": _one("one copy of the sharded model"),
        "trainer.model.cp": _one("rows are not divided"),
        "trainer.model.ep": _one("no expert ranks"),
    },
    "TRL": {
        "per_device_train_batch_size": batches.batch,
        "generation_batch_size": batches.batch,
        "gradient_accumulation_steps": _beside("part of the batch: per_device_train_batch_size, as above"),
        "num_train_epochs": batches.epochs,
        "warmup_steps": batches.warmup_steps,
        "warmup_ratio": batches.warmup_ratio,
        "reward_funcs": _functions,
        "reward_weights": _weights,
        "scale_rewards": _advantage_scale,
        "importance_sampling_level": _level,
        "save_strategy": _strategy("checkpoint.every_steps"),
        "save_steps": _unless_off("save_strategy"),
        "eval_strategy": _strategy("evaluation.every_steps"),
        "eval_steps": _unless_off("eval_strategy"),
        "ref_model_sync_steps": _behind("sync_ref_model"),
        "num_iterations": batches.updates,
        "steps_per_generation": batches.generation,
        "bf16": _on("`auto` is bfloat16 on GPUs (learner.compute_dtype, rollout.dtype)"),
        "fp16": _off("`auto` is bfloat16 on GPUs (learner.compute_dtype, rollout.dtype)"),
        "top_p": TOP_P,
        "top_k": TOP_K,
        "peft_config.lora_dropout": _off("no dropout"),
        "vllm_mode": _beside("the two sides have GPUs of their own here: placement.split"),
        "use_vllm": _beside("rollout.engine is `auto`: SGLang on GPUs, the embedded torch engine on a CPU"),
    },
}
"""By framework and end of the name. None as an answer: the tables decide."""
