"""Configuration: what is refused and with which words, overrides and flags, presets, the generated page."""

import argparse
import operator
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from configs import Config, ConfigError, load, loading
from configs.loading import FLAGS, PRESETS, Parser, add_arguments, dump, leaf_keys, parse
from scripts import pages as docs


def refused(*overrides: str) -> str:
    """What is said about the quick start with these overrides."""
    with pytest.raises(ConfigError) as caught:
        load("quickstart", list(overrides))
    return str(caught.value)


TRICKY = ["1e5", "0x1f", "0o17", "1_000", "6:20", "on", "null", "~", "2024-01-01", ".5", "1.", "nan", ".inf", "#", "="]


@settings(max_examples=8)
@given(st.lists(st.from_regex(r"[-+]?[0-9.:_xoe]{1,6}", fullmatch=True) | st.text(max_size=8), max_size=20))
def test_text_that_looks_like_something_else_survives_a_round_trip(texts):
    tree = load("quickstart").model_dump(mode="json")
    tree["network"]["env"] = {f"X{number}": text for number, text in enumerate(["", *TRICKY, *texts])}
    config = Config.model_validate(tree)
    assert parse(dump(config), "here") == config


@pytest.mark.parametrize(
    ("override", "key", "suggested"),
    [
        ("replay.asinc_lag=1", "replay.asinc_lag", "replay.async_lag"),
        ("rolout.group_size=8", "rolout.group_size", "did you mean 'rollout"),
        ("learner.learning_rate=1", "learner.learning_rate", "learner."),
        ("async_lag=1", "async_lag", "replay.async_lag"),
        ("zzz.qqq=9", "zzz.qqq", "docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion(override, key, suggested):
    said = refused(override)
    assert f"{key}: unknown key" in said and suggested in said


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["learner.lr=-1"], "learner.lr=-1"),
        (["nonsense.key=1"], "nonsense.key=1"),
        (["placement.split=0:2"], "placement.split=0:2"),
        (["learner.sft.coef=0.2"], "learner.sft.coef=0.2"),
        (
            ["replay.async_lag=0", "replay.on_stale=substitute", "rollout.max_running=7"],
            "replay.async_lag=0 --set replay.on_stale=substitute",
        ),
    ],
)
def test_an_override_is_blamed_for_what_it_does(overrides, blamed):
    assert refused(*overrides, "run.seed=1").startswith(f"--set {blamed} over {PRESETS / 'quickstart.yaml'}: ")


def test_every_problem_is_said_at_once_and_that_of_a_file_is_its_own():
    said = refused("rollout.group_size=0", "learner.lr=0", "nonsense.key=1").splitlines()
    assert len(said) == 3 and all("quickstart.yaml: " in line for line in said)
    text = "model: {path: m}\ndata: {train: x.jsonl}\nlearner: {lr: 0}\n"
    with pytest.raises(ConfigError, match=r"^run\.yaml: learner\.lr"):
        parse(text, "run.yaml", ["run.seed=1", "learner.total_steps=2"])


def test_a_second_file_is_refused_and_not_taken_in_place_of_the_first(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--config", "a.yaml"]).config == "a.yaml"
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", "a.yaml", "--config", "b.yaml"])
    assert "a.yaml and b.yaml" in capsys.readouterr().err


def test_a_bare_override_is_answered_with_the_option(capsys):
    parser = Parser(prog="main")
    add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--async-lag", "1", "learner.lr=1e-5", "run.seed=1"])
    assert ended.value.code == 2
    assert "; write --set learner.lr=1e-5 --set run.seed=1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-option=1"])
    assert "write --set" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not readable as YAML"),
        ("- 1\n", "expected a mapping"),
        ("", "expected a mapping"),
        (b"\xff", "not readable as YAML"),
        ("data: {train: x.jsonl}\n", r"model: missing; .*--set model"),
    ],
)
def test_a_broken_file_is_named(text, said):
    with pytest.raises(ConfigError, match=rf"^run\.yaml: {said}"):
        parse(text, "run.yaml")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("learner.lr=5e-4", 5e-4),
        ("learner.lr=1E-6", 1e-6),
        ("learner.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("data.eval=null", None),
        ("data.shuffle=false", False),
        ("model.path=a=b", "a=b"),
        ("placement.split=6:20", "6:20"),
        ("tracking.project=", ""),
    ],
)
def test_forms_of_set(override, value):
    assert operator.attrgetter(override.partition("=")[0])(load("quickstart", [override])) == value


@pytest.mark.parametrize("override", ["lr", "=1", "a..b=1", ".a=1", "a.=1", "a.b=[1", "run.name.first=x"])
def test_malformed_set_is_refused(override):
    assert repr(override) in refused(override)


def test_flags_are_aliases_of_keys_and_set_wins():
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def given(words):
        return loading.from_arguments(parser.parse_args(words.split()))

    config = given("--async-lag 4 --seed 7 --steps 12 --name x --split 2:2")
    assert (config.replay.async_lag, config.run.seed, config.learner.total_steps) == (4, 7, 12)
    assert (config.run.name, config.num_rollout_servers) == ("x", 2)
    assert given("--seed 7 --set run.seed=8").run.seed == 8
    assert given("") == load("quickstart") and set(FLAGS.values()) <= set(leaf_keys())


@given(st.text(max_size=20), st.text(max_size=20))
@example("a", "08")
@example("a", "!!int x")
@example("a", "!!bool 3")
@example("a", "!!timestamp 3")
def test_set_never_fails_otherwise_than_with_a_config_error(key, value):
    tree: dict[str, Any] = {}
    try:
        loading.apply_override(tree, f"{key}={value}")
    except ConfigError:
        return
    assert yaml.safe_dump(tree)


@pytest.mark.parametrize("there", [None, "none", "one", "other", {"other": {"size": 9}}, {"one": {"rate": 0.3}}, {}])
@pytest.mark.parametrize(
    "key", [*map("algorithm.".__add__, ("advantage", "correction", "dynamic_sampling", "loss")), "environment.function"]
)
def test_a_dotted_option_chooses_its_variant(key, there):
    section, name = key.split(".")
    tree: dict[str, Any] = {section: {name: there}}
    for override in (f"{key}.one.size=2", f"{key}.one.shape=[3]"):
        loading.apply_override(tree, override)
    kept = {"rate": 0.3} if isinstance(there, dict) and "one" in there else {}
    assert tree == {section: {name: {"one": {**kept, "size": 2, "shape": [3]}}}}


@pytest.mark.parametrize(
    ("key", "value", "override"),
    [
        ("reward.function", "exact", "reward.function.numeric.tolerance=0.01"),
        ("data.eval", "a.jsonl", "data.eval.gsm8k.path='my 1: it''s.jsonl'"),
    ],
)
def test_the_advice_for_a_value_that_is_no_section_works_as_it_stands(key, value, override):
    advice, _code = shlex.split(refused(f"{key}={value}", override).partition("such as --set ")[2])
    assert load("quickstart", [f"{key}={value}", advice]) == load("quickstart", [f"{key}={{}}", override])


def test_evaluated_versions():
    config = load("quickstart", ["evaluation.every_steps=30", "learner.total_steps=80"])
    assert [version for version in range(81) if config.is_evaluated(version)] == [0, 30, 60, 80]
    assert not load("quickstart", ["data.eval=null"]).is_evaluated(0)


def test_every_key_is_documented_in_place_and_there_are_not_too_many():
    keys = leaf_keys()
    assert len(keys) == len(set(keys)) <= 230
    sections = [field.annotation for field in Config.model_fields.values()]
    for section in [kind for kind in sections if isinstance(kind, type) and issubclass(kind, BaseModel)]:
        assert section.__doc__ and section.model_config["frozen"], section
        assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_generated_pages_are_up_to_date(tmp_path, monkeypatch):
    assert docs.main(["--check"]) == 0, "run python -m scripts.pages"
    text = (docs.DOCS / "configuration.md").read_text(encoding="utf-8")
    assert [key for key in leaf_keys() if f"\n| `{key}` |" not in text] == []
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    (tmp_path / "reference").mkdir()
    assert [docs.main(words) for words in (["--check"], [], ["--check"])] == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("6:2", "6:2"), ("off", "off"), ("5e-4", 5e-4), ("2026-01-02", "2026-01-02"), ("010", 10), ("0x1F", 31),
     ("true", True), (".5", 0.5), ("08", 8), ("-7", -7), ("+7", 7), ("0o17", "0o17"), ("1_000", "1_000")],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    tree: dict[str, Any] = {}
    loading.apply_override(tree, f"a={text}")
    assert tree == {"a": value} and type(tree["a"]) is type(value)


def test_no_key_may_stand_twice():
    with pytest.raises(yaml.YAMLError, match="'a' stands there twice"):
        loading.read_yaml("{a: 1, a: 1}")
