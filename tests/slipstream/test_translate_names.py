"""Names of other frameworks, in a file, in `--set` and as an option: answered with our keys, or with the reason."""

import pytest

from configs import ConfigError, load
from configs.loading import add_arguments
from slipstream.translate.names import ALIASES, NO_COUNTERPART, NOT_NEEDED, WITHOUT
from slipstream.translate.refusals import AnsweringParser, refused

PAIRS = [
    ("model.path", "actor_rollout_ref.model.path"),
    ("rollout.group_size", "actor_rollout_ref.rollout.n"),
    ("rollout.group_size", "--n-samples-per-prompt"),
    ("rollout.groups_per_step", "orchestrator.batch_size"),
    ("rollout.max_new_tokens", "gconfig.max_new_tokens"),
    ("algorithm.loss.ppo_clip.clip_low", "epsilon"),
    ("algorithm.kl_coef", "actor.kl_ctl"),
    ("replay.async_lag", "max_staleness"),
    ("placement.tensor_parallel", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
    ("checkpoint.every_steps", "--save-interval"),
]


def said_to(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said to a command line with these words."""
    parser = AnsweringParser(prog="main")
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    return capsys.readouterr().err


def test_foreign_names_are_answered_with_our_keys(capsys):
    for key, name in PAIRS:
        assert f"; {name}: it is {key} here; write --set {key}=8" in said_to(f"{name}=8", capsys=capsys)
    in_files = [(key, name) for key, name in PAIRS if not name.startswith("--")]
    with pytest.raises(ConfigError) as error:
        load("quickstart", [f"{name}=8" for _, name in in_files])
    said = refused(error.value).splitlines()
    assert [name for key, name in in_files if f"{name}: it is {key} here" not in said] == []


def test_a_file_of_another_framework_is_answered_line_by_line(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t.jsonl}\nreward: {function: exact}\n"
        "actor_rollout_ref: {rollout: {n: 8}, actor: {ppo_mini_batch_size: 4, nothing: 0}}\n"
    )
    with pytest.raises(ConfigError) as error:
        load(path)
    names = ["actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert error.value.unknown == [*names, "actor_rollout_ref.actor.nothing"]
    assert [line.partition(": ")[0] for line in refused(error.value).splitlines()[-2:]] == names


def test_options_without_a_key_say_why(capsys):
    said = said_to("--update-weights-interval", "2", "rollout.top_p=0.9", capsys=capsys)
    assert WITHOUT["update_weights_interval"] in said and WITHOUT["rollout.top_p"] in said and "write --set" not in said


def test_a_bare_setting_is_answered_with_the_option_that_it_belongs_to(capsys):
    assert "write --set learner.lr=3" in said_to("learner.lr=3", capsys=capsys)


def test_a_name_has_one_answer():
    assert ALIASES.keys() & WITHOUT.keys() == set() == NO_COUNTERPART.keys() & NOT_NEEDED.keys()
