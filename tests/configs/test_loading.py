"""Configuration: what is refused and with which words, overrides and flags, presets, the generated page."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from configs import Config, ConfigError, load
from configs.loading import FLAGS, PRESETS, Parser, add_arguments, apply_override, dump, from_arguments, leaf_keys
from configs.placement import node_devices
from configs.schema import is_loopback
from scripts import make_config_docs

STAGED = ["rollout.engine=sglang", "weight_bus.stage_in=engine"]
PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def refused(*overrides: str) -> str:
    """What is said about the quick start with these overrides."""
    with pytest.raises(ConfigError) as caught:
        load("quickstart", list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = load(name)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config
    assert dump(load(path)) == dump(config)
    assert config.arithmetic().startswith(f"{config.rollout.groups_per_step} prompts × {config.rollout.group_size} =")


TRICKY = [
    "1e5",
    "0x1f",
    "0o17",
    "1_000",
    "6:20",
    "on",
    "null",
    "~",
    "2024-01-01",
    ".5",
    "1.",
    "nan",
    ".inf",
    "",
    "#",
    "=",
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TRICKY) | st.from_regex(r"[-+]?[0-9.:_xoe]{1,6}", fullmatch=True) | st.text(max_size=8))
def test_text_that_looks_like_something_else_survives_a_round_trip(text: str) -> None:
    tree = load("quickstart").model_dump(mode="json")
    tree["tracking"]["wandb_project"] = text
    config = Config.model_validate(tree)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump(config), encoding="utf-8", newline="")
        assert load(path) == config


def test_the_quick_start_is_the_recipe_that_was_measured() -> None:
    config = load("quickstart")
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (64, 8)
    assert (config.learner.total_steps, config.learner.lr, config.replay.async_lag) == (80, 5e-4, 1)
    assert config.trajectories_per_step == 512 and config.max_groups_in_flight == 128
    assert "64 prompts × 8 = 512 trajectories a step" in config.arithmetic()
    assert "lag ≤ 1 → at most 128 groups in flight, the batch in training included" in config.arithmetic()


@pytest.mark.parametrize(
    ("override", "key", "suggested"),
    [
        ("replay.asinc_lag=1", "replay.asinc_lag", "replay.async_lag"),
        ("rolout.group_size=8", "rolout", "did you mean 'rollout"),
        ("learner.learning_rate=1", "learner.learning_rate", "learner."),
        ("async_lag=1", "async_lag", "replay.async_lag"),
        ("zzz.qqq=9", "zzz", "docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion(override: str, key: str, suggested: str) -> None:
    said = refused(override)
    assert f"{key}: unknown key" in said and suggested in said


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=eight"], ["rollout.group_size", "valid integer", "'eight'"]),
        (["learner.lr=-1"], ["learner.lr", "greater than 0", "-1"]),
        (["rollout.engine=vllm"], ["rollout.engine", "'torch' or 'sglang'", "'vllm'"]),
        (["run.name=../x"], ["run.name", "'../x'"]),
        (["learner.betas=[0.9]"], ["learner.betas"]),
        (
            ["rollout.groups_per_step=1", "rollout.group_size=1"],
            ["rollout.groups_per_step", "fewer than 2 learner ranks"],
        ),
        (["rollout.group_size=1"], ["rollout.group_size", "1 with algorithm.advantage 'grpo'", "take 2 or more"]),
        (["placement.split=0:2"], ["placement.split", "'0:2'", "at least 1"]),
        (["placement.split=2:0"], ["placement.split", "'2:0'", "at least 1"]),
        (["placement.split=two"], ["placement.split", "'two'", "'6:2'"]),
        (["placement.rollout=node0:0-5"], ["placement.learner", "come together"]),
        (["placement.rollout=node0:0-5", "placement.learner=node0:5"], ["node0:5", "both sides"]),
        (["placement.rollout=node0:5-0", "placement.learner=node1:0"], ["'5-0'", "backwards"]),
        (["placement.rollout=node0", "placement.learner=node1:0"], ["'node0'", "not of the form"]),
        (["placement.split=3:2", "placement.tensor_parallel=2"], ["placement.tensor_parallel", "3 rollout devices"]),
        (["rollout.top_p=0.9"], ["rollout.top_p", "0.9", "rollout.temperature"]),
        (["rollout.top_k=50"], ["rollout.top_k", "50"]),
        (["replay.async_lag=9"], ["replay.async_lag", "9 is above 8", "take 8 or less"]),
        (["algorithm.loss=policy_gradient"], ["algorithm.loss", "ppo_clip", "i_know_this_is_biased"]),
        (["replay.async_lag=0", "rollout.on_new_weights=keep_kv"], ["rollout.on_new_weights", "'keep_kv'", "drains"]),
        (["weight_bus.apply=direct"], ["weight_bus.apply", "'direct'", "'torch'", "weight_bus.apply=staged"]),
        (["network.host=10.0.0.1"], ["network.host", "'10.0.0.1'", "network.insecure"]),
        (["network.host=0.0.0.0"], ["network.host", "loopback"]),
        (["network.host=example.org"], ["network.host", "loopback"]),
        (["weight_bus.stage_in=engine"], ["weight_bus.stage_in", "rollout.engine 'torch'", "rollout.engine=sglang"]),
        ([*STAGED, "weight_bus.apply=direct"], ["weight_bus.stage_in", "'direct'", "weight_bus.apply=staged"]),
        (
            [*STAGED, "weight_bus.transport=disk", "weight_bus.folder=/tmp"],
            ["weight_bus.stage_in", "weight_bus.transport 'disk'", "weight_bus.transport=collective"],
        ),
        ([*STAGED, "weight_bus.backend=ucc"], ["weight_bus.stage_in", "'ucc'", "weight_bus.backend=gloo or nccl"]),
        (
            [*STAGED, "placement.tensor_parallel=2", "placement.split=2:1"],
            ["weight_bus.stage_in", "'gloo'", "placement.tensor_parallel 2", "weight_bus.backend=nccl"],
        ),
        (["rollout.engine=sglang", "weight_bus.stage_in=gpu"], ["weight_bus.stage_in"]),
        (["learner.max_tokens_per_microbatch=20"], ["learner.max_tokens_per_microbatch", "20", "26"]),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_and_way_out(overrides: list[str], words: list[str]) -> None:
    said = refused(*overrides)
    for word in words:
        assert word in said, said
    assert "quickstart.yaml" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["replay.async_lag=8"],
        ["replay.async_lag=0", "algorithm.loss=policy_gradient"],
        ["algorithm.loss=policy_gradient", "algorithm.i_know_this_is_biased=true"],
        ["weight_bus.apply=direct", "rollout.engine=sglang"],
        STAGED,
        [*STAGED, "weight_bus.backend=nccl"],
        [*STAGED, "weight_bus.backend=nccl", "placement.tensor_parallel=2", "placement.split=2:1"],
        [*STAGED, "weight_bus.delta=true"],
        ["network.host=localhost"],
        ["network.host=10.0.0.1", "network.insecure=true"],
        ["placement.split=0:2", "placement.local_rollouts=false"],
        ["placement.rollout=node0:0-5", "placement.learner=node0:6-7; node1:0,2"],
    ],
)
def test_what_can_work_is_accepted(overrides: list[str]) -> None:
    assert isinstance(load("quickstart", overrides), Config)


def test_every_problem_is_said_at_once() -> None:
    said = refused("rollout.group_size=0", "learner.lr=0", "nonsense.key=1").splitlines()
    assert len(said) == 3 and all("quickstart.yaml: " in line for line in said)


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["learner.lr=-1", "run.seed=1"], "--set learner.lr=-1 over "),
        (["nonsense.key=1", "run.seed=1"], "--set nonsense.key=1 over "),
        (["rollout.top_p=0.9", "run.seed=1"], "--set rollout.top_p=0.9 over "),
        (["placement.split=0:2", "run.seed=1"], "--set placement.split=0:2 over "),
        (
            ["replay.async_lag=4", "algorithm.loss=policy_gradient", "rollout.top_k=-1"],
            "--set replay.async_lag=4 --set algorithm.loss=policy_gradient over ",
        ),
    ],
)
def test_an_override_is_blamed_for_what_it_does(overrides: list[str], blamed: str) -> None:
    assert refused(*overrides).startswith(f"{blamed}{PRESETS / 'quickstart.yaml'}: ")


def test_the_file_is_blamed_for_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: x.jsonl}\nlearner: {lr: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["run.seed=1", "learner.total_steps=2"])
    assert str(caught.value).startswith(f"{path}: learner.lr")


def test_a_bare_override_is_answered_with_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="main")
    add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--async-lag", "1", "learner.lr=1e-5", "run.seed=1"])
    assert ended.value.code == 2
    assert "; write --set learner.lr=1e-5 --set run.seed=1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-option=1"])
    assert "write --set" not in capsys.readouterr().err


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: x.jsonl}\n")
    with pytest.raises(ConfigError, match=r"model: missing; .*--set model"):
        load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "not readable as YAML"), ("- 1\n", "expected a mapping"), ("", "expected a mapping"), (b"\xff", "YAML")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"run\.yaml: {said}|run\.yaml: .*{said}"):
        load(path)


def test_an_unknown_preset_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'quikstart'; did you mean 'quickstart'\? Presets: .*quickstart"):
        load("quikstart")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("learner.lr=5e-4", "learner", "lr", 5e-4),
        ("learner.lr=1E-6", "learner", "lr", 1e-6),
        ("learner.betas=[0.9, 0.99]", "learner", "betas", (0.9, 0.99)),
        ("data.eval=null", "data", "eval", None),
        ("data.shuffle=false", "data", "shuffle", False),
        ("model.path=a=b", "model", "path", "a=b"),
        ("placement.split=1:2", "placement", "split", "1:2"),
        ("tracking.wandb_project=", "tracking", "wandb_project", ""),
    ],
)
def test_forms_of_set(override: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(load("quickstart", [override]), section), key) == value


@pytest.mark.parametrize("override", ["lr", "=1", "a..b=1", ".a=1", "a.=1", "a.b=[1", "run.name.first=x"])
def test_malformed_set_is_refused(override: str) -> None:
    assert repr(override) in refused(override)


def test_set_does_not_turn_a_split_into_a_time_of_day() -> None:
    """YAML 1.1 reads 6:20 as sexagesimal; a split must stay text, from the file and from --set."""
    config = load("quickstart", ["placement.split=6:2"])
    assert (config.placement.split, config.num_rollout_servers, config.num_learner_ranks) == ("6:2", 6, 2)
    config = load("quickstart", ["placement.split='6:32'"])
    assert config.num_learner_ranks == 32


def parse(*arguments: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))


def test_flags_are_aliases_of_keys_and_set_wins() -> None:
    config = parse("--async-lag", "4", "--seed", "7", "--steps", "12", "--name", "x", "--split", "2:2")
    assert (config.replay.async_lag, config.run.seed, config.learner.total_steps) == (4, 7, 12)
    assert (config.run.name, config.num_rollout_servers) == ("x", 2)
    assert parse("--seed", "7", "--set", "run.seed=8").run.seed == 8
    assert parse() == load("quickstart")


def test_every_flag_names_a_key_that_exists() -> None:
    assert set(FLAGS.values()) <= set(leaf_keys())


@given(st.text(max_size=20), st.text(max_size=20))
def test_set_never_fails_otherwise_than_with_a_config_error(key: str, value: str) -> None:
    tree: dict[str, Any] = {}
    try:
        apply_override(tree, f"{key}={value}")
    except ConfigError:
        return
    assert yaml.safe_dump(tree)


@given(st.lists(st.tuples(st.sampled_from(["node0", "node1"]), st.integers(0, 7)), unique=True, max_size=8))
def test_placements_name_each_device_once(devices: list[tuple[str, int]]) -> None:
    assert list(node_devices("; ".join(f"{node}:{device}" for node, device in devices))) == devices


def test_placement_ranges() -> None:
    wanted = [("node0", 6), ("node0", 7), ("node1", 0), ("node1", 2)]
    assert list(node_devices("node0:6-7; node1:0,2")) == wanted


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_configuration_is_frozen() -> None:
    config = load("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.group_size = 2  # type: ignore[misc]


def test_evaluated_versions() -> None:
    config = load("quickstart", ["evaluation.every_steps=30", "learner.total_steps=80"])
    assert [version for version in range(81) if config.is_evaluated(version)] == [0, 30, 60, 80]
    assert not load("quickstart", ["data.eval=null"]).is_evaluated(0)


def sections(model: type[BaseModel] = Config) -> list[type[BaseModel]]:
    kinds = [field.annotation for field in model.model_fields.values()]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def test_every_key_is_documented_in_place_and_there_are_not_too_many() -> None:
    keys = leaf_keys()
    assert len(keys) == len(set(keys)) <= 150
    for section in sections():
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


def test_the_page_of_keys_is_up_to_date() -> None:
    assert make_config_docs.main(["--check"]) == 0, "run python -m scripts.make_config_docs"
    text = make_config_docs.PAGE.read_text(encoding="utf-8")
    for key in leaf_keys():
        assert f"\n| `{key}` |" in text


def test_an_outdated_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_config_docs, "PAGE", tmp_path / "configuration.md")
    assert make_config_docs.main(["--check"]) == 1
    assert make_config_docs.main([]) == 0
    assert make_config_docs.main(["--check"]) == 0


def test_importing_configs_brings_no_torch() -> None:
    program = "import configs, configs.loading, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=60)
