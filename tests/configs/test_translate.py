"""`slipstream translate`: scripts and files of four frameworks; whole ones stand in docs/migration (its own test)."""

from pathlib import Path

import pytest

from configs.aliases import BY_FRAMEWORK
from configs.loading import leaf_keys, load, read_yaml
from configs.translate import __main__ as command
from configs.translate import shell
from configs.translate.batches import Given
from configs.translate.files import read
from configs.translate.settings import Untranslatable
from configs.translate.tables import ROWS
from configs.translate.text import yaml_file
from configs.translate.together import TOGETHER
from configs.translate.translation import DEFAULTS, Translation, translate

VERL = "#!/bin/bash\npython3 -m verl.trainer.main_ppo {} $@\n"
SLIME = "python3 train.py \\\n  {}\n"


def made(tmp_path: Path, name: str, text: str, *overrides: str, rows: int = 0, gpus: int = 0) -> Translation:
    """The translation of a file with this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return translate(read([path]), Given(rows=rows, gpus=gpus), overrides)


def keys(translation: Translation) -> dict[str, object]:
    """All keys and values of the result."""
    groups = (translation.lines, translation.defaults, translation.decided)
    return {key: value for lines in groups for line in lines for key, value in line.pairs.items()}


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


@pytest.mark.parametrize("text", ["$((1 / 0))", "$((1 +))", "$((X + 1))", "$((2 ** 9))"])
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
    assert found.lines[0].note == "$DATA/train.parquet; give --set data.train=..."
    assert found.lines[1].pairs == {"data.eval": f"{Path.home()}/v.parquet"}


def test_references_in_a_yaml_of_verl_are_followed(tmp_path):
    text = "data: {max_response_length: 77}\ntrainer: {seed: '${x.y}'}\n"
    text += "actor_rollout_ref: {rollout: {n: '${data.max_response_length}'}}\n"
    found = made(tmp_path, "a.yaml", text)
    assert keys(found)["rollout.group_size"] == 77 and found.lines[1].kind == "open"


def test_a_set_of_files_of_prime_rl_is_one_run(tmp_path):
    (tmp_path / "orchestrator.toml").write_text("batch_size = 64\ngroup_size = 8\n[[train.env]]\nid = 'wordle'\n")
    (tmp_path / "train.toml").write_text("[optim]\nlr = 1e-5\n")
    found = translate(read([tmp_path / "orchestrator.toml", tmp_path / "train.toml"]), Given())
    assert keys(found)["rollout.groups_per_step"] == 8 and keys(found)["learner.lr"] == 1e-5
    assert keys(found)["environment.options"] == {"taskset": {"id": "wordle"}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "data: [", "not readable as YAML"),
        ("a.yaml", "- 1", "a mapping of sections is needed"),
        ("a.yaml", "rollout: {group_size: 2}", "has sections of Slipstream already (rollout)"),
        ("a.yaml", "optimizer: {lr: 1}", "none of verl's sections"),
        ("a.toml", "x = ", "not readable as TOML"),
        ("a.toml", "x = 1", "its name does not say which part it is"),
        ("a.py", "def f(", "not readable as Python"),
        ("a.py", "print(1)", "makes no GRPOConfig and no GRPOTrainer"),
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


@pytest.mark.parametrize("framework", sorted(TOGETHER))
def test_every_key_that_a_translation_can_write_is_one_of_ours(framework):
    known = {*leaf_keys(), "rollout.sglang.mem_fraction_static"}
    assert set(BY_FRAMEWORK[framework].values()) <= known
    assert set(DEFAULTS) == set(TOGETHER)


def test_unknown_names_are_named_and_kept_in_the_file(tmp_path, capsys):
    words = "data.train_files=gsm8k.jsonl actor_rollout_ref.model.path=m +trainer.frobnicate=3 rollout.n=4"
    (tmp_path / "a.sh").write_text(VERL.format(words))
    out = tmp_path / "out.yaml"
    assert command.main([str(tmp_path / "a.sh"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "+trainer.frobnicate=3" in said.splitlines()[4] and " ?? a name of no table" in said
    assert "1 are not translated: +trainer.frobnicate=3" in said and "#   +trainer.frobnicate=3" in out.read_text()
    assert load(out).rollout.groups_per_step == 1024


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", VERL.format("trainer.n_gpus_per_node=many data.train_batch_size=x trainer.save_freq=[] rollout.n={}")),
        ("b.sh", SLIME.format("--adam-beta1 x --rollout-batch-size 1 2 --actor-num-gpus-per-node --num-epoch a b")),
        ("c.py", "GRPOConfig(per_device_train_batch_size=[1], num_generations='x', warmup_ratio='a', max_steps=5)"),
        ("d.toml", "seq_len = 'x'\n[orchestrator]\nbatch_size = []\ngroup_size = 0\nmax_off_policy_steps = 'a'\n"),
    ],
)
def test_values_that_cannot_be_are_named_or_refused_later_and_never_raised(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    settings = ["--set", "model.path=m", "--set", "data.train=gsm8k.jsonl", "--out", str(tmp_path / "out.yaml")]
    code = command.main([str(tmp_path / name), *settings, "--rows", "100"])
    said = capsys.readouterr()
    assert "its value is of no use" in said.out and (code == 0 or "[SLIP-CONFIG-" in said.err)


def test_secrets_are_not_copied_and_a_value_of_several_lines_stays_a_comment(tmp_path, capsys):
    words = "--odd 'a\nrollout: {group_size: 9}' --n-samples-per-prompt 4 --rollout-batch-size 2 --wandb-key abc123"
    (tmp_path / "a.sh").write_text(SLIME.format(f"{words} --hf-checkpoint m --prompt-data gsm8k.jsonl"))
    out = tmp_path / "out.yaml"
    assert command.main([str(tmp_path / "a.sh"), "--out", str(out)]) == 0
    assert "abc123" not in capsys.readouterr().out + out.read_text()
    assert "#   --odd a rollout: {group_size: 9}" in out.read_text() and load(out).rollout.group_size == 4


def test_a_result_that_cannot_be_is_refused_and_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "a.sh").write_text(VERL.format("actor_rollout_ref.rollout.n=8"))
    arguments = [str(tmp_path / "a.sh"), "--out", str(tmp_path / "out.yaml")]
    assert command.main(arguments) == 2 and "missing; it has no default" in capsys.readouterr().err
    (tmp_path / "out.yaml").write_text("mine")
    arguments += ["--set", "model.path=m", "--set", "data.train=t.jsonl"]
    assert command.main(arguments) == 2 and "--out" in capsys.readouterr().err
    assert (tmp_path / "out.yaml").read_text() == "mine"
    assert command.main([*arguments, "--force"]) == 0
    assert load(tmp_path / "out.yaml").model.path == "m"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data.train_batch_size=64", {"rollout.groups_per_step": 64}),
        ("trainer.total_epochs=3", {"learner.total_steps": 21}),
        ("trainer.total_epochs=3 trainer.total_training_steps=5", {"learner.total_steps": 5}),
        ("trainer.n_gpus_per_node=8", {"placement.split": "4:4"}),
        ("trainer.n_gpus_per_node=1", {"placement.split": "1:1", "placement.share_gpus": True}),
        ("trainer.n_gpus_per_node=6 rollout.tensor_model_parallel_size=2", {"placement.split": "2:4"}),
        ("actor_rollout_ref.actor.clip_ratio=0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
        ("algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo", {"algorithm.advantage": "dr_grpo"}),
        ("actor.use_kl_loss=True actor.kl_loss_type=mse", {"algorithm.kl": "k2", "algorithm.kl_coef": 0.001}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", {"algorithm.kl_in": "reward"}),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm", {"algorithm.aggregation": "constant"}),
        ("custom_reward_function.path=r.py custom_reward_function.name=f", {"reward.function": "r.py:f"}),
        ("trainer.logger=['console','wandb']", {"tracking.trackers": ["wandb"]}),
        ("trainer.save_freq=-1", {"checkpoint.every_steps": 0}),
        ("data.train_files=['a/gsm8k/t.parquet','b/math/t.parquet']", {"reward.function": "numeric"}),
    ],
)
def test_values_of_verl(words, expected, tmp_path):
    found = keys(made(tmp_path, "a.sh", VERL.format(words), rows=7473))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "in_reward"),
    [
        ("a.sh", VERL.format("actor.use_kl_loss=True actor.kl_loss_coef=0.01 actor.kl_loss_type=kl"), ""),
        ("a.sh", VERL.format("actor.use_kl_loss=True actor.kl_loss_type=k1 algorithm.use_kl_in_reward=True"), "k1"),
        ("a.sh", SLIME.format("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k1"), ""),
        ("a.sh", SLIME.format("--use-kl-loss --kl-loss-coef 0.01"), ""),  # its default
    ],
)
def test_k1_in_the_loss_becomes_a_line_that_says_what_it_did(name, text, in_reward, tmp_path):
    found = made(tmp_path, name, text)
    kl = {key: value for key, value in keys(found).items() if key.startswith("algorithm.kl")}
    wanted = {"algorithm.kl": in_reward, "algorithm.kl_in": "reward", "algorithm.kl_coef": 0.001}
    assert kl == (wanted if in_reward else {})
    (lost,) = [line for line in found.lines if line.kind == "no counterpart"]
    assert "kl" in lost.shown and "regularises nothing" in lost.note and "--set algorithm.kl=k3" in lost.note


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 2", {"placement.split": "2:4"}),
        ("--actor-num-gpus-per-node 4 --colocate --rollout-batch-size 2", {"placement.split": "2:2"}),
        ("--advantage-estimator gspo", {"algorithm.loss": "gspo", "algorithm.advantage": "grpo"}),
        ("--advantage-estimator gspo --eps-clip 3e-4", {"algorithm.clip_low": 0.02, "algorithm.clip_high": 0.02}),
        ("--calculate-per-token-loss", {"algorithm.aggregation": "token"}),
        ("--lr 1e-6", {"algorithm.aggregation": "sequence", "algorithm.clip_high": 0.2}),
        ("--eps-clip 0.3", {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}),
        ("--use-tis", {"algorithm.proximal": "current", "algorithm.correction": "token_tis"}),
        ("--eval-prompt-data a x.jsonl b y.jsonl", {"data.eval": {"a": "x.jsonl", "b": "y.jsonl"}}),
        ("--custom-rm-path my.rewards.judge", {"reward.function": "my.rewards:judge"}),
        ("--tensor-model-parallel-size=2", {"learner.mesh.tensor": 2}),
    ],
)
def test_values_of_slime(words, expected, tmp_path):
    found = keys(made(tmp_path, "a.sh", SLIME.format(words)))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("per_device_train_batch_size=4, gradient_accumulation_steps=8", {"rollout.groups_per_step": 16}),
        ("num_generations=4, per_device_train_batch_size=4", {"rollout.groups_per_step": 4}),
        ("loss_type='dr_grpo'", {"algorithm.aggregation": "constant"}),
        ("scale_rewards=False", {"algorithm.advantage": "dr_grpo"}),
        ("beta=0.04", {"algorithm.kl": "k3", "algorithm.kl_coef": 0.04}),
        ("epsilon=0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ("max_steps=10, warmup_ratio=0.2", {"learner.warmup_steps": 2}),
        ("num_train_epochs=2", {"learner.total_steps": 200}),
        ("learning_rate=LR", {"learner.lr": 3e-5}),
    ],
)
def test_values_of_trl(arguments, expected, tmp_path):
    text = f"LR = 3e-5\nargs = GRPOConfig({arguments})\n"
    found = keys(made(tmp_path, "a.py", text, "data.train=x", rows=400, gpus=4))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        ("vanilla", {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 3.0}),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
        ("cispo", {"clip_high": 0.3}),
        ("sapo", {}),
    ],
)
def test_bounds_that_a_loss_does_not_have_are_left_out(loss, bounds, tmp_path):
    words = f"actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3 actor.policy_loss.loss_mode={loss} rollout.n=4"
    words += " data.train_files=gsm8k.jsonl actor_rollout_ref.model.path=m"
    (tmp_path / "a.sh").write_text(VERL.format(words))
    assert command.main([str(tmp_path / "a.sh"), "--out", str(tmp_path / "out.yaml")]) == 0
    written = read_yaml((tmp_path / "out.yaml").read_bytes())["algorithm"]
    assert {key: value for key, value in written.items() if key.startswith("clip")} == bounds


def test_rewards_of_a_script_are_taken_where_importing_it_does_not_train(tmp_path):
    text = "def good(completions, **columns): ...\n{}GRPOTrainer('m', good, train_dataset=d).train()\n"
    trains = made(tmp_path, "a.py", text.format(""), "data.train=x")
    assert [line.kind for line in trains.lines] == ["key", "open", "open"]
    assert trains.lines[1].note.startswith("importing a.py would train; move good to a file of its own")
    found = made(tmp_path, "b.py", text.format("if __name__ == '__main__':\n    "), "data.train=x")
    assert keys(found)["reward.function"] == f"{tmp_path}/b.py:good"


def test_a_lag_above_the_most_and_an_unknown_loss_of_prime_rl_are_said(tmp_path):
    text = "[orchestrator]\nmax_off_policy_steps = 16\n[trainer.loss]\ntype = 'custom'\n[inference]\n"
    found = made(tmp_path, "rl.toml", text)
    lag, loss = found.lines
    assert lag.pairs == {"replay.async_lag": 8} and lag.note == "8 is the most"
    assert loss.kind == "no counterpart" and "a file of yours" in loss.note


def test_no_name_is_in_two_rows_of_one_framework():
    for column in range(1, 6):
        names = [row[column] for row in ROWS if row[column] != "-"]
        assert len(names) == len(set(names))


def test_a_length_that_is_no_number_is_refused_by_its_key(tmp_path, capsys):
    file, out = tmp_path / "verl.yaml", tmp_path / "out.yaml"
    file.write_text("data: {train_files: t, val_files: v, max_prompt_length: 2k}\ntrainer: {total_training_steps: 4}\n")
    words = [str(file), "--out", str(out), "--set", "model.path=x", "--set", "reward.function=exact"]
    assert command.main(words) == 2
    assert "data.max_prompt_tokens: Input should be a valid integer" in capsys.readouterr().err
    assert command.main([*words, "--set", "data.max_prompt_tokens=2048", "--set", "rollout.group_size=8"]) == 0


def test_an_open_value_of_several_lines_is_a_comment_of_one(tmp_path):
    text = "data:\n  train_files: |\n    ${oc.env:DATA}/a.parquet\n    ${oc.env:DATA}/b.parquet\n"
    found = made(tmp_path, "verl.yaml", text, "data.train=x")
    assert "a.parquet ${oc.env:DATA}/b.parquet; give --set data.train=..." in yaml_file(found).splitlines()[-1]


def test_of_several_environments_the_first_is_translated_and_the_others_are_open(tmp_path):
    env = '[[orchestrator.{}.env]]\nid = "{}"\nargs = {{dataset_name = "{}"}}\n'
    given = (("train", "gsm8k", "a/b"), ("train", "wordle", "c/d"), ("eval", "x", "e/f"), ("eval", "y", "g/h"))
    found = made(tmp_path, "rl.toml", "".join(env.format(*one) for one in given))
    assert [line.kind for line in found.lines] == ["key", "key", "open", "open", "not needed", "key", "open", "open"]
    assert found.lines[2].note.startswith("of environment 2, and a run has one here, the first")
    have = keys(found)
    assert have["reward.function"] == "math" and "environment.function" not in have
    assert (have["data.train"], have["data.eval"]) == ("datasets:a/b?split=train", "datasets:e/f?split=test")


@pytest.mark.parametrize("before", ["cd /opt/verl.git", "echo starts verl.trainer", "python3 -m verl.model_merger"])
def test_the_command_with_settings_is_the_one_that_starts_verl(tmp_path, before):
    found = made(tmp_path, "a.sh", f"{before}\n{VERL.format('trainer.total_training_steps=7')}")
    assert keys(found)["learner.total_steps"] == 7 and len(found.lines) == 1


def test_a_script_that_makes_two_configurations_has_a_remark(tmp_path):
    text = "from trl import GRPOConfig\nGRPOConfig(learning_rate=1e-5)\nGRPOConfig(max_steps=9)\n"
    found = made(tmp_path, "a.py", text)
    assert ["GRPOConfig is made more than once" in remark for remark in found.foreign.remarks] == [True]
    assert made(tmp_path, "a.py", text.partition("GRPOConfig(max")[0]).foreign.remarks == []
