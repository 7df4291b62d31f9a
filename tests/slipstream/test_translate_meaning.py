"""What whole files of other frameworks mean here: updates, lag, split, rewards and environments."""

import pytest

from slipstream.translate.judges import FOREIGN, VERIFIERS
from tests.slipstream.test_translate import SLIME, VERL, keys, made

ONE_STEP = """PYTHONUNBUFFERED=1 python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_batch_size=1152 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=192 actor_rollout_ref.actor.ppo_epochs=2 trainer.n_gpus_per_node=6 \\
  trainer.nnodes=1 rollout.n_gpus_per_node=2 rollout.nnodes=1 2>&1 | tee log
"""
FULLY_ASYNC = """ray job submit --address=http://127.0.0.1:8265 -- uv run --frozen --all-packages python3 \\
  -m recipe.fully_async_policy.fully_async_main data.train_batch_size=0 rollout.total_rollout_steps=$((512*100)) \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 async_training.require_batches=4 \\
  async_training.trigger_parameter_sync_step=4 async_training.staleness_threshold=0.1 rollout.test_freq=10 \\
  async_training.use_rollout_log_probs=False
"""
DAPO = """LAUNCH=(python3)
DATA=(data.train_batch_size=256)
"${LAUNCH[@]}" -m recipe.dapo.main_dapo "${DATA[@]}" actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
  actor_rollout_ref.actor.use_kl_loss=True
"""
RESOLVED = """actor_rollout_ref:
  actor: {ppo_mini_batch_size: 64, ppo_epochs: 1, _target_: verl.Actor, profiler: {enable: true}, tau: null}
  rollout: {n: "${oc.select:algorithm.n,5}", nothing: false}
data: {train_batch_size: 256}
trainer: {total_training_steps: 7}
"""
SEPARATE = """python3 train_async.py --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64 \\
  --rollout-num-gpus 4 --actor-num-gpus-per-node 2 --actor-num-nodes 1
"""
PRIME = """seq_len = 2048
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[monitors.wandb]
project = "p"
[[orchestrator.train.source]]
name = "reverse"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
"""
AREAL = """experiment_name: e
rollout: {backend: "sglang:d4p1t2", max_head_offpolicyness: 2}
gconfig: {n_samples: 4, max_new_tokens: 64, temperature: 1.0}
actor: {backend: "fsdp:d4p1t1", path: m, ppo_n_minibatches: 2, use_decoupled_loss: true,
  eps_clip: 0.4, eps_clip_higher: null, kl_ctl: 0.1,
  rejection_sampling: {metric: ratio, upper: 5.0}, optimizer: {type: adam, lr: 1.0e-5},
  temperature: "${gconfig.temperature}"}
ref: {path: m}
train_dataset: {path: rows.jsonl, batch_size: 8}
"""
TRL = """{"num_generations": 4, "generation_batch_size": 32, "gradient_accumulation_steps": 2,
  "steps_per_generation": 4,
  "num_iterations": 2, "max_steps": 100, "save_steps": 20, "num_train_epochs": 3.0,
  "epsilon": 0.3, "epsilon_high": null, "run_name": null, "use_vllm": true,
  "vllm_importance_sampling_correction": true, "vllm_importance_sampling_mode": "sequence_mask",
  "vllm_importance_sampling_clip_max": 4.0, "vllm_importance_sampling_cap": null, "sapo_temperature_neg": 1.05}
"""
HARNESS = """seq_len = 1024
[orchestrator.train.sampling]
max_completion_tokens = 24
[trainer.model]
seq_len = 4096
[[orchestrator.train.source]]
name = "a"
[orchestrator.train.source.env.taskset]
id = "a-task"
rows = "b/c d"
[orchestrator.train.source.env.agent]
max_turns = 4
harness = {id = "null"}
[orchestrator.renderer]
name = "default"
"""
OLD = """[[env]]
id = "a-task"
args = {level = 2}
[sampling]
max_tokens = 64
"""
TASKS, FLAT = {"id": "a-task", "rows": "b/c d"}, "algorithm.drop_zero_advantage"
UPDATES, EPOCHS, GROUPS = "learner.minibatches", "learner.epochs", "rollout.groups_per_step"
CLIP, REFERENCE = "algorithm.loss.ppo_clip.clip_", "algorithm.reference_path"


MEANINGS = [
    ("a.sh", ONE_STEP, {UPDATES: 6, EPOCHS: 2, "placement.split": "2:6", "replay.async_lag": 1, GROUPS: 1152}),
    ("a.sh", FULLY_ASYNC, {GROUPS: 512, UPDATES: 16, "learner.total_steps": 100, "replay.async_lag": 1}),
    ("a.sh", FULLY_ASYNC, {"evaluation.every_steps": 10, "algorithm.proximal": "current"}),
    ("a.yaml", RESOLVED, {"critic.updates": 4}),
    ("a.yaml", RESOLVED + "critic: {ppo_epochs: 2, ppo_mini_batch_size: 128}\n", {"critic.updates": 4}),
    ("a.yaml", RESOLVED + "algorithm: {adv_estimator: grpo}\n", {"critic.updates": None}),
    ("a.sh", DAPO, {UPDATES: 4, "algorithm.drop_zero_advantage": False}),
    ("a.yaml", RESOLVED, {UPDATES: 4, EPOCHS: 1, "rollout.group_size": 5, "learner.total_steps": 7}),
    ("a.sh", SEPARATE, {UPDATES: 4, "placement.split": "4:2", "replay.async_lag": 1}),
    ("a.toml", PRIME, {GROUPS: 8, "placement.split": "6:2", "data.max_prompt_tokens": 1920}),
    ("a.toml", PRIME, {"data.train": "verifiers:reverse-text", "tracking.trackers": ["wandb"]}),
    (
        "a.yaml",
        AREAL,
        {"placement.split": "8:4", "placement.tensor_parallel": 2, UPDATES: 2},
    ),
    ("a.yaml", AREAL, {"algorithm.correction": {"icepop": {"low": 0.0, "high": 5.0}}, "learner.lr": 1e-5}),
    ("a.yaml", AREAL, {f"{CLIP}low": 0.4, f"{CLIP}high": 0.4, "algorithm.kl_in": "reward", REFERENCE: "m"}),
    ("a.yaml", AREAL.replace("kl_ctl: 0.1", "kl_ctl: 0.0"), {REFERENCE: None, "algorithm.kl_coef": None}),
    ("a.yaml", AREAL.replace("ppo_n_minibatches: 2,", ""), {UPDATES: 4}),
    ("a.sh", DAPO, {"reward.function": f"{FOREIGN}:verl", "replay.async_lag": 0}),
    (
        "a.sh",
        DAPO + "  data.truncation=left reward_model.reward_manager=dapo\n",
        {"reward.function": f"{FOREIGN}:verl"},
    ),
    ("a.yaml", RESOLVED, {"reward.function": f"{FOREIGN}:verl", "replay.async_lag": 0, FLAT: False}),
    ("a.yaml", RESOLVED + "rollout: {n_gpus_per_node: 2}\n", {"replay.async_lag": 1}),
    ("a.sh", SEPARATE, {"reward.function": None, FLAT: False}),
    ("a.sh", SLIME.format("--rm-type deepscaler"), {"reward.function": f"{FOREIGN}:slime_deepscaler"}),
    ("a.sh", SLIME.format("--rm-type dapo --reward-key score"), {"reward.function": f"{FOREIGN}:slime_dapo"}),
    ("a.sh", SLIME.format("--lr 1e-6"), {"replay.async_lag": 0}),
    ("a.toml", HARNESS, {"data.train": "verifiers:a-task?rows=b/c%20d", "learner.max_tokens_per_microbatch": 4096}),
    ("a.toml", HARNESS, {"data.max_prompt_tokens": 1000, "replay.async_lag": 8, FLAT: None, GROUPS: 128}),
    (
        "a.toml",
        HARNESS,
        {"environment.function": {VERIFIERS: {"taskset": TASKS, "env": {"agent": {"max_turns": 4}}}}},
    ),
    (
        "orch.toml",
        OLD,
        {"environment.function": {VERIFIERS: {"taskset": {"id": "a-task", "level": 2}}}, FLAT: False},
    ),
    ("orch.toml", OLD, {"reward.function": "environment", "data.train": "verifiers:a-task?level=2"}),
    ("orch.toml", OLD, {"replay.async_lag": 1, "rollout.max_new_tokens": 64}),
    ("orch.toml", "max_async_level = 2\nmax_off_policy_steps = 4\n" + OLD, {"replay.async_lag": 2}),
    ("a.yaml", AREAL, {FLAT: False, "reward.function": None, "data.train": "rows.jsonl"}),
    ("a.yaml", AREAL.replace("rows.jsonl", "openai/gsm8k"), {"reward.function": f"{FOREIGN}:areal_gsm8k"}),
    ("a.json", TRL, {"checkpoint.every_steps": 5, "replay.async_lag": 0, FLAT: False}),
    ("a.py", "AsyncGRPOTrainer('m', [f], args=AsyncGRPOConfig(max_staleness=2))", {"replay.async_lag": 2}),
    ("a.py", "AsyncGRPOTrainer('m', [f], args=AsyncGRPOConfig(beta=0.0))", {"replay.async_lag": 4}),
    ("a.json", TRL, {GROUPS: 8, UPDATES: 2, EPOCHS: 2, "learner.total_steps": 25, f"{CLIP}high": 0.3}),
    ("a.json", TRL, {"algorithm.correction": {"sequence_mis": {"low": 0.0, "high": 4.0}}, "run.name": None}),
    ("a.json", TRL, {"algorithm.loss.sapo.tau_negative": None}),
    ("a.json", TRL.replace('vllm": true', 'vllm": false'), {"algorithm.correction": None}),
    ("a.json", '{"num_generations": 4, "num_iterations": 2, "bf16": true, "tf32": null}', {EPOCHS: 2}),
]
"""A file, its text, and keys here with their values; None: it is not set."""


@pytest.mark.parametrize(("name", "text", "wanted"), MEANINGS)
def test_updates_lag_and_split_are_those_of_the_other_framework(tmp_path, name, text, wanted):
    found = made(tmp_path, name, text)
    assert {key: keys(found).get(key) for key in wanted} == wanted
    assert [line.shown for line in found.lines if line.kind == "unknown"] == []


def test_prompts_that_verl_would_cut_are_no_counterpart_and_epochs_beside_steps_need_none(tmp_path):
    words = "data.truncation=left trainer.total_epochs=2 trainer.total_training_steps=7"
    found = made(tmp_path, "a.sh", VERL.format(words))
    assert [line.kind for line in found.lines] == ["no counterpart", "not needed", "key"] and not found.undecided


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.sh", ONE_STEP.replace("192", "500"), UPDATES),
        ("a.toml", PRIME.replace("128\nrollouts", "130\nrollouts"), GROUPS),
        ("a.sh", FULLY_ASYNC.replace("sync_step=4", "sync_step=x"), GROUPS),
        ("a.yaml", AREAL.replace("d4p1t2", "d4p2t2"), "placement.split"),
        ("a.sh", SEPARATE.replace("nodes 1", "nodes 2"), "placement.split"),
        ("a.sh", SEPARATE.replace("nodes 1", "nodes 1 --colocate"), "placement.split"),
        ("a.json", TRL.replace("32", "30"), GROUPS),
        ("a.json", TRL.replace('tion": 4', 'tion": 3'), UPDATES),
        ("a.json", TRL.replace("sequence_mask", "sequence_odd"), "algorithm.correction"),
        ("a.json", TRL.replace("4.0", "null"), "algorithm.correction"),
        ("a.yaml", RESOLVED.replace("n: ", "name: '???', n: "), "rollout.engine"),
        ("a.yaml", AREAL, "reward.function"),
        ("a.sh", VERL.format("reward_model.reward_manager=$MANAGER"), "reward.function"),
        ("a.sh", VERL.format("reward_model.enable=$IS_ON"), "reward.function"),
        ("a.sh", SLIME.format("--rm-type math --custom-rm-path $RULE"), "reward.function"),
        ("a.sh", SLIME.format("--rm-type dapo --reward-key acc"), "reward.function"),
        (
            "a.yaml",
            RESOLVED.replace("actor: {", "actor: {policy_loss: {loss_mode: cispo}, clip_ratio_high: 0.3, "),
            "algorithm.loss.cispo.clip_high",
        ),
    ],
)
def test_what_does_not_divide_is_asked_for(tmp_path, name, text, key):
    assert key in made(tmp_path, name, text).undecided


VERL_TEACHERS = """python3 -m verl.trainer.main_ppo distillation.enabled=True distillation.teacher_key=source \\
  +distillation.teacher_models.m.key=math +distillation.teacher_models.m.model_path=models/math \\
  +distillation.teacher_models.c.key=code +distillation.teacher_models.c.model_path=$CODE \\
  +distillation.teacher_models.m.num_replicas=2 distillation.teacher_models.teacher_model.model_path=models/none \\
"""
SLIME_TEACHER = """python3 train.py --use-opd --opd-type {kind} --opd-kl-coef 0.5 --opd-teacher-load x \\
  --rm-url http://10.0.0.7:13141/generate \\
  --custom-reward-post-process-path {path}
"""
WAY = "algorithm.distillation"


@pytest.mark.parametrize(
    ("loss", "way"),
    [
        ("loss_mode=k1 use_policy_gradient=True", {"sampled_advantage": {"coef": 1.0}}),
        ("distillation_loss_coef=0.3", {"sampled": {"estimator": "k3", "coef": 0.3}}),
        ("loss_mode=mse use_task_rewards=False", {"sampled": {"estimator": "k2", "task": 0.0}}),
        ("loss_mode=forward_kl_topk topk=64", {"top_k": {"k": 64, "direction": "forward", "coef": 1.0}}),
        ("loss_mode=k3 use_policy_gradient=True", None),
        ("loss_mode=abs", None),
    ],
)
def test_distillation_of_verl(loss, way, tmp_path):
    named = " ".join(f"distillation.distillation_loss.{one}" for one in loss.split())
    found = made(tmp_path, "a.sh", VERL_TEACHERS + named)
    assert keys(found).get(WAY) == way and (WAY in found.undecided) == (way is None)
    assert found.tree["teachers"]["m"] == {"path": "models/math", "rows": {"source": "math"}}
    assert found.tree["teachers"]["c"] == {"rows": {"source": "code"}} and "teacher_model" not in found.tree["teachers"]
    assert {"teachers.c.path", "teachers.m.devices"} <= found.undecided.keys()


@pytest.mark.parametrize(
    ("kind", "path", "expected", "undecided"),
    [
        ("sglang", "slime.rollout.on_policy_distillation.post", {"coef": 0.5, "task": 0.0}, "teachers.teacher.model"),
        ("sglang", "mine.post", {"coef": 0.5}, "teachers.teacher.model"),
        ("megatron", "mine.post", {"coef": 0.5}, "teachers.teacher.path"),
        ("self", "mine.post", None, WAY),
    ],
)
def test_distillation_of_slime(kind, path, expected, undecided, tmp_path):
    found = made(tmp_path, "a.sh", SLIME_TEACHER.format(kind=kind, path=path))
    assert keys(found).get(WAY) == (expected and {"sampled_advantage": expected}) and undecided in found.undecided
    assert keys(found).get("teachers.teacher.url") == ("http://10.0.0.7:13141/v1" if kind == "sglang" else None)


@pytest.mark.parametrize(
    ("trainer", "options", "expected"),
    [
        (
            "Distillation",
            "",
            {WAY: {"full": {"direction": "reverse", "task": 0.0}}, "teachers.teacher.where": "learner"},
        ),
        ("Distillation", "beta=0.5", {WAY: None}),
        (
            "AsyncDistillation",
            "teacher_top_k=20, max_staleness=4, teacher_server_urls={'a': 'http://h:1', 'b': 'http://h:2/'}",
            {
                WAY: {"top_k": {"k": 20, "direction": "forward", "task": 0.0}},
                "teachers.b.url": "http://h:2/v1",
                "teachers.b.rows": {"teacher_id": "b"},
                "replay.async_lag": 4,
            },
        ),
    ],
)
def test_distillation_of_trl(trainer, options, expected, tmp_path):
    text = f"""from trl import {trainer}Config, {trainer}Trainer
{trainer}Trainer("small", "big", {trainer}Config("out", {options}), train_dataset=load_dataset("json", data_files="a"))
"""
    found = keys(made(tmp_path, "a.py", text))
    assert {key: found.get(key) for key in expected} == expected
    assert (found["model.path"], found["data.train"], found["rollout.group_size"]) == ("small", "a", 1)
    assert trainer != "Distillation" or found["teachers.teacher.path"] == "big"
    assert "algorithm.kl" not in found
