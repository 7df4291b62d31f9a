"""Model fingerprints: equal for the same contents in another layout, different for anything that changes ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.runtime.fingerprint import FingerprintError, model_fingerprint, resolve_chat_template, stop_token_ids

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "vocab_size": 8}
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 5, "content": "<eos>", "special": True}],
    "normalizer": None,
    "model": MODEL,
}
SETTINGS = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}", "padding_side": "left"}


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "config.json", CONFIG)
    write(tmp_path / "tokenizer.json", TOKENIZER)
    write(tmp_path / "tokenizer_config.json", SETTINGS)
    write(tmp_path / "generation_config.json", {"eos_token_id": [7, 3]})
    return tmp_path


def changed(folder: Path, before: dict[str, str]) -> set[str]:
    after = model_fingerprint(str(folder))
    assert after.keys() == before.keys()
    return {key for key in after if after[key] != before[key]}


def test_names_what_both_ends_must_agree_on(folder: Path) -> None:
    found = model_fingerprint(str(folder))
    assert set(found) == {"tokenizer", "chat_template", "architecture", "vocab_size", "eos_token_ids"}
    assert (found["vocab_size"], found["eos_token_ids"]) == ("8", "3,5,7")


def test_layout_and_unrelated_settings_do_not_count(folder: Path) -> None:
    before = model_fingerprint(str(folder))
    resaved = TOKENIZER | {
        "truncation": {"max_length": 3},
        "model": MODEL | {"merges": [["a", "b"]], "vocab": {"ab": 2, "b": 1, "a": 0}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(resaved, indent=2))
    write(folder / "tokenizer_config.json", SETTINGS | {"eos_token": {"content": "<eos>"}, "padding_side": "right"})
    write(folder / "config.json", CONFIG | {"transformers_version": "9", "use_cache": False})
    assert changed(folder, before) == set()


@pytest.mark.parametrize(
    ("file", "value", "expected"),
    [
        ("config.json", CONFIG | {"hidden_size": 32}, {"architecture"}),
        ("config.json", CONFIG | {"vocab_size": 9}, {"architecture", "vocab_size"}),
        ("tokenizer.json", TOKENIZER | {"model": MODEL | {"vocab": {"a": 1, "b": 0, "ab": 2}}}, {"tokenizer"}),
        ("tokenizer.json", TOKENIZER | {"model": MODEL | {"merges": []}}, {"tokenizer"}),
        ("tokenizer.json", TOKENIZER | {"normalizer": {"type": "NFC"}}, {"tokenizer"}),
        ("tokenizer.json", TOKENIZER | {"added_tokens": []}, {"tokenizer", "eos_token_ids"}),
        ("tokenizer_config.json", SETTINGS | {"add_bos_token": True}, {"tokenizer"}),
        ("tokenizer_config.json", SETTINGS | {"chat_template": "x"}, {"chat_template"}),
        ("generation_config.json", {"eos_token_id": 7}, {"eos_token_ids"}),
    ],
)
def test_what_changes_ids_changes_the_entry_of_that_name(
    folder: Path, file: str, value: Any, expected: set[str]
) -> None:
    before = model_fingerprint(str(folder))
    write(folder / file, value)
    assert changed(folder, before) == expected


def test_vocabulary_files_of_older_folders(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    write(folder / "vocab.json", {"a": 0, "<eos>": 1})
    (folder / "merges.txt").write_text("a b\n")
    before = model_fingerprint(str(folder))
    assert before["eos_token_ids"] == "1,3,7"
    (folder / "merges.txt").write_text("b a\n")
    assert changed(folder, before) == {"tokenizer"}


def test_chat_template_comes_from_the_key_then_the_file_then_the_settings(folder: Path) -> None:
    path = str(folder)
    assert resolve_chat_template(path, None) == SETTINGS["chat_template"]
    (folder / "chat_template.jinja").write_text("{{ 'file' }}")
    assert resolve_chat_template(path, None) == "{{ 'file' }}"
    other = folder / "other.jinja"
    other.write_text("{{ 'other' }}")
    assert resolve_chat_template(path, str(other)) == "{{ 'other' }}"
    assert resolve_chat_template(path, "{{ 'inline' }}") == "{{ 'inline' }}"
    assert model_fingerprint(path, str(other)) == model_fingerprint(path, "{{ 'other' }}")
    with pytest.raises(FingerprintError, match=r"model\.chat_template: 'nowhere\.jinja'"):
        resolve_chat_template(path, "nowhere.jinja")


def test_named_and_missing_templates(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder / "tokenizer_config.json", SETTINGS | {"chat_template": templates})
    assert resolve_chat_template(str(folder), None) == "d"
    (folder / "tokenizer_config.json").unlink()
    assert model_fingerprint(str(folder))["chat_template"] == "none"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_errors_name_the_file(folder: Path, file: str) -> None:
    for text, said in (("{", "not readable as JSON"), ("[]", "expected a JSON object, found a list")):
        (folder / file).write_text(text)
        with pytest.raises(FingerprintError, match=f"{file}: {said}"):
            model_fingerprint(str(folder))
    (folder / file).unlink()
    with pytest.raises(FingerprintError, match=f"{file}: missing"):
        model_fingerprint(str(folder))


def test_missing_folder_and_broken_stop_tokens(folder: Path) -> None:
    with pytest.raises(FingerprintError, match=r"model\.path: 'org/model' is no folder"):
        model_fingerprint("org/model")
    assert stop_token_ids(str(folder)) == (3, 7)
    write(folder / "generation_config.json", {"eos_token_id": ["</s>"]})
    with pytest.raises(FingerprintError, match=r"generation_config\.json: eos_token_id \['</s>'\]"):
        stop_token_ids(str(folder))
    (folder / "generation_config.json").unlink()
    assert stop_token_ids(str(folder)) == ()
