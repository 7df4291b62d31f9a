"""data.eval: one file or sets by name, each with its own settings; what cannot work is refused under its key."""

import pytest

from configs import ConfigError, load
from configs.loading import dump, parse

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


def test_one_file_is_a_set_without_a_name():
    config = load("quickstart")
    (only,) = config.evaluation_sets
    assert (only.name, only.key, only.path, only.samples) == ("", "data.eval", config.data.eval, 1)
    assert load("quickstart", ["evaluation.every_steps=0"]).evaluation_sets == ()


def test_engines_have_room_for_the_longest_answer_of_any_set():
    plain = load("quickstart")
    assert plain.max_context == plain.data.max_prompt_tokens + plain.rollout.max_new_tokens
    longer = load("quickstart", ["data.eval={a: {path: x, max_new_tokens: 99}, b: y}"])
    assert longer.max_context == plain.data.max_prompt_tokens + 99


def test_several_answers_of_which_none_is_sampled_are_refused():
    with pytest.raises(ConfigError, match=r"evaluation\.samples: 4 with evaluation\.sampled false.*sampled=true"):
        load("quickstart", ["evaluation.samples=4", "evaluation.sampled=false"])
    assert load("quickstart", ["evaluation.samples=4", "evaluation.sampled=false", SETS])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.eval={}", "data.eval: names no set; give at least one"),
        ("data.eval=[a.jsonl]", "data.eval: give one file, or sets by name, such as {aime: "),
        ("data.eval={a/b: x}", "data.eval: 'a/b' cannot name a set: .* take letters, digits"),
        ("data.eval={'val core': x}", "data.eval: 'val core' cannot name a set"),
        ("data.eval={2024: x}", "data.eval: 2024 cannot name a set: .* quote a name of digits alone"),
        ("data.eval={a: x, a: y}", "'a' stands there twice; remove or rename one"),
        ("data.eval={a: {path: x, samples: 0}}", "data.eval.a.samples: Input should be greater than or equal to 1"),
        ("data.eval={a: {path: x, temperature: 0}}", "data.eval.a.temperature: Input should be greater than 0"),
        ("data.eval={a: {path: x, sample: 4}}", "data.eval.a.sample: unknown key"),
        ("data.eval={a: {samples: 4}}", "data.eval.a.path: missing"),
        ("data.eval={a: {path: x, greedy: false, sampled: false}, b: y}", "data.eval.a: neither greedy nor sampled"),
        ("evaluation.samples=0", "evaluation.samples: Input should be greater than or equal to 1"),
        (
            "data.eval={a: {path: x, samples: 1000, max_new_tokens: 32768}}",
            "data.eval.a: samples 1000 answers .* are more than one message holds .* take samples 170 or fewer",
        ),
    ],
)
def test_sets_that_cannot_work_are_refused_with_key_and_remedy(given, said):
    with pytest.raises(ConfigError, match=r"(?s)" + said):
        load("quickstart", [given])


@pytest.mark.parametrize("name", ["aime/greedy", "aime/sampled", "gsm8k/reward/mean@4", "gsm8k/reward/pass@1"])
def test_the_best_may_be_what_a_set_measures(name):
    best = [SETS, "checkpoint.keep_best=1", f"checkpoint.best_metric=val-core/{name}"]
    assert load("quickstart", best).checkpoint.keep_best == 1


@pytest.mark.parametrize("name", ["aim/greedy", "gsm8k/greedy", "gsm8k/sampled", "aime/reward/mean@4", "greedy"])
def test_the_best_of_what_no_set_measures_is_refused_before_a_run(name):
    best = [SETS, "checkpoint.keep_best=1", f"checkpoint.best_metric=val-core/{name}"]
    said = r"checkpoint\.best_metric: 'val-core/.* or val-core/gsm8k/reward/mean@4 or val-core/gsm8k/reward/pass@1"
    with pytest.raises(ConfigError, match=said):
        load("quickstart", best)


def test_a_key_that_stands_twice_in_a_file_is_refused_with_its_line():
    with pytest.raises(ConfigError, match=r"(?s)x\.yaml: not readable as YAML: .*line 3, .*'a' stands there twice"):
        parse("data:\n  eval:\n    a: x\n    b: y\n    a: z\n", "x.yaml")


def test_a_run_of_no_steps_evaluates_the_model_or_is_refused():
    assert load("quickstart", ["learner.total_steps=0"]).is_evaluated(0)
    for given in ("data.eval=null", "evaluation.every_steps=0"):
        with pytest.raises(ConfigError, match=r"learner\.total_steps: 0 .* nothing is evaluated; set data\.eval"):
            load("quickstart", ["learner.total_steps=0", given])
