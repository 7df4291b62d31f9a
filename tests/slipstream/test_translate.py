"""`slipstream translate`: scripts and files of four frameworks; whole ones stand in docs/migration (its own test)."""

import re
from pathlib import Path

import pytest
import yaml

from configs.loading import leaf_keys, load, read_yaml
from learner.corrections import CORRECTIONS
from learner.losses import LOSSES
from slipstream.runtime.variants import options_of
from slipstream.translate import __main__ as command
from slipstream.translate import shell
from slipstream.translate.converters import CONVERTERS
from slipstream.translate.files import read
from slipstream.translate.judges import VERIFIERS
from slipstream.translate.names import BY_FRAMEWORK, ROWS, TABLES
from slipstream.translate.settings import Untranslatable
from slipstream.translate.translation import Translation, translate

VERL = "#!/bin/bash\npython3 -m verl.trainer.main_ppo {} $@\n"
STEPS = " trainer.total_training_steps=9"
TOTAL, WARM_UP = "learner.total_steps", "learner.warmup_steps"
SLIME = "python3 train.py \\\n  {}\n"


def made(tmp_path: Path, name: str, text: str, *overrides: str) -> Translation:
    """The translation of a file with this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return translate(read([path]), overrides)


def keys(translation: Translation) -> dict[str, object]:
    """All keys and values of the result that are decided."""
    found = {key: value for line in translation.defaults for key, value in line.pairs.items()}
    for line in sorted(translation.lines, key=lambda line: -len(line.pairs)):
        found |= line.pairs
    return {key: value for key, value in found.items() if key not in translation.undecided}


# ---- what is read ------------------------------------------------------------------------------------------


def test_variables_arrays_sums_and_continued_lines_of_a_script_are_filled_in():
    text = """set -x
N=${N:-8}  # a default
export LEN=$((1024 * (N / 2)))
NAME="my run"
A_ARGS=(
   --lr 1e-6   # peak
   --n $N
)
A_ARGS+=(--name "$NAME")
B_ARGS=(--b "x y")
if [ "$X" = 1 ]; then
   A_ARGS+=(--extra)
fi
python train.py ${A_ARGS[@]} \\
   "${B_ARGS[@]}" --len $LEN --data $DATA --host $(hostname)
"""
    found = [words for words in shell.commands(text, "x.sh") if "train.py" in words]
    assert len(found) == 1
    assert found[0][:9] == ["python", "train.py", "--lr", "1e-6", "--n", "8", "--name", "my run", "--extra"]
    assert found[0][9:] == ["--b", "x y", "--len", "4096", "--data", "$DATA", "--host", "$(hostname)"]


def test_a_comment_begins_at_a_hash_that_begins_a_word_outside_of_quotes():
    text = """A_ARGS=(--lr 1e-6 #2e-6, isn't it
   --tag a#b  #
   --name "a # b \\" #c" --other 'x
   # y'
)
python train.py ${A_ARGS[@]} \\# #d
"""
    (found,) = shell.commands(text, "x.sh")
    names = ["--name", 'a # b " #c', "--other", "x    # y", "#"]
    assert found[2:] == ["--lr", "1e-6", "--tag", "a#b", *names]


@pytest.mark.parametrize("text", ["$((1 / 0))", "$((1 +))", "$((X + 1))"])
def test_sums_that_cannot_be_worked_out_stay_as_they_are(text):
    (words,) = shell.commands(f"echo {text}", "x.sh")
    assert words[1:] == text.split()


def test_a_script_is_never_run(tmp_path):
    flag = tmp_path / "ran"
    text = f"touch {flag}\nX=$(touch {flag})\n" + VERL.format("trainer.project_name=$(touch " + str(flag) + ")")
    made(tmp_path, "a.sh", text)
    opens = f"open({str(flag)!r}, 'w')"
    script = f"{opens}\nfrom trl import GRPOConfig\nGRPOConfig(output_dir={opens}.name)\n"
    found = made(tmp_path, "a.py", script, "data.train=x")
    assert not flag.exists() and [line.kind for line in found.lines] == ["open"]


def test_what_the_callers_shell_knows_is_named_with_its_key(tmp_path):
    found = made(tmp_path, "a.sh", VERL.format("data.train_files=$DATA/train.parquet data.val_files=$HOME/v.parquet"))
    assert [line.kind for line in found.lines] == ["open", "key"]
    assert (found.lines[0].decides, found.lines[0].note) == ("data.train", "$DATA/train.parquet")
    assert found.lines[1].pairs == {"data.eval": f"{Path.home()}/v.parquet"}


def test_references_in_a_yaml_of_verl_are_followed(tmp_path):
    text = "data: {max_response_length: 77}\ntrainer: {seed: '${x.y}'}\n"
    text += "actor_rollout_ref: {rollout: {n: '${data.max_response_length}'}}\n"
    found = made(tmp_path, "a.yaml", text)
    assert keys(found)["rollout.group_size"] == 77 and found.lines[1].kind == "open"


def test_a_set_of_files_of_prime_rl_is_one_run(tmp_path):
    (tmp_path / "orchestrator.toml").write_text("batch_size = 64\ngroup_size = 8\n[[train.env]]\nid = 'wordle'\n")
    (tmp_path / "train.toml").write_text("[optim]\nlr = 1e-5\n")
    found = translate(read([tmp_path / "orchestrator.toml", tmp_path / "train.toml"]))
    assert keys(found)["rollout.group_size"] == 8 and keys(found)["learner.lr"] == 1e-5
    assert keys(found)["environment.function"] == {VERIFIERS: {"taskset": {"id": "wordle"}}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "data: [", "not readable as YAML"),
        ("a.yaml", "- 1", "a mapping of sections is needed"),
        ("a.yaml", "replay: {async_lag: 2}", "has sections of Slipstream already (replay)"),
        ("a.yaml", "optimizer: {lr: 1}", "none of verl's sections"),
        ("a.toml", "x = ", "not readable as TOML"),
        ("a.toml", "x = 1", "its name does not say which part it is"),
        ("a.py", "def f(", "not readable as Python"),
        ("a.py", "print(1)", "makes no GRPOConfig, GRPOTrainer or DistillationTrainer"),
        ("a.sh", "echo 1", "no command starts verl"),
        ("a.sh", 'echo "', "has no end"),
        ("a.sh", "echo 'x", "has no end"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused_with_a_code(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert command.main([str(tmp_path / name), "--out", str(tmp_path / "out.yaml")]) == 2
    said = capsys.readouterr().err
    assert words in said and "[SLIP-CONFIG-14]" in said.splitlines()[0] and not (tmp_path / "out.yaml").exists()


def test_files_of_no_text_and_several_of_one_framework_are_refused(tmp_path):
    (tmp_path / "a.sh").write_bytes(b"\xff\xfe")
    for paths in ([tmp_path / "a.sh"], [tmp_path / "none.py"], [tmp_path / "a.sh", tmp_path / "b.sh"]):
        with pytest.raises(Untranslatable):
            read(paths)


# ---- what becomes of it ------------------------------------------------------------------------------------


def test_every_name_of_the_tables_leads_to_a_key_of_ours_once() -> None:
    known = {*leaf_keys(), "rollout.sglang.mem_fraction_static"}
    options = re.compile(r"algorithm\.(loss|correction)\.(\w+)\.(\w+)")
    for key in {key for keys in BY_FRAMEWORK.values() for key in keys.values()} - known:
        kind, name, option = options.fullmatch(key).groups()
        variants = LOSSES if kind == "loss" else CORRECTIONS
        assert option in options_of(variants.built_in[name]).model_fields
    assert set(TABLES["decisions"]) <= known and set(TABLES["defaults"]) <= set(BY_FRAMEWORK)
    written = [
        pairs for meanings in TABLES["values"].values() for pairs in meanings.values() if isinstance(pairs, dict)
    ]
    assert {key for pairs in written for key in pairs} <= known
    for column in range(1, 6):
        names = [row[column] for row in ROWS if row[column]]
        assert len(names) == len(set(names))
    assert not set(CONVERTERS) & {name for names in TABLES["decisions"].values() for name in names[1:]}


@pytest.mark.parametrize(
    ("name", "text", "undecided"),
    [
        ("a.sh", VERL.format("reward_model.enable=True data.train_files=gsm8k.parquet" + STEPS), ["reward.function"]),
        ("a.sh", VERL.format("reward_model.reward_manager=prime" + STEPS), ["reward.function"]),
        ("a.sh", VERL.format("reward_manager.name=prime" + STEPS), ["reward.function"]),
        ("a.sh", SLIME.format("--rm-type remote_rm"), ["reward.function"]),
        ("a.sh", SLIME.format("--rm-type math --custom-rm-path my.rewards.judge"), ["reward.function"]),
        ("a.sh", SLIME.format("--custom-rm-path my.rewards.judge"), ["reward.function"]),
        ("a.sh", SLIME.format("--optimizer muon --lr 2e-5"), ["learner.lr", "reward.function"]),
        ("a.toml", "[trainer.optim]\ntype = 'muon'\nlr = 2e-5\n", ["learner.lr", "reward.function"]),
        (
            "a.py",
            "GRPOConfig(optim='adafactor', learning_rate=2e-5, max_steps=9, generation_batch_size=8)",
            ["learner.lr", "reward.function"],
        ),
        (
            "a.sh",
            VERL.format("trainer.n_gpus_per_node=8 custom_reward_function.path=r.py" + STEPS),
            ["placement.split"],
        ),
        ("a.sh", VERL.format("trainer.total_epochs=3 custom_reward_function.path=r.py"), [TOTAL]),
        ("a.sh", VERL.format("custom_reward_function.path=r.py"), [TOTAL]),
        ("a.py", "GRPOTrainer('m', f, reward_funcs=[])", [TOTAL, "rollout.groups_per_step"]),
        (
            "a.py",
            "GRPOTrainer('m', [], args=GRPOConfig(warmup_ratio=0.1, generation_batch_size=8), reward_funcs=[])",
            [TOTAL, WARM_UP],
        ),
    ],
)
def test_what_does_not_follow_from_the_file_is_asked_for_and_never_chosen(name, text, undecided, tmp_path, capsys):
    found = made(tmp_path, name, text)
    assert sorted(found.undecided) == undecided and not set(undecided) & keys(found).keys()
    out = tmp_path / "out.yaml"
    arguments = [str(tmp_path / name), "--out", str(out), "--set", "model.path=m", "--set", "data.train=t.jsonl"]
    assert command.main(arguments) == 2 and not out.exists()
    said = capsys.readouterr().err
    assert "[SLIP-CONFIG-15]" in said and all(f"--set {key}=" in said for key in undecided)


def test_bounds_of_gspo_for_recomputed_logprobs_are_refused_and_not_replaced(tmp_path, capsys):
    words = "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --hf-checkpoint m --prompt-data d"
    words += " --n-samples-per-prompt 4"
    (tmp_path / "a.sh").write_text(SLIME.format(words))
    arguments = [str(tmp_path / "a.sh"), "--out", str(tmp_path / "out.yaml"), "--set", "reward.function=math"]
    arguments += ["--set", "rollout.dtype=bfloat16"]
    assert command.main(arguments) == 2 and "'gspo': clip_low 0.0003 and clip_high 0.0004" in capsys.readouterr().err


def test_a_decided_key_is_written_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SLIME.format("--optimizer muon --lr 2e-5 --rm-type math --n-samples-per-prompt 4"))
    given = ["model.path=m", "data.train=t.jsonl", "learner.lr=1e-6", "reward.function=math", "rollout.group_size=8"]
    words = [word for setting in given for word in ("--set", setting)]
    assert command.main([str(tmp_path / "a.sh"), "--out", str(tmp_path / "out.yaml"), *words]) == 0
    config = load(tmp_path / "out.yaml")
    assert (config.learner.lr, config.reward.function, config.rollout.group_size) == (1e-6, "math", 8)
    assert "lr: 1.0e-06  # --set" in (tmp_path / "out.yaml").read_text()


def test_unknown_names_are_named_and_kept_in_the_file(tmp_path, capsys):
    words = "data.train_files=d.jsonl actor_rollout_ref.model.path=m +trainer.frobnicate=3 rollout.n=4" + STEPS
    (tmp_path / "a.sh").write_text(VERL.format(words))
    out = tmp_path / "out.yaml"
    assert command.main([str(tmp_path / "a.sh"), "--out", str(out), "--set", "reward.function=math"]) == 0
    said = capsys.readouterr().out
    assert "1 are not translated: +trainer.frobnicate=3" in said and "#   +trainer.frobnicate=3" in out.read_text()
    assert load(out).rollout.groups_per_step == 1024


def test_secrets_are_not_copied_and_a_value_of_several_lines_stays_a_comment(tmp_path, capsys):
    words = "--odd 'a\nrollout: {group_size: 9}' --n-samples-per-prompt 4 --rollout-batch-size 2 --wandb-key abc123"
    (tmp_path / "a.sh").write_text(SLIME.format(f"{words} --hf-checkpoint m --prompt-data gsm8k.jsonl"))
    out = tmp_path / "out.yaml"
    assert command.main([str(tmp_path / "a.sh"), "--out", str(out), "--set", "reward.function=math"]) == 0
    assert "abc123" not in capsys.readouterr().out + out.read_text()
    assert "#   --odd a rollout: {group_size: 9}" in out.read_text() and load(out).rollout.group_size == 4


def test_a_result_that_cannot_be_is_refused_and_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "a.sh").write_text(VERL.format("actor_rollout_ref.rollout.n=8 data.max_prompt_length=2k" + STEPS))
    arguments = [str(tmp_path / "a.sh"), "--out", str(tmp_path / "out.yaml"), "--set", "reward.function=math"]
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert "model: missing" in said and "data.max_prompt_tokens: Input should be a valid integer" in said
    (tmp_path / "out.yaml").write_text("mine")
    arguments += ["--set", "model.path=m", "--set", "data.train=t.jsonl", "--set", "data.max_prompt_tokens=8"]
    assert command.main(arguments) == 2 and "--out" in capsys.readouterr().err
    assert (tmp_path / "out.yaml").read_text() == "mine"
    assert command.main([*arguments, "--force"]) == 0
    assert load(tmp_path / "out.yaml").model.path == "m"


VALUES = """
a.sh | data.train_batch_size=64 | {rollout.groups_per_step: 64}
a.sh | actor_rollout_ref.actor.clip_ratio=0.1 | {CLIP_low: 0.1, CLIP_high: 0.1}
a.sh | actor.clip_ratio_high=0.3 actor.clip_ratio=0.1 | {CLIP_low: 0.1, CLIP_high: 0.3}
a.sh | algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo | {algorithm.advantage: dr_grpo}
a.sh | algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=False | {algorithm.advantage: rloo}
a.sh | actor.use_kl_loss=True actor.kl_loss_type=mse | {algorithm.kl: k2, algorithm.kl_coef: 0.001}
a.sh | actor.use_kl_loss=True | {algorithm.kl: k3, algorithm.kl_in: loss}
a.sh | actor.kl_loss_coef=0.1 | {algorithm.kl_coef: null, algorithm.kl_in: null}
a.sh | algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 | {algorithm.kl_in: reward, algorithm.kl: k1}
a.sh | actor.loss_agg_mode=seq-mean-token-sum-norm | {algorithm.aggregation: constant}
a.sh | custom_reward_function.path=r.py custom_reward_function.name=f | {reward.function: 'r.py:f'}
a.sh | trainer.logger=['console','wandb'] | {tracking.trackers: [wandb]}
a.sh | trainer.save_freq=-1 | {checkpoint.every_steps: 0}
a.sh | data.train_files=['a/gsm8k/t.pq','b/math/t.pq'] | {data.train: {gsm8k: a/gsm8k/t.pq, math: b/math/t.pq}}
a.sh | actor_rollout_ref.actor.optim.lr_warmup_steps=-1 | {learner.warmup_steps: 0}
a.sh | actor.optim.lr_warmup_steps=7 actor.optim.lr_warmup_steps_ratio=0.0 | {learner.warmup_steps: 7}
a.sh | trainer.nothing=1 | {algorithm.advantage: gae, CLIP_dual: 3.0, rollout.group_size: 1}
a.sh | actor.policy_loss.loss_mode=cispo | {algorithm.loss: cispo, CLIP_dual: null}
a.sh | actor.policy_loss.loss_mode=gspo | {algorithm.loss.gspo.clip_low: 0.2, algorithm.loss.gspo.clip_high: 0.2}
a.sh | reward_model.overlong_buffer.len=512 | {algorithm.overlong_buffer: null}
a.sh | reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512 | {algorithm.overlong_buffer: 512}
b.sh | --advantage-estimator gspo | {algorithm.loss: gspo, algorithm.advantage: grpo}
b.sh | --advantage-estimator gspo --eps-clip 0.1 --eps-clip-c 3 | {algorithm.loss.gspo.clip_low: 0.1, CLIP_dual: null}
b.sh | --advantage-estimator cispo --eps-clip-high 4 | {algorithm.loss: cispo, algorithm.loss.cispo.clip_high: null}
b.sh | --rollout-batch-size 64 --global-batch-size 16 --rollout-batch-size 32 | {learner.minibatches: 2}
b.sh | --calculate-per-token-loss | {algorithm.aggregation: token}
b.sh | --eps-clip 0.3 | {CLIP_low: 0.3, CLIP_high: 0.3, algorithm.aggregation: sequence}
b.sh | --use-tis | {algorithm.proximal: current, algorithm.correction: token_tis}
b.sh | --eval-prompt-data a x.jsonl b y.jsonl | {data.eval: {a: x.jsonl, b: y.jsonl}}
b.sh | --tensor-model-parallel-size=2 | {learner.mesh.tensor: 2}
b.sh | --adam-beta1 0.8 --adam-beta2 0.9 | {learner.betas: [0.8, 0.9]}
c.py | loss_type='dr_grpo' | {algorithm.aggregation: constant}
c.py | scale_rewards=False | {algorithm.advantage: dr_grpo}
c.py | beta=0.04 | {algorithm.kl: k3, algorithm.kl_coef: 0.04}
c.py | beta=0.0 | {algorithm.kl: null}
c.py | epsilon=0.1 | {CLIP_low: 0.1, CLIP_high: 0.1}
c.py | learning_rate=LR, optim='adamw_torch' | {learner.lr: 3.0e-05}
""".strip().splitlines()
"""Framework by its file, settings, and keys here with their values; null: it is not set."""


@pytest.mark.parametrize("case", VALUES)
def test_values(case, tmp_path):
    name, words, text = case.replace("CLIP", "algorithm.loss.ppo_clip.clip").split(" | ")
    forms = {"a.sh": VERL, "b.sh": SLIME, "c.py": "LR = 3e-5\nargs = GRPOConfig({})\n"}
    found, expected = keys(made(tmp_path, name, forms[name].format(words))), read_yaml(text)
    assert {key: found.get(key) for key in expected} == expected


def test_rewards_of_a_script_are_taken_where_importing_it_does_not_train(tmp_path):
    text = "def good(completions, **columns): ...\n{}GRPOTrainer('m', good, train_dataset=d).train()\n"
    trains = made(tmp_path, "a.py", text.format(""), "data.train=x")
    assert [line.kind for line in trains.lines] == ["key", "open", "open"]
    assert trains.lines[1].note.startswith("importing a.py would train; move good to a file of its own")
    found = made(tmp_path, "b.py", text.format("if __name__ == '__main__':\n    "), "data.train=x")
    assert keys(found)["reward.function"] == f"{tmp_path}/b.py:good"


def test_of_several_environments_the_first_is_translated_and_the_others_are_open(tmp_path):
    env = '[[orchestrator.{}.env]]\nid = "{}"\n'
    given = (("train", "gsm8k"), ("train", "wordle"), ("eval", "gsm8k"), ("eval", "y"))
    found = made(tmp_path, "rl.toml", "".join(env.format(*one) for one in given))
    assert [line.kind for line in found.lines] == ["key", "open", "key", "open"]
    other = made(tmp_path, "rl.toml", "".join(env.format(*one) for one in given[::3]))
    assert [line.kind for line in other.lines] == ["key", "no counterpart"]
    assert keys(found)["environment.function"] == {VERIFIERS: {"taskset": {"id": "gsm8k"}}} and not found.undecided


@pytest.mark.parametrize("before", ["cd /opt/verl.git", "echo starts verl.trainer", "python3 -m verl.model_merger"])
def test_the_command_with_settings_is_the_one_that_starts_verl(tmp_path, before):
    found = made(tmp_path, "a.sh", f"{before}\n{VERL.format('trainer.total_training_steps=7')}")
    assert keys(found)["learner.total_steps"] == 7 and len(found.lines) == 1


def test_a_script_that_makes_two_configurations_has_a_remark(tmp_path):
    text = "from trl import GRPOConfig\nGRPOConfig(learning_rate=1e-5)\nGRPOConfig(max_steps=9)\n"
    found = made(tmp_path, "a.py", text)
    assert ["GRPOConfig is made more than once" in remark for remark in found.foreign.remarks] == [True]


# ---- sections of other models ------------------------------------------------------------------------------

POLICY = read_yaml("""
actor_rollout_ref:
  model: {path: policy, lora_rank: 32, lora_alpha: 16, lora: {rank: 0, target_modules: [qkv]}}
  actor:
    optim: {lr: 2e-6, weight_decay: 0.1, betas: [0.9, 0.95], lr_warmup_steps: 7}
    fsdp_config: {optimizer_offload: true}
    grad_clip: 0.5
    ulysses_sequence_parallel_size: 2
  rollout: {tensor_model_parallel_size: 1, n: 8, max_num_seqs: 64}
  ref: {fsdp_config: {optimizer_offload: false}}
critic:
  optim: {lr: 1e-5, weight_decay: 0.01, betas: [0.9, 0.999], lr_warmup_steps: -1}
  fsdp_config: {optimizer_offload: false}
  model: {path: another, lora_rank: 0}
  ulysses_sequence_parallel_size: 1
  grad_clip: 1.0
  cliprange_value: 0.5
reward_model: {rollout: {tensor_model_parallel_size: 2, n: 1, max_num_seqs: 1024}}
reward: {reward_model: {rollout: {tensor_model_parallel_size: 2}, enable: false}}
distillation: {enabled: false, distillation_loss: {clip_ratio_high: 0.2}}
""")
OF_POLICY = read_yaml("""{
  model.path: policy, learner.lr: 2e-6, learner.weight_decay: 0.1, learner.betas: [0.9, 0.95], learner.warmup_steps: 7,
  learner.offload_optimizer: true, learner.max_grad_norm: 0.5, learner.lora.rank: 32, placement.tensor_parallel: 1,
  rollout.group_size: 8, rollout.max_running: 64}""")


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_settings_of_other_models_leave_the_policys_alone_in_any_order(estimator, tmp_path):
    for order in (POLICY.items(), reversed(POLICY.items())):
        tree = {**dict(order), "trainer": {}, "algorithm": {"adv_estimator": estimator}}
        found = made(tmp_path, "a.yaml", yaml.safe_dump(tree, sort_keys=False))
        assert {key: keys(found).get(key) for key in OF_POLICY} == OF_POLICY
        critic = {"critic.lr": 1e-5, "critic.clip": 0.5, "critic.path": "another", "critic.updates": 4}
        assert {key: value for key, value in keys(found).items() if "critic." in key} == (
            critic if estimator == "gae" else {}
        )
        kinds = {line.shown.partition(":")[0]: line.kind for line in found.lines}
        lost = "no counterpart" if estimator == "gae" else "not needed"
        assert kinds["critic.optim.weight_decay"] == lost and kinds["critic.grad_clip"] == lost


@pytest.mark.parametrize("section", ["teacher_inference", "orchestrator.teacher", "orchestrator.teacher_model"])
def test_a_teacher_is_not_the_model_that_is_trained(section, tmp_path):
    text = f"[model]\nname = 'policy'\n[{section}.model]\nname = 'big'\n[orchestrator]\n"
    found = made(tmp_path, "rl.toml", text)
    assert keys(found)["model.path"] == "policy" and found.lines[1].kind == "no counterpart"


def test_sampling_of_evaluations_leaves_that_of_training_alone(tmp_path):
    text = "[orchestrator.train.sampling]\nmax_tokens = 100\n[orchestrator.eval.sampling]\nmax_tokens = 900\n"
    found = keys(made(tmp_path, "rl.toml", text))
    assert found["rollout.max_new_tokens"] == 100 and found["evaluation.max_new_tokens"] == 900
