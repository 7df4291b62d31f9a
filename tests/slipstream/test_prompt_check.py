"""What of the rows and of the chat template is refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs import Config, ConfigError, load
from examples import sort6
from replay.data import DataError
from slipstream.check.prompts import check_answers_of, check_prompts

SYSTEM, USER = {"role": "system", "content": "  Sort \n them. "}, {"role": "user", "content": "312="}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sort6.save_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


def config_of(model: Path, **settings: str) -> Config:
    words = [f"model.path={model}", "data.train=none.jsonl", "data.max_prompt_tokens=40"]
    return load("quickstart", [*words, *(f"{key.replace('__', '.')}={value}" for key, value in settings.items())])


def file_of(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def blank(*answers: Any) -> list[dict[str, Any]]:
    return [{"prompt": "312=", "answer": answer} for answer in answers]


@pytest.mark.parametrize(
    ("function", "named"),
    [("exact", "exact"), ("numeric", "numeric"), ("{length: {weight: 0.1, max_tokens: 9}, math: 1}", "math")],
)
def test_rows_without_any_answer_are_refused_where_it_is_compared_with(
    tmp_path: Path, model: Path, function: str, named: str
) -> None:
    config = config_of(model, reward__function=function)
    said = f"the answers of the first 3 rows are all empty, and reward.function '{named}' compares with them"
    with pytest.raises(ConfigError, match=said):
        list(check_prompts(config, file_of(tmp_path, *blank("", " ", None))))
    for one in ("0", 0, False):
        assert list(check_prompts(config, file_of(tmp_path, *blank("", one))))


def test_broken_rows_anywhere_in_a_file_are_named_together(tmp_path: Path, model: Path) -> None:
    rows = blank(*range(50_600))
    for number in range(50_500, 50_512):
        rows[number]["prompt"] = ""
    path = file_of(tmp_path, *rows)
    with pytest.raises(DataError) as raised:
        list(check_prompts(config_of(model), path))
    said = str(raised.value)
    assert said.startswith(f"{path}: 10 of the first 50,510 rows cannot be used")
    assert said.count("prompt is empty") == 10
    assert all(f"row {number}, column 'prompt'" in said for number in range(50_501, 50_511))
    found = list(check_prompts(config_of(model, data__on_broken_row="skip"), path))
    (warned,) = [finding.what for finding in found if finding.severity == "warn"]
    assert "12 of 50,600 rows" in warned and "row 50501," in warned


@pytest.mark.parametrize(
    "settings",
    [
        {"reward__function": "judge.py:reward"},
        {"reward__function": "{exact: {weight: 0}, length: {max_tokens: 9}}"},
        {"environment__function": "{game.py:rollout: {game: sums}}", "environment__turn_timeout_s": "9"},
    ],
)
def test_rows_without_an_answer_are_fine_where_nothing_compares(
    tmp_path: Path, model: Path, settings: dict[str, str]
) -> None:
    assert list(check_prompts(config_of(model, **settings), file_of(tmp_path, *blank("", ""))))


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_template_that_leaves_a_role_out_is_refused(tmp_path: Path, model: Path, role: str) -> None:
    rows = [{"prompt": [SYSTEM, USER], "answer": "1"}] * 3
    drops = f"{{% for m in messages if m.role != '{role}' %}}{{{{ m.content }}}}{{% endfor %}}"
    said = f"model.chat_template: it leaves out the {role} message of the 3 rows of .*train.jsonl that have one"
    with pytest.raises(ConfigError, match=said):
        list(check_prompts(config_of(model, model__chat_template=json.dumps(drops)), file_of(tmp_path, *rows)))


def test_what_a_template_raises_of_python_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    template = "{% for m in messages %}{{ m.content + 1 }}{% endfor %}"
    row = {"prompt": [USER], "answer": "1"}
    said = r"none of the first 2 rows can be rendered; row 1: model\.chat_template: fails on .*roles user: .*TypeError"
    with pytest.raises(ConfigError, match=said):
        list(check_prompts(config_of(model, model__chat_template=json.dumps(template)), file_of(tmp_path, row, row)))


def test_a_template_may_strip_texts_and_rows_may_have_none_of_a_role(tmp_path: Path, model: Path) -> None:
    strips = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim | replace('\\n', '') }}{% endfor %}"
    rows = [{"prompt": one, "answer": "1"} for one in ([SYSTEM, USER], [USER], [USER, SYSTEM])]
    assert list(check_prompts(config_of(model, model__chat_template=json.dumps(strips)), file_of(tmp_path, *rows)))
    drops = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert list(check_prompts(config_of(model, model__chat_template=json.dumps(drops)), file_of(tmp_path, *rows[1:2])))


def test_rows_with_answers_are_encoded_before_anything_starts(tmp_path: Path, model: Path) -> None:
    taught = {"learner__objective": "sft", "rollout__max_new_tokens": "8", "data__max_prompt_tokens": "8"}
    config = config_of(model, **taught)
    good, long = {"prompt": "312=", "completion": "123"}, {"prompt": "312=", "completion": "1" * 40}
    path = file_of(tmp_path, good, long, good)
    first, left_out = (found.what for found in check_answers_of(config, path, "none") if found.severity != "skipped")
    assert "8 of the 16 tokens" in first and "1 of the first 3 rows are left out" in left_out
    with pytest.raises(ConfigError, match="none of the first 1 rows can be trained on; the first: it has 45 tokens"):
        list(check_answers_of(config, file_of(tmp_path, long), "none"))
    with pytest.raises(DataError, match="learns from the answers in its rows"):
        list(check_answers_of(config, file_of(tmp_path, {"prompt": "312="}), "none"))
