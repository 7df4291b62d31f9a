"""Sections with a form of their own: sets of data.eval, parts of a reward, what all processes have alike, presets."""

import jinja2.sandbox
import pytest

from configs import ConfigError, load
from configs.learner import Checkpoint
from configs.loading import PRESETS, dump, parse
from configs.rewards import SECTIONS, Endpoint
from configs.shared import shared_values
from rollout_server.tasks.rewards.built_in import FUNCTIONS
from slipstream.check.functions import SURE

# ---- data.eval ------------------------------------------------------------------------------------------

SETS = (
    "data.eval={aime: a.jsonl, gsm8k: {path: b.parquet, samples: 4, temperature: 0.6, greedy: false, num_prompts: 9}}"
)


def test_a_set_has_its_own_settings_and_else_those_of_evaluation_and_rollout():
    config = load("quickstart", [SETS, "evaluation.max_new_tokens=20", "evaluation.sampled=false"])
    aime, gsm8k = config.evaluation_sets
    assert (aime.name, aime.path, aime.num_prompts, aime.greedy, aime.samples) == ("aime", "a.jsonl", 512, True, 0)
    assert (gsm8k.name, gsm8k.num_prompts, gsm8k.greedy, gsm8k.samples) == ("gsm8k", 9, False, 4), "it gives samples"
    assert (aime.temperature, gsm8k.temperature, gsm8k.max_new_tokens) == (1.0, 0.6, 20)
    aime, gsm8k = load("quickstart", [SETS, "evaluation.samples=2"]).evaluation_sets
    assert (aime.samples, gsm8k.samples, gsm8k.max_new_tokens, gsm8k.solved_at) == (2, 4, 10, 1.0)
    assert not load("quickstart", ["data.eval={a: {path: x, samples: 4, sampled: false}}"]).evaluation_sets[0].samples
    assert parse(dump(config), "config.yaml") == config


def test_engines_have_room_for_the_longest_answer_of_any_set():
    plain = load("quickstart")
    assert plain.max_context == plain.data.max_prompt_tokens + plain.rollout.max_new_tokens
    longer = load("quickstart", ["data.eval={a: {path: x, max_new_tokens: 99}, b: y}"])
    assert longer.max_context == plain.data.max_prompt_tokens + 99


@pytest.mark.parametrize("name", ["aim/greedy", "gsm8k/greedy", "gsm8k/sampled", "aime/reward/mean@4", "greedy"])
def test_the_best_of_what_no_set_measures_is_refused_before_a_run(name):
    best = [SETS, "checkpoint.keep_best=1", f"checkpoint.best_metric=val-core/{name}"]
    said = r"checkpoint\.best_metric: 'val-core/.* or val-core/gsm8k/reward/mean@4 or val-core/gsm8k/reward/pass@1"
    with pytest.raises(ConfigError, match=said):
        load("quickstart", best)


# ---- reward ---------------------------------------------------------------------------------------------

OWN = "graders/style.py:politeness"


def test_a_mapping_resolves_to_parts_and_survives_the_run_folder():
    config = load(
        "quickstart",
        [f"reward.function={{numeric: 1, format: 0.2, {OWN}: {{weight: 0.3, words: [please, thanks]}}}}"],
    )
    assert [(part.label, part.weight) for part in config.reward.parts] == [
        ("numeric", 1.0),
        ("format", 0.2),
        ("style.politeness", 0.3),
    ]
    assert config.reward.parts[2].options == {"words": ["please", "thanks"]}
    assert config.reward.shown == "numeric + 0.2 format + 0.3 style.politeness"
    assert parse(dump(config), "config.yaml") == config


def test_every_built_in_reward_has_a_section_a_function_and_a_word_on_whether_it_must_be_loaded():
    loaded = {"reasoning_gym", "math", "code", "judge", "remote_model"}
    assert set(SECTIONS) == set(FUNCTIONS) == SURE ^ loaded


def test_every_option_of_a_reward_is_documented():
    lacking = [
        f"{name}.{option}"
        for name, section in SECTIONS.items()
        for option, field in section.model_fields.items()
        if not field.description
    ]
    assert lacking == [] and not any("key" in field for field in Endpoint.model_fields if field != "key_variable")


# ---- what all processes have alike ----------------------------------------------------------------------

MINIMAL = "model: {path: m}\ndata: {train: d.jsonl}\nreward: {function: numeric}\n"
DIGEST = "digest "


@pytest.mark.parametrize(
    ("overrides", "differing"),
    [
        (["learner.lr=3e-4", "algorithm.loss=gspo", "run.seed=3"], ["run.seed", "algorithm.loss", "learner.lr"]),
        (["reward.function={numeric: {tolerance: 0.1}}"], ["reward.function"]),
        (["network.env={A: b}"], ["network.env"]),
        # of a host or a process alone: names, addresses, paths, cores, memory
        (["run.name=other", "run.dir=elsewhere", "model.path=/mnt/m", "data.train=/mnt/d.jsonl"], []),
        (["network.host=127.0.0.2", "network.replay_port=5757", "weight_bus.port=7"], []),
        (["rollout.max_running=8", "rollout.sglang={mem_fraction_static: 0.6}", "reward.workers=4"], []),
    ],
)
def test_what_differs_is_named_by_key(overrides: list[str], differing: list[str]) -> None:
    ours, theirs = shared_values(parse(MINIMAL, "a")), shared_values(parse(MINIMAL, "b", overrides))
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key] != theirs[key]] == differing


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment.function", "{tools: {tools: [calculator], api_key: hidden}}"),
        ("environment.function", "{tools: {long: " + "x" * 300 + "}}"),
        ("network.env", "{TRACKER_KEY: hidden}"),
    ],
)
def test_secrets_and_long_values_are_compared_by_digest(key: str, value: str) -> None:
    given = shared_values(parse(MINIMAL, "a", [f"{key}={value}"]))
    assert given[key].removeprefix("tools, options of ").startswith(DIGEST) and "hidden" not in str(given)


# ---- presets --------------------------------------------------------------------------------------------


def test_a_killed_learner_repeats_little_and_the_quick_start_can_be_replayed():
    for name in sorted(path.stem for path in PRESETS.glob("*.yaml")):
        config = load(name)
        assert 0 < config.checkpoint.every_steps <= 50 and parse(dump(config), "here") == config
    assert Checkpoint().every_steps == 50
    assert load("quickstart").replay.journal_keep == "all"


def test_gsm8k_keeps_a_system_message_that_is_there():
    template = load("gsm8k-qwen2.5-1.5b-4gpu").model.chat_template
    assert template is not None
    # The options that transformers renders chat templates with.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rendered = environment.from_string(template).render(messages=messages, add_generation_prompt=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    rendered = environment.from_string(template).render(messages=messages[1:], add_generation_prompt=True)
    system = "Reason step by step, then write the final number after ####."
    assert rendered.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n")
    assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("given", "split", "reward", "environment"),
    [("0", "1:1", 8, 8), ("0", "4:1", 4, 8), ("0", "8:1", 2, 4), ("3", "4:1", 3, 3)],
)
def test_workers_follow_from_cores_and_servers(monkeypatch, given, split, reward, environment):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    both = [f"{name}.workers={given}" for name in ("reward", "environment") if given != "0"]
    config = load("quickstart", [*both, f"placement.split={split}"])
    here = config.with_workers()
    assert (here.reward.workers, here.environment.workers) == (reward, environment)
    assert f"{reward} reward and {environment} environment processes" in config.arithmetic()
