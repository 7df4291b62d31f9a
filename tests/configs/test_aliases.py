"""Names that are no keys: those of other frameworks are answered with ours, retired ones are read or refused."""

import json
import logging
import tarfile
from pathlib import Path

import pytest

from configs import ConfigError, aliases, load
from configs.aliases import ALIASES, NOT_HERE
from configs.loading import Parser, add_arguments, leaf_keys, validate
from configs.retired import RETIRED

FROZEN = Path(__file__).parents[1] / "frozen"
TABLE = """
key                | verl                                     | slime                | prime-rl                   | AReaL | TRL
model.path         | actor_rollout_ref.model.path             | --hf-checkpoint      | model.name                 | actor.path |
data.train         | data.train_files                         | --prompt-data        | orchestrator.train.source  | train_dataset.path |
rollout.group_size | actor_rollout_ref.rollout.n              | --n-samples-per-prompt | orchestrator.group_size  | gconfig.n_samples | num_generations
rollout.groups_per_step | data.train_batch_size               | --rollout-batch-size | orchestrator.batch_size    | train_dataset.batch_size |
rollout.max_new_tokens | data.max_response_length             | --rollout-max-response-len | sampling.max_completion_tokens | gconfig.max_new_tokens | max_completion_length
learner.max_tokens_per_microbatch | actor_rollout_ref.actor.ppo_max_token_len_per_gpu | --max-tokens-per-gpu | | actor.mb_spec.max_tokens_per_mb |
algorithm.clip_low  | actor_rollout_ref.actor.clip_ratio_low  | --eps-clip           | | actor.eps_clip | epsilon
algorithm.clip_high | actor_rollout_ref.actor.clip_ratio_high | --eps-clip-high      | | | epsilon_high
algorithm.correction | algorithm.rollout_correction           | --use-tis            | | |
algorithm.proximal  |                                         |                      | | actor.use_decoupled_loss |
algorithm.kl_coef   | actor_rollout_ref.actor.kl_loss_coef    | --kl-loss-coef       | | actor.kl_ctl | beta
replay.async_lag    | max_off_policy_threshold | | orchestrator.max_off_policy_steps | rollout.max_head_offpolicyness | max_staleness
placement.tensor_parallel | actor_rollout_ref.rollout.tensor_model_parallel_size | --rollout-num-gpus-per-engine | | |
learner.lora.rank  | actor_rollout_ref.model.lora_rank        |                      |                            | actor.lora_rank | lora_r
checkpoint.every_steps | trainer.save_freq                    | --save-interval      | ckpt.interval | saver.freq_steps | save_steps
"""  # noqa: E501 - a table
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()[1:]]
PAIRS = [(key, name) for key, *names in ROWS for name in names if name]


def said_to(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said to a command line with these words."""
    parser = Parser(prog="main")
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    return capsys.readouterr().err


def test_foreign_names_are_answered_with_our_keys(capsys):
    for key, name in PAIRS:
        assert f"; {name}: it is {key} here; write --set {key}=8" in said_to(f"{name}=8", capsys=capsys)
    in_files = [(key, name) for key, name in PAIRS if not name.startswith("--")]
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [f"{name}=8" for _, name in in_files])
    said = str(refused.value)
    assert [name for key, name in in_files if f"{name}: unknown key; it is {key} here" not in said] == []
    assert "did you mean" not in said


def test_a_file_of_another_framework_is_answered_line_by_line(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t.jsonl}\n"
        "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1.0e-6}, ppo_mini_batch_size: 4, nothing: 0}}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load(path)
    said = str(refused.value).splitlines()
    assert [line.removeprefix(f"{path}: ") for line in said[:2]] == [
        "actor_rollout_ref.rollout.n: unknown key; it is rollout.group_size here [SLIP-CONFIG-02]",
        "actor_rollout_ref.actor.optim.lr: unknown key; it is learner.lr here",
    ]
    assert "ppo_mini_batch_size: unknown key; a step is one update" in said[2]
    assert len(said) == 4 and said[3].startswith(f"{path}: actor_rollout_ref.actor.nothing: unknown key (value 0)")


def test_options_without_a_key_say_why(capsys):
    said = said_to("--global-batch-size", "256", "actor_rollout_ref.actor.use_kl_loss=0", capsys=capsys)
    assert "a step is one update and one broadcast here" in said and "write --set actor" not in said
    assert "decide about the KL term" in said


def test_every_answer_is_a_key_and_no_key_of_ours_is_foreign():
    keys = set(leaf_keys())
    assert {key for key in ALIASES.values() if key not in keys} == {"rollout.sglang.mem_fraction_static"}
    assert not keys & (ALIASES.keys() | NOT_HERE.keys()) and not ALIASES.keys() & NOT_HERE.keys()
    assert len(ALIASES) >= 25 and {len(row) for row in aliases.ROWS} == {1 + len(aliases.FRAMEWORKS)}


# ---- keys that are gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["finished", "killed"])
def test_the_configuration_of_an_older_run_loads_with_one_line(run, tmp_path, caplog):
    with tarfile.open(FROZEN / "runs_a694bf1.tar.gz") as archive:
        (tmp_path / "config.yaml").write_bytes(archive.extractfile(f"runs/{run}/config.yaml").read())  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "config.yaml", ["run.seed=3"])
        load("quickstart")
    (record,) = caplog.records
    assert record.getMessage().endswith(", ".join(sorted(RETIRED))), "and nothing of a new file"


def test_every_retired_key_is_gone_and_had_its_value_in_older_runs():
    assert not RETIRED.keys() & set(leaf_keys())
    trees = json.loads((FROZEN / "presets.json").read_text())
    for key, (value, _) in RETIRED.items():
        section, leaf = key.split(".")
        assert {tree[section][leaf] for tree in trees.values()} == {value}


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_another_value_is_refused_beside_other_problems(key):
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [f"{key}=7", "learner.lr=0"])
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"--set {key}=7 over ") and f"{key}: 7 " in first
    assert "learner.lr" in second


def test_the_given_tree_is_left_alone():
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"top_p": 1.0}, "placement": {"device": "cpu"}}
    validate(tree, "here")
    assert tree["rollout"] == {"top_p": 1.0}
