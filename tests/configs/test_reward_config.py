"""`reward.function`: names, weights and options, as they are given, resolved and refused."""

import pytest

from configs.loading import ConfigError, dump, load, parse
from configs.rewards import SECTIONS, BuiltIn, Endpoint

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


def test_one_name_is_a_part_with_its_defaults():
    (part,) = load("quickstart", ["reward.function=math"]).reward.parts
    assert (part.label, part.weight, part.options) == ("math", 1.0, {"boxed": True, "seconds": 3.0})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{numeric: {tolerence: 1}}", "numeric: no option 'tolerence'; did you mean 'tolerance'?"),
        ("{numerc: 1}", "'numerc' is no built-in reward; did you mean 'numeric'?"),
        ("{}", "names no function"),
        ("3", "give a name, or names with weights"),
        ("length", "length needs max_tokens: give {length: {max_tokens: ...}}"),
        ("{length: {max_tokens: 5, min_tokens: 9}}", "min_tokens 9 is above max_tokens 5"),
        ("{numeric: {tolerance: -1}}", "reward.function.numeric.tolerance"),
        ("{a.py:grade: 1, b/a.py:grade: 1}", "two parts are called 'a.grade'"),
        ("{numeric: {weight: .nan}}", "numeric: weight nan is no finite number"),
        ("{numeric: yes please}", "give its weight, or its weight and options, found 'yes please'"),
        ("{exact: 0}", "every weight is 0"),
        ("{code: {wall_s: 40}}", "40 s of judging do not fit into reward.timeout_s 30"),
        ("{math: {seconds: 30}}", "function.math.seconds: 30 s of judging do not fit"),
        ("{math: {seconds: 6}, code: 1}", "function.math.seconds and function.code.wall_s: 31 s of judging do not fit"),
        ("{regex: {pattern: '('}}", "no regular expression"),
        ("{judge: {url: 'ftp://x', model: m}}", "is no address"),
        ("{judge: {url: 'http://x:65536/v1', model: m}}", "has no port from 1 to 65535"),
        ("{judge: {url: 'http://x:0/v1', model: m}}", "has no port from 1 to 65535"),
        ("{judge: {url: 'https://me:word@x/v1', model: m}}", "has a password"),
        ("{judge: {url: 'https://x/v1', model: m, key_variable: sk-1234}}", "is no name of an environment variable"),
        ("{judge: {url: 'https://x/v1', model: m, scale: [5, 5]}}", "is no scale"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(given, said):
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [f"reward.function={given}"])
    assert said in str(refused.value) and "reward" in str(refused.value)


def test_every_option_is_documented_and_every_built_in_reward_has_a_section():
    assert set(SECTIONS) == set(BuiltIn.model_fields)
    lacking = [
        f"{name}.{option}"
        for name, section in SECTIONS.items()
        for option, field in section.model_fields.items()
        if not field.description
    ]
    assert lacking == [] and not any("key" in field for field in Endpoint.model_fields if field != "key_variable")
