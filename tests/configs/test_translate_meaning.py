"""Settings that look alike in name or in value and mean something else: other models, switches, sentinels, updates."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.translate.text import yaml_file
from configs.translate.together import divided
from configs.translate.translation import Translation
from tests.configs.test_translate import SLIME, VERL, keys, made

POLICY = {
    "actor_rollout_ref": {
        "model": {"path": "policy", "lora_rank": 32, "lora_alpha": 16, "lora": {"rank": 0, "target_modules": ["qkv"]}},
        "actor": {
            "optim": {"lr": 2e-6, "weight_decay": 0.1, "betas": [0.9, 0.95], "lr_warmup_steps": 7},
            "fsdp_config": {"optimizer_offload": True},
            "ppo_max_token_len_per_gpu": 16384,
            "grad_clip": 0.5,
            "ulysses_sequence_parallel_size": 2,
            "clip_ratio_high": 0.28,
        },
        "rollout": {"tensor_model_parallel_size": 1, "n": 8, "max_num_seqs": 64},
        "ref": {"ulysses_sequence_parallel_size": 1, "fsdp_config": {"optimizer_offload": False}},
    },
}
OTHERS = {
    "critic": {
        "optim": {"lr": 1e-5, "weight_decay": 0.01, "betas": [0.9, 0.999], "lr_warmup_steps": -1},
        "fsdp_config": {"optimizer_offload": False},
        "model": {"path": "another", "lora_rank": 0},
        "ppo_max_token_len_per_gpu": 32768,
        "ulysses_sequence_parallel_size": 1,
        "grad_clip": 1.0,
        "cliprange_value": 0.5,
        "forward_micro_batch_size": "${.ppo_micro_batch_size}",
    },
    "reward_model": {
        "rollout": {"tensor_model_parallel_size": 2, "n": 1, "max_num_seqs": 1024},
        "reward_manager": "dapo",
    },
    "reward": {"reward_model": {"rollout": {"tensor_model_parallel_size": 2}, "enable": False}},
    "distillation": {"enabled": False, "distillation_loss": {"clip_ratio_high": 0.2}},
    "trainer": {"n_gpus_per_node": 4, "total_training_steps": 3},
    "algorithm": {"adv_estimator": "grpo"},
}
TREE = {**POLICY, **OTHERS}


def of_tree(tmp_path: Path, tree: dict[str, Any]) -> Translation:
    """The translation of a YAML file of verl."""
    return made(tmp_path, "a.yaml", yaml.safe_dump(tree, sort_keys=False))


def kinds(found: Translation) -> dict[str, str]:
    """Kind by name of the setting."""
    return {line.shown.split("=")[0].split(": ")[0].split(" ")[0]: line.kind for line in found.lines}


# ---- sections of other models ------------------------------------------------------------------------------


def test_settings_of_critic_reference_and_reward_model_leave_the_policys_alone(tmp_path):
    found = of_tree(tmp_path, TREE)
    expected = {
        "model.path": "policy",
        "learner.lr": 2e-6,
        "learner.weight_decay": 0.1,
        "learner.betas": [0.9, 0.95],
        "learner.warmup_steps": 7,
        "learner.offload_optimizer": True,
        "learner.max_tokens_per_microbatch": 16384,
        "learner.max_grad_norm": 0.5,
        "learner.mesh.context": 2,
        "learner.lora.rank": 32,
        "learner.lora.alpha": 16,
        "algorithm.clip_high": 0.28,
        "placement.tensor_parallel": 1,
        "placement.split": "2:2",
        "rollout.group_size": 8,
        "rollout.max_running": 64,
    }
    assert {key: keys(found).get(key) for key in expected} == expected
    assert not {"critic.lr", "critic.path", "reward.model.path", "learner.lora.targets"} & keys(found).keys()
    lines = {line.shown.partition(":")[0]: line for line in found.lines}
    assert "critic's, and not needed" in lines["critic.grad_clip"].note
    assert lines["critic.forward_micro_batch_size"].kind == "not needed"
    assert "reference model's" in lines["actor_rollout_ref.ref.ulysses_sequence_parallel_size"].note
    assert "reward model's" in lines["reward_model.rollout.tensor_model_parallel_size"].note
    assert lines["reward_model.reward_manager"].kind == "no counterpart"


def test_the_order_of_sections_does_not_matter(tmp_path):
    *some, trainer, algorithm = TREE.items()
    trees = [of_tree(tmp_path, dict((*order, trainer, algorithm))).tree for order in permutations(some)]
    assert all(tree == trees[0] for tree in trees)


def test_a_null_under_an_old_name_leaves_the_value_under_the_new_one(tmp_path):
    old = {"custom_reward_function": {"path": None, "name": None}}
    new = {"reward": {"custom_reward_function": {"path": "r.py", "name": "judge"}}}
    for tree in ({**old, **new}, {**new, **old}):
        assert keys(of_tree(tmp_path, {**tree, "trainer": {}}))["reward.function"] == "r.py:judge"


def test_settings_of_a_critic_that_trains_with_its_own_optimizer_are_said_to_be_lost(tmp_path):
    tree = {**TREE, "algorithm": {"adv_estimator": "gae"}}
    found = of_tree(tmp_path, tree)
    assert keys(found)["critic.lr"] == 1e-5 and keys(found)["critic.clip"] == 0.5
    assert keys(found)["learner.weight_decay"] == 0.1
    lines = {line.shown.partition(":")[0]: line.kind for line in found.lines}
    assert lines["critic.optim.weight_decay"] == "no counterpart"
    assert lines["critic.ulysses_sequence_parallel_size"] == "not needed"


@pytest.mark.parametrize(
    "words", ["distillation.enabled=True distillation.loss=k3", "actor_rollout_ref.model.lora.rank=8"]
)
def test_other_models_that_are_on_are_no_counterpart(words, tmp_path):
    assert set(kinds(made(tmp_path, "a.sh", VERL.format(words))).values()) == {"no counterpart"}


def test_an_unknown_option_of_rewards_is_still_named(tmp_path):
    words = "+reward_model.reward_kwargs.depth=3 reward_model.overlong_buffer.log=True"
    assert set(kinds(made(tmp_path, "a.sh", VERL.format(words))).values()) == {"unknown"}


@pytest.mark.parametrize("section", ["teacher_inference", "orchestrator.teacher", "orchestrator.teacher_model"])
def test_a_teacher_is_not_the_model_that_is_trained(section, tmp_path):
    text = f"[model]\nname = 'policy'\n[{section}.model]\nname = 'big'\n[orchestrator]\n"
    found = made(tmp_path, "rl.toml", text)
    assert keys(found)["model.path"] == "policy" and found.lines[1].kind == "no counterpart"


def test_sampling_of_evaluations_leaves_that_of_training_alone(tmp_path):
    text = "[orchestrator.train.sampling]\nmax_tokens = 100\n[orchestrator.eval.sampling]\nmax_tokens = 900\n"
    text += "[[orchestrator.eval.env]]\nid = 'math-env'\nnum_workers = 7\n"
    found = made(tmp_path, "rl.toml", text)
    assert keys(found)["rollout.max_new_tokens"] == 100 and keys(found)["evaluation.max_new_tokens"] == 900
    assert "environment.workers" not in keys(found)
    assert found.lines[-1].kind == "unknown", "the evaluation's own workers are named"


# ---- switches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [True, False, None])
@pytest.mark.parametrize(
    ("section", "words", "expected"),
    [
        (
            "reward_model.overlong_buffer",
            "{0}.len=512 {0}.penalty_factor=2.0",
            {"algorithm.overlong_buffer": 512, "algorithm.overlong_penalty": 2.0},
        ),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "{0}.len=512 {0}.penalty_factor=2.0",
            {"algorithm.overlong_buffer": 512, "algorithm.overlong_penalty": 2.0},
        ),
        ("reward_model", "{0}.model.path=judge", {"reward.model.path": "judge"}),
        ("reward.reward_model", "{0}.model_path=judge", {"reward.model.path": "judge"}),
    ],
)
def test_what_a_switch_turns_on_is_written_only_where_it_is_on(section, words, expected, switch, tmp_path):
    given = "" if switch is None else f"{section}.enable={switch} "
    found = made(tmp_path, "a.sh", VERL.format(given + words.format(section)))
    assert {key: value for key, value in keys(found).items() if key in expected} == (expected if switch else {})
    assert {line.kind for line in found.lines[given != "" :]} == {"key" if switch else "not needed"}


# ---- sentinels ---------------------------------------------------------------------------------------------

RATIO, EXACT = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "actor_rollout_ref.actor.optim.lr_warmup_steps"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (f"{EXACT}=-1", 0),
        (f"{EXACT}=null", 0),
        (f"{EXACT}=0 {RATIO}=0.1 trainer.total_training_steps=100", 10),
        (f"{RATIO}=0.1 {EXACT}=-1 trainer.total_training_steps=100", 10),
        (f"{EXACT}=-1 {RATIO}=0.1 trainer.total_training_steps=100", 10),
        (f"{EXACT}=-1 {RATIO}=0.1 trainer.total_epochs=2 data.train_batch_size=10", 10),
        (f"{EXACT}=-1 {RATIO}=0.0", 0),
        (f"{EXACT}=7 {RATIO}=0.1 trainer.total_training_steps=100", 7),
        (f"{RATIO}=0.1 {EXACT}=-1", None),
    ],
)
def test_warmup_of_verl_is_the_ratio_where_no_steps_are_given(words, steps, tmp_path):
    found = made(tmp_path, "a.sh", VERL.format(words), rows=500)
    assert keys(found).get("learner.warmup_steps") == steps
    if steps is None:
        assert "--set learner.warmup_steps=N (0.1 of" in next(
            line.note for line in found.lines if "ratio" in line.shown
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("max_steps=-1, num_train_epochs=2", {"learner.total_steps": 800}),
        (
            "max_steps=-1, num_train_epochs=2, warmup_ratio=0.1",
            {"learner.total_steps": 800, "learner.warmup_steps": 80},
        ),
        ("max_steps=50, warmup_steps=0.1", {"learner.total_steps": 50, "learner.warmup_steps": 5}),
        ("max_steps=50, warmup_steps=3", {"learner.total_steps": 50, "learner.warmup_steps": 3}),
    ],
)
def test_lengths_of_trl_that_stand_for_epochs_or_shares(arguments, expected, tmp_path):
    found = keys(made(tmp_path, "a.py", f"GRPOConfig({arguments})\n", "data.train=x", rows=400))
    assert {key: found.get(key) for key in expected} == expected


# ---- updates and GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "number"),
    [
        ("a.sh", VERL.format("actor_rollout_ref.actor.ppo_epochs={}"), 4),
        ("a.sh", VERL.format("actor_rollout_ref.actor.ppo_mini_batch_size=$((64/{})) data.train_batch_size=64"), 2),
        ("a.sh", SLIME.format("--num-steps-per-rollout {}"), 2),
        ("a.sh", SLIME.format("--global-batch-size $((64/{})) --rollout-batch-size 8 --n-samples-per-prompt 8"), 4),
        ("a.py", "GRPOConfig(num_iterations={})\n", 4),
        ("a.py", "GRPOConfig(steps_per_generation=2 * {}, gradient_accumulation_steps=2)\n", 3),
    ],
)
def test_several_updates_a_batch_have_no_counterpart_and_one_needs_none(file, text, number, tmp_path):
    for value, kind in ((1, "not needed"), (number, "no counterpart")):
        found = made(tmp_path, file, text.replace("2 * {}", str(2 * value)).replace("{}", str(value)))
        line = found.lines[0]
        assert line.kind == kind
        below = yaml_file(found).partition("# Not here:")[2]
        assert (line.shown in below) == (kind == "no counterpart")
    assert line.note == (
        f"{number} updates a batch there, one here: raise learner.lr, or lower rollout.groups_per_step"
    )


def test_a_batch_of_trl_has_the_answers_of_a_generation(tmp_path):
    text = "GRPOConfig(per_device_train_batch_size=8, {})\n"
    for words, groups in (
        ("steps_per_generation=4, gradient_accumulation_steps=2", 8),
        ("steps_per_generation=1, gradient_accumulation_steps=2", 4),
        ("generation_batch_size=64", 8),
    ):
        found = made(tmp_path, "a.py", text.format(words), gpus=2)
        assert keys(found)["rollout.groups_per_step"] == groups
    assert "4 updates a batch there" in found.lines[-1].note


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("gpus", range(1, 17))
def test_a_split_has_no_more_gpus_than_there_are(gpus, tensor):
    pairs = divided(gpus, tensor).pairs
    rollout, learner = map(int, pairs["placement.split"].split(":"))
    is_shared = pairs.get("placement.share_gpus", False)
    assert min(rollout, learner) >= 1 and (max(rollout, learner) if is_shared else rollout + learner) <= gpus
    assert is_shared == (gpus <= tensor) and (rollout % tensor == 0 or gpus < tensor)


# ---- what the framework takes where the file says nothing, or a sentinel -------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("actor.kl_loss_type=kl actor.use_kl_loss=True", {"algorithm.kl": None, "algorithm.kl_coef": None}),
        ("actor.use_kl_loss=True", {"algorithm.kl": "k3"}),
        ("algorithm.use_kl_in_reward=True", {"algorithm.kl": "k1", "algorithm.kl_in": "reward"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl", {"algorithm.kl": "k3"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs", {"algorithm.kl": None}),
        ("actor_rollout_ref.ref.model.path=r", {"algorithm.reference_path": None}),
        ("actor_rollout_ref.ref.model.path=r actor.use_kl_loss=True", {"algorithm.reference_path": "r"}),
        ("val_kwargs.do_sample=True val_kwargs.temperature=0", {"evaluation.sampled": False}),
        ("val_kwargs.temperature=0 val_kwargs.do_sample=True", {"evaluation.sampled": False}),
        ("val_kwargs.do_sample=True val_kwargs.temperature=0.6", {"evaluation.sampled": True}),
        ("val_kwargs.n=4 val_kwargs.do_sample=False", {"evaluation.samples": None, "evaluation.sampled": False}),
        ("algorithm.filter_groups.enable=True filter_groups.max_num_gen_batches=10", {"algorithm.max_flat_drops": 10}),
        (
            "algorithm.filter_groups.enable=False filter_groups.max_num_gen_batches=10",
            {"algorithm.max_flat_drops": None},
        ),
        ("algorithm.rollout_correction.rollout_is_threshold=2.0", {"algorithm.correction_high": None}),
        ("multi_turn.enable=False multi_turn.tool_config_path=t.yaml", {"environment.function": None}),
        (
            "fsdp_config.ulysses_sequence_parallel_size=2 actor.ulysses_sequence_parallel_size=1",
            {"learner.mesh.context": 2},
        ),
        ("data.max_prompt_length=9", {"algorithm.advantage": "gae", "learner.total_steps": 218}),
    ],
)
def test_values_of_verl_that_depend_on_others(words, expected, tmp_path):
    found = keys(made(tmp_path, "a.sh", VERL.format(words), rows=7473))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use-kl-loss --kl-loss-coef 0.01", {"algorithm.kl": None, "algorithm.kl_in": None}),
        ("--kl-loss-type k2 --use-kl-loss --kl-loss-coef 0.01", {"algorithm.kl": "k2"}),
        ("--use-kl-loss --kl-loss-type k2", {"algorithm.kl": None}),
        ("--disable-grpo-std-normalization", {"algorithm.advantage": "dr_grpo"}),
        ("--advantage-estimator gspo --disable-grpo-std-normalization", {"algorithm.advantage": "dr_grpo"}),
        ("--tis-clip 3", {"algorithm.correction_high": None}),
        ("--use-tis --tis-clip 3", {"algorithm.correction_high": 3}),
        ("--ref-update-interval 5", {"algorithm.reference_refresh_steps": None}),
        ("--lr 1e-6", {"data.shuffle": False}),
        ("--rollout-shuffle", {"data.shuffle": True}),
    ],
)
def test_values_of_slime_that_depend_on_others(words, expected, tmp_path):
    found = keys(made(tmp_path, "a.sh", SLIME.format(words)))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("save_strategy='no', save_steps=9", {"checkpoint.every_steps": 0}),
        ("save_strategy='steps', save_steps=9", {"checkpoint.every_steps": 9}),
        ("eval_strategy='no', eval_steps=9", {"evaluation.every_steps": 0}),
        ("ref_model_sync_steps=9", {"algorithm.reference_refresh_steps": None}),
        ("sync_ref_model=True, ref_model_sync_steps=9", {"algorithm.reference_refresh_steps": 9}),
        ("vllm_importance_sampling_correction=True", {"algorithm.correction": None}),
        ("use_vllm=True, vllm_importance_sampling_correction=True", {"algorithm.correction": "sequence_mis"}),
    ],
)
def test_values_of_trl_that_depend_on_others(arguments, expected, tmp_path):
    found = keys(made(tmp_path, "a.py", f"GRPOConfig({arguments})\n", "data.train=x"))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("a.sh", VERL.format("actor_rollout_ref.rollout.top_k=1"), "no counterpart"),
        ("a.sh", VERL.format("actor_rollout_ref.rollout.top_k=-1"), "not needed"),
        ("a.sh", SLIME.format("--rollout-top-k 1"), "no counterpart"),
        ("a.py", "GRPOConfig(top_k=0)\n", "not needed"),
        ("a.py", "GRPOConfig(top_p=0.9)\n", "unknown"),
        ("a.sh", VERL.format("data.val_max_samples=-1"), "no counterpart"),
        ("a.toml", "[orchestrator.eval]\nnum_examples = -1\n", "no counterpart"),
        ("a.py", "GRPOConfig(save_total_limit=None)\n", "no counterpart"),
        ("a.py", "GRPOConfig(save_strategy='epoch')\n", "no counterpart"),
        ("a.sh", VERL.format("trainer.max_actor_ckpt_to_keep=null"), "no counterpart"),
        ("a.sh", VERL.format("algorithm.gamma=0.9 algorithm.adv_estimator=reinforce_plus_plus"), "no counterpart"),
        ("a.sh", VERL.format("algorithm.gamma=0.9 algorithm.adv_estimator=grpo"), "not needed"),
        ("a.sh", VERL.format("filter_groups.max_num_gen_batches=0 filter_groups.enable=True"), "no counterpart"),
    ],
)
def test_a_value_that_is_lost_is_said_to_be(file, text, kind, tmp_path):
    assert made(tmp_path, file, text).lines[0].kind == kind


def test_an_empty_list_of_filters_is_none(tmp_path):
    found = made(tmp_path, "rl.toml", "[orchestrator]\npre_batch_filters = []\npost_batch_filters = []\n")
    assert keys(found)["algorithm.dynamic_sampling"] is False
    assert keys(found)["algorithm.drop_zero_advantage"] is False


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (("a/gsm8k/t.parquet", "a/math/t.parquet"), ("gsm8k", "math")),
        (("d/easy.parquet", "d/hard.parquet"), ("easy", "hard")),
        (("a/x/t.parquet", "b/x/t.parquet"), ("a-x-t", "b-x-t")),
    ],
)
def test_several_files_are_several_datasets_whatever_their_folders(tmp_path, files, names):
    found = made(tmp_path, "a.sh", VERL.format(f"data.train_files=[{','.join(files)}]"))
    assert keys(found)["data.train"] == dict(zip(names, files, strict=True))
