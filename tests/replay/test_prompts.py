"""Datasets: every convention gives the same row, errors name the place, and the order resumes exactly."""

import functools
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from replay.data import DataError, PromptSource, load_rows
from replay.data.rows import RowLocation, plain
from tests.replay.simulation.world import rows as rows_of

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]


def jsonl(folder: Path, *rows: Any, name: str = "sums.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def source_of(num_rows: int, *, shuffle: bool = True, seed: int = 0) -> PromptSource:
    return PromptSource(rows_of(num_rows), shuffle=shuffle, seed=seed)


EXTRA, JUDGE = {"split": "train", "index": 0}, {"style": "rule", "ground_truth": "2"}
VERL = {"data_source": "sums", "prompt": MESSAGES, "ability": "math", "reward_model": JUDGE, "extra_info": EXTRA}
STEPS, ASKED = "Add them.\n#### 1,002", [{"role": "user", "content": "1+1?"}]
PROBLEM, BOXED = {"answer": "2", "solution": "it is 2"}, r"\boxed{1}, no, $\boxed{\frac{4}{2}}$."
MBPP_KEPT = {"test_setup_code": "import math", "test_list": ["assert half(3) == 1.5", "assert half(2) == 1"]}
MBPP = {"text": "Halve.", **MBPP_KEPT}
MBPP_ASKED = [{"role": "user", "content": "Halve.\nYour code has to pass this test:\nassert half(3) == 1.5"}]
CONVENTIONS: dict[str, tuple[dict[str, Any], Any, Any, Any, Any]] = {
    "verl": (VERL, MESSAGES, "2", EXTRA, {"ability": "math"}),
    "slime": ({"prompt": "1+1=", "label": "2", "metadata": {"a": 1}}, "1+1=", "2", {"a": 1}, {"label": "2"}),
    "trl": ({"prompt": MESSAGES, "solution": "2", "level": 3}, MESSAGES, "2", {}, {"solution": "2", "level": 3}),
    "trl-unjudged": ({"prompt": "a poem", "style": "haiku"}, "a poem", None, {}, {"style": "haiku"}),
    "own": ({"prompt": "1+1=", "answer": "2"}, "1+1=", "2", {}, {"answer": "2"}),
    "own-nested": ({"prompt": "1+1=", "answer": ["2", None]}, "1+1=", ["2", None], {}, {"answer": ["2", None]}),
    "gsm8k": ({"question": "1+1?", "answer": STEPS}, ASKED, "1002", {}, {"answer": STEPS}),
    "question": ({"question": "1+1?", "answer": "2"}, ASKED, "2", {}, {"answer": "2"}),
    "problem": ({"problem": "1+1?", "answer": "2", "solution": "it is 2"}, ASKED, "2", {}, PROBLEM),
    "math": ({"problem": "1+1?", "solution": BOXED}, ASKED, r"\frac{4}{2}", {}, {"solution": BOXED}),
    "mbpp": (MBPP, MBPP_ASKED, '["import math", "assert half(3) == 1.5", "assert half(2) == 1"]', {}, MBPP_KEPT),
}
"""A row, and what its prompt, ground truth, extra_info and columns are."""


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_each_convention_is_read_from_both_formats(tmp_path: Path, form: str, name: str) -> None:
    raw, *wanted = CONVENTIONS[name]
    path = tmp_path / f"sums.{form}"
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([raw, raw]), path)
    else:
        jsonl(tmp_path, raw, raw)
    row, _ = load_rows(path)
    assert [row[key] for key in ("prompt", "ground_truth", "extra_info", "columns")] == wanted
    assert row["data_source"] == "sums"
    assert msgpack.unpackb(msgpack.packb(row)) == row


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["", '{"prompt": "a", "answer": "b"}', "", '{"prompt": "a'], ["row 4", "JSON", '"a']),
        (['{"prompt": "a", "answer": "b"}', "[1]"], ["row 2", "JSON object", "list", "[1]"]),
        (['{"question": "a"}'], ["row 1", "no prompt", "question"]),
        (['{"prompt": "a", "answer": "b"}', '{"answer": "b"}'], ["row 2", "'prompt'", "missing"]),
        (['{"prompt": null, "answer": "b"}'], ["row 1", "'prompt'", "missing or null"]),
        (['{"prompt": 7, "answer": "b"}'], ["row 1", "'prompt'", "int", "7"]),
        (['{"prompt": " ", "answer": "b"}'], ["row 1", "'prompt'", "empty", "' '"]),
        (['{"prompt": [], "answer": "b"}'], ["row 1", "'prompt'", "empty", "[]"]),
        (['{"prompt": ["hi"], "answer": "b"}'], ["row 1", "'prompt[0]'", "'hi'"]),
        (['{"prompt": [{"role": "bot", "content": "hi"}], "answer": "b"}'], ["'prompt[0].role'", "'bot'", "user"]),
        (
            ['{"prompt": [{"role": "user", "content": ["x"]}], "answer": "b"}'],
            ["'prompt[0].content[0]'", "expected", "'x'"],
        ),
        (['{"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}], "answer": "b"}'], ["tool_calls"]),
        (['{"prompt": "a", "label": "b"}', '{"prompt": "a", "answer": "b"}'], ["row 2", "'label'", "slime"]),
        (['{"prompt": "a", "answer": NaN}'], ["row 1", "'answer'", "finite", "nan"]),
        (['{"prompt": "a", "answer": "b", "w": {"x": [1, -Infinity]}}'], ["'w.x[1]'", "finite", "-inf"]),
        (['{"prompt": "a", "answer": 100000000000000000000}'], ["'answer'", "64 bits"]),
        (['{"prompt": "a\\ud800", "answer": "b"}'], ["row 1", "'prompt'", "surrogate"]),
        (['{"prompt": "a", "reward_model": "b"}'], ["'reward_model'", "ground_truth", "'b'"]),
        (['{"prompt": "a", "answer": "b", "extra_info": 3}'], ["'extra_info'", "mapping", "3"]),
        (['{"prompt": "a", "answer": "b", "data_source": 3}'], ["'data_source'", "text", "3"]),
        (['{"question": "a", "answer": "#### 1"}', '{"question": "a", "answer": "1"}'], ["row 2", "####", "'1'"]),
        (['{"problem": "a", "solution": "no box"}'], ["row 1", "'solution'", "boxed", "'no box'"]),
        (['{"text": "a", "test_list": "assert f()"}'], ["row 1", "'test_list'", "list of asserts"]),
        (["", " "], ["has no rows"]),
        ([], ["has no rows"]),
    ],
)
def test_errors_name_file_row_column_and_value(tmp_path: Path, lines: list[str], expected: list[str]) -> None:
    path = jsonl(tmp_path, *lines)
    with pytest.raises(DataError) as raised:
        load_rows(path)
    for part in [str(path), *expected]:
        assert part in str(raised.value)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    jsonl(tmp_path, {"prompt": "a", "answer": "b"}, name="rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + bytes(100))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é", "answer": "b"}\n'.encode("latin-1"))
    for name, said in {
        "none.jsonl": "no such file",
        "rows.parquet": "not a parquet file",
        "broken.parquet": r"broken\.parquet: not readable as parquet",
        "latin.jsonl": r"latin\.jsonl: row 1: not readable",
    }.items():
        with pytest.raises(DataError, match=said):
            load_rows(tmp_path / name)


def many(folder: Path, count: int, size: int) -> Path:
    return jsonl(folder, *({"prompt": f"{i}" + "x" * size, "answer": str(i)} for i in range(count)))


def test_a_file_is_read_once_and_its_rows_are_not_kept(tmp_path: Path) -> None:
    path = many(tmp_path, 10_000, 2_000)
    tracemalloc.start()
    rows = load_rows(path)
    source = PromptSource(rows, shuffle=False, seed=0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000, "20 MB of rows"
    assert [source.row(i)["ground_truth"] for i in (9_999, 0, 5_000)] == ["9999", "0", "5000"]
    assert [row["ground_truth"] for row in rows[9_998:]] == ["9998", "9999"]


def test_a_file_that_is_changed_is_named_and_one_in_its_place_does_not_matter(tmp_path: Path) -> None:
    path = many(tmp_path, 3, 1)
    rows = load_rows(path)
    many(tmp_path, 3, 2).replace(tmp_path / "other.jsonl")
    path.with_name("other.jsonl").replace(path)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        rows[0]  # it was written over before it was moved away
    rows = load_rows(path)
    path.rename(tmp_path / "away.jsonl")
    many(tmp_path, 1, 9)
    assert rows[2]["prompt"] == "2xx"


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "answer": "b"}]), path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"slipstream-rl\[parquet\]"):
        load_rows(path)


def test_values_become_plain() -> None:
    place = RowLocation(source="f", row=1)
    value = {"a": np.float32(0.5), "b": np.arange(3), "c": (np.int64(4), True), "d": np.array([["x"]], dtype=object)}
    assert plain(value, "c", place) == {"a": 0.5, "b": [0, 1, 2], "c": [4, True], "d": [["x"]]}
    for wrong, said in (
        (np.array([1.0, np.nan]), "finite"),
        ({1: 2}, "keys must be text"),
        (object(), "cannot be sent"),
    ):
        with pytest.raises(DataError, match=said):
            plain(wrong, "c", place)
    deep: list[Any] = functools.reduce(lambda inner, _: [inner], range(40), [])
    with pytest.raises(DataError, match="deeper than"):
        plain(deep, "c", place)


def test_order_depends_on_seed_and_pass_and_never_changes() -> None:
    def passes(seed: int) -> list[list[int]]:
        source = source_of(8, seed=seed)
        return [[source.next()[1] for _ in range(8)] for _ in range(2)]

    # Pinned: a resumed run needs the same order from every later version of this code.
    assert passes(0) == [[3, 6, 5, 1, 2, 0, 7, 4], [2, 6, 3, 5, 0, 4, 7, 1]]
    assert passes(0)[0] != passes(1)[0]


def test_row_and_empty_source_are_checked() -> None:
    for index in (5, -1):
        with pytest.raises(DataError, match=f"prompt index {index}"):
            source_of(5).row(index)
    with pytest.raises(DataError, match="at least one row"):
        PromptSource([], shuffle=True, seed=0)
    assert len(source_of(5)) == 5
