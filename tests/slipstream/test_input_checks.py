"""Preflight of prompts and of reward.function, by the rules of the rollout servers."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from configs import Config, ConfigError, load
from learner.checkpoints.folders import mark_complete
from replay.data import DataError
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.rewards import RewardError
from rollout_server.tasks.task import Task
from slipstream.check import checks, functions, prompts
from slipstream.check.model_folders import check_policy
from slipstream.check.prompts import check_prompts
from slipstream.runtime.fingerprint import run_fingerprint

SYMBOLS = ["<unk>", "<eos>", *"0123456789=?+ abcdefghijklmnopqrstuvwxyz\n"]
CHAT = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
SAID = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
        ("models/Qwen3-0.6B", "hf download OWNER/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
        ("/nowhere/Qwen3-0.6B", "hf download OWNER/Qwen3-0.6B --local-dir /nowhere/Qwen3-0.6B"),
    ],
)
def test_a_missing_model_is_answered_with_the_command_that_brings_it(path, command):
    with pytest.raises(ConfigError) as refused:
        check_policy(load("quickstart", [f"model.path={path}"]))
    assert refused.value.code == "SLIP-CONFIG-08" and str(refused.value).endswith(f"{command} [SLIP-CONFIG-08]")


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of one token a character, and without a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(.|\n)"), "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 4)
    described = {"model_type": "qwen3", "vocab_size": len(SYMBOLS), **sizes}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("mamba", "SLIP-CONFIG-08", "its layers carry a state from token to token"),
        ("unheard_of", "SLIP-CONFIG-08", "it has no record here"),
        ("granite", "SLIP-CONFIG-04", "rollout.engine: 'torch' does not compute a granite model; take sglang"),
    ],
)
def test_a_family_that_is_not_trained_or_not_served_is_refused_before_a_run(model, kind, code, said):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (model / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": len(SYMBOLS)}))
    with pytest.raises(ConfigError) as refused:
        check_policy(config_of(model))
    assert refused.value.code == code and said in str(refused.value)


def config_of(model: Path, *settings: str) -> Config:
    return load("quickstart", [f"model.path={model}", *settings])


def file_of(tmp_path: Path, *prompts: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    return str(path)


def looked_at(config: Config, path: str, curriculum: str = "none") -> list[str]:
    """What is said of the rows; raises what would stop the run."""
    return [finding.what for finding in check_prompts(config, path, curriculum)]


def check_input(config: Config) -> None:
    """Model folder and data files; raises what would stop the run."""
    for check in (checks.model, checks.data):
        list(check(checks.Subject(config)))


def refused(config: Config, path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        looked_at(config, path)
    return str(caught.value)


def test_prompts_that_cannot_be_rendered_are_refused(model, tmp_path):
    path = file_of(tmp_path, SAID, SAID)
    said = refused(config_of(model), path)
    assert f"{path}: none of the first 2 rows" in said and "no chat template; set model.chat_template" in said
    template = json.dumps("{{ raise_exception('system messages only') }}")
    said = refused(config_of(model, f"model.chat_template={template}"), path)
    assert "row 1: model.chat_template: fails on messages of the roles user: system messages only" in said
    settings = f"model.chat_template={json.dumps(CHAT)}", "data.max_prompt_tokens=64"
    assert looked_at(config_of(model, *settings), path)


def test_prompts_that_are_all_too_long_are_refused_with_their_lengths(model, tmp_path):
    path = file_of(tmp_path, "1" * 40, "2" * 30)
    said = refused(config_of(model), path)
    assert "data.max_prompt_tokens: 16" in said and "first 2 rows" in said and path in said
    assert "30 to 40 tokens; raise it to 40" in said
    assert looked_at(config_of(model, "data.max_prompt_tokens=30"), path)


def test_prompts_that_are_too_long_are_counted_before_the_start(model, tmp_path):
    first, said = looked_at(config_of(model), file_of(tmp_path, "1" * 40, "1+1=", "2" * 30))
    assert f"rows.jsonl: read as own; the first row: prompt '{'1' * 40}', ground truth '2'" in first
    assert "2 of the first 3 prompts have more than data.max_prompt_tokens 16 tokens, up to 40" in said


def test_a_curriculum_that_no_row_has_is_found_before_the_start(model, tmp_path):
    rows = file_of(tmp_path, "1+1=", "2+2=")
    for curriculum in ("none", "pass_rate"):
        assert looked_at(config_of(model), rows, curriculum)
    with pytest.raises(DataError, match=r"curriculum: 'dificulty': .*rows.jsonl: row 1 has None there"):
        looked_at(config_of(model), rows, "dificulty")


def test_options_reach_the_chat_template_at_both_ends(model):
    template = json.dumps("{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %}brief{% endif %}")
    plain = config_of(model, f"model.chat_template={template}")
    brief = config_of(model, f"model.chat_template={template}", "model.chat_template_options={brief: true}")
    row = {"prompt": SAID, "ground_truth": "", "data_source": "", "extra_info": {}, "columns": {}}
    for config, length in ((plain, 4), (brief, 9)):
        assert prompts.PromptEncoder(config).length(row) == len(Task(config).encode(row)) == length
    prints = [run_fingerprint(config)["chat_template"] for config in (plain, brief)]
    assert prints[1].startswith(prints[0] + " with "), "ends with other options are told apart at Hello"


@pytest.mark.parametrize("prompt", ["1+1= ?", SAID, [{"role": "system", "content": "add\n"}, *SAID]])
def test_lengths_are_those_of_the_rollout_servers(model, prompt):
    config = config_of(model, f"model.chat_template={json.dumps(CHAT)}", "data.max_prompt_tokens=64")
    row = {"prompt": prompt, "ground_truth": "", "data_source": "", "extra_info": {}, "columns": {}}
    assert prompts.PromptEncoder(config).length(row) == len(Task(config).encode(row))


@pytest.mark.parametrize(
    ("setting", "value"), [("enable_padding", {"length": 64}), ("enable_truncation", {"max_length": 8})]
)
def test_a_tokenizer_that_pads_or_cuts_counts_tokens_all_the_same(model, tmp_path, setting, value):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    getattr(tokenizer, setting)(**value)
    tokenizer.save(str(model / "tokenizer.json"))
    assert looked_at(config_of(model), file_of(tmp_path, "1+1="))
    assert "have 20 to 20 tokens" in refused(config_of(model), file_of(tmp_path, "1" * 20))


def test_a_broken_tokenizer_is_refused_by_file(model, tmp_path):
    (model / "tokenizer.json").write_text('{"model": {}}')
    said = refused(config_of(model), file_of(tmp_path, "1+1="))
    assert "model.path" in said and f"{model}/tokenizer.json cannot be loaded" in said


def test_a_checkpoint_is_a_model_if_it_is_whole(model, tmp_path):
    """By its folder or by the link to the best, of which the step is kept."""
    parent = tmp_path / "runs" / "a" / "checkpoints"
    step = parent / "step_40"
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    step.mkdir(parents=True)
    model.rename(step / "hf")
    (step / "state.json").write_text("{}")
    (parent / "best").symlink_to("step_40")
    data = [f"{key}={file_of(tmp_path, '1+1=')}" for key in ("data.train", "data.eval")]
    for name in ("step_40", "best", "step_40/hf"):
        config = config_of(parent / name, *data)
        assert config.model.path == str(step / "hf")
        with pytest.raises(ConfigError, match=f"^model.path: checkpoint {step} is not complete .no COMPLETE."):
            check_input(config)
    mark_complete(step)
    check_input(config)
    run = parent.parent
    beside = [f"teachers={{old: {{path: {run}}}}}", "algorithm.distillation=sampled", "algorithm.kl=k3"]
    config = config_of(run, *data, *beside, f"algorithm.reference_path={run}", f"critic.path={run}")
    named = config.teachers["old"].path, config.algorithm.reference_path, config.critic.path
    assert {config.model.path, *named} == {str(step / "hf")}


def test_preflight_names_the_set_whose_file_is_missing_or_whose_answers_are_too_long(model, tmp_path):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    there = file_of(tmp_path, "1+1=")
    sets = f"data.eval={{near: {there}, far: {tmp_path}/far.jsonl}}"
    with pytest.raises(DataError, match=rf"^data\.eval\.far: {tmp_path}/far\.jsonl: no such file"):
        check_input(config_of(model, f"data.train={there}", sets))
    described = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(described))
    sets = f"data.eval={{near: {there}, long: {{path: {there}, max_new_tokens: 60}}}}"
    with pytest.raises(ConfigError, match=r"^data\.eval\.long: max_new_tokens: 60 .* max_position_embeddings 64"):
        check_input(config_of(model, f"data.train={there}", sets))


def test_preflight_names_a_window_that_engines_would_leave_out(model, tmp_path):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    described = json.loads((model / "config.json").read_text())
    described |= {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}
    (model / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"^model\.path: .* attention sees 8 tokens .* all 26 of data"):
        check_input(config_of(model, f"data.train={file_of(tmp_path, '1+1=')}"))


def test_a_large_file_is_not_read_whole(model, monkeypatch):
    rows = iter([{"prompt": "1+1=", "ground_truth": "2"}] * 10 * prompts.CHECKED_ROWS)
    monkeypatch.setattr(prompts, "read_rows", lambda path, report, _: report("read") or rows)
    monkeypatch.setattr(prompts, "size_of_files", lambda _: prompts.CHECKED_BYTES + 1)
    assert "of the rest, replay checks a sample" in looked_at(config_of(model), "rows.jsonl")[-1]
    assert len(list(rows)) >= 8 * prompts.CHECKED_ROWS


MINE = """
def reward(sample): return 1.0
def two(answer, truth): return 1.0
def near(sample, share: float = 0.1): return share
class Reward:
    def __init__(self, sample): ...
async def rollout(row, client, depth=3): ...
async def one(row): ...
async def tries(row, client, *, most: int = 2): ...
def plain(row, client): ...
def search(query: str): ...
"""


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("reward.function", "mine.py:reward", ""),
        ("reward.function", "mine.py:rewrad", "mine.py has no function 'rewrad'; did you mean 'reward'"),
        ("reward.function", "mine.py:two", "has the parameters (answer, truth); take `async def reward(sample)`"),
        ("reward.function", "mine.py:Reward", "is a class; take `async def reward(sample)`"),
        ("reward.function", "{mine.py:near: {share: 1}}", ""),
        ("reward.function", "{mine.py:near: {shore: 1}}", "takes no option 'shore'; it has (sample, share)"),
        ("reward.function", "{mine.py:near: {share: all}}", "option 'share' of 'mine.py:near': Input should be a"),
        ("reward.function", "none.py:reward", "no file 'none.py'"),
        ("reward.function", "cut.py:reward", "SyntaxError: '(' was never closed"),
        ("reward.function", "cod", "'cod' names no function; did you mean 'code'"),
        ("reward.function", "{judge: {url: 'http://a/v1', model: m, key_variable: NO}}", "no environment variable NO"),
        ("environment.function", "mine.py:rollout", ""),
        ("environment.function", "chess", "'chess' names no function; there is agent, tools"),
        ("environment.function", "{mine.py:tries: {most: 3}}", ""),
        ("environment.function", "{mine.py:tries: {mist: 3}}", "has no option 'mist'; did you mean 'most'"),
        ("environment.function", "{mine.py:tries: {most: all}}", "option 'most' of 'mine.py:tries': Input should be a"),
        ("environment.function", "mine.py:one", "take `async def one(row, client)`"),
        ("environment.function", "mine.py:plain", "not asynchronous"),
        ("environment.function", "{tools: {tools: [calculator, 'mine.py:search']}}", ""),
        ("environment.function", "{tools: {tools: 'mine.py:serch'}}", "did you mean 'search'"),
        ("environment.function", "{agent: {command: [python, none.py]}}", "no file 'none.py'"),
    ],
)
def test_rewards_and_environments_are_loaded_as_servers_load_them(tmp_path, monkeypatch, key, given, said):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("cut.py").write_text("def reward(sample")
    config = load("quickstart", ["environment.turn_timeout_s=20", f"{key}={given}"])
    try:
        functions.load(config)
    except (RewardError, EnvironmentFailed) as error:
        assert said and said in str(error) and key in str(error)
    else:
        assert not said
