"""Every form of data gives the rows of its file, at any size; what was written to a file since is noticed."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from replay.data import DataError, PromptSource, load_rows, read_rows
from tests.replay.test_prompts import jsonl as write_jsonl

RAW = [{"prompt": f"é{n}", "answer": n, "extra_info": {"n": [n, None]}} for n in range(300)]


@pytest.fixture(params=["small", "large"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is small, or every file is large."""
    if request.param == "large":
        make_large(monkeypatch)


def make_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.data.formats.WHOLE_BYTES", 0)
    monkeypatch.setattr("replay.data.formats.arrow.WHOLE_ROWS", 0)
    monkeypatch.setattr("replay.data.formats.arrow.ROWS_PER_BATCH", 7)


def one_jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_jsonl(folder, *rows, name="rows.jsonl"))


def one_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=max(64, len(rows) // 4)
    )
    return str(folder / "rows.parquet")


def shards(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "shards").mkdir(exist_ok=True)
    write_jsonl(folder / "shards", *rows[:100], name="a.jsonl")
    one_parquet(folder, rows[100:200])
    (folder / "rows.parquet").rename(folder / "shards" / "b.parquet")
    write_jsonl(folder / "shards", *rows[200:], name="c.jsonl")
    return str(folder / "shards")


def pattern(folder: Path, rows: list[dict[str, Any]]) -> str:
    write_jsonl(folder, *rows[:200], name="part-00.jsonl")
    write_jsonl(folder, *rows[200:], name="part-01.jsonl")
    return str(folder / "part-0?.jsonl")


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets", reason="extra datasets is not installed")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return str(folder / "rows")


def split_of_saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets", reason="extra datasets is not installed")
    data = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": data.select([0]), "held": data}).save_to_disk(str(folder / "splits"))
    return f"{folder / 'splits'}?split=held"


def own_class(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "mine.py").write_text(
        f"ROWS = {rows!r}\n\nclass Mine:\n    def __init__(self, first=0):\n        self.rows = ROWS[first:]\n"
        "    def __len__(self):\n        return len(self.rows)\n"
        "    def __getitem__(self, number):\n        return self.rows[number]\n\n"
        "def listed(first: int = 0):\n    return ROWS[first:]\n\n"
        "def any_options(**options):\n    return ROWS[options['first']:]\n\ndef lazy():\n    return iter(ROWS)\n"
    )
    return f"{folder / 'mine.py'}:Mine?first=0"


def own_function(folder: Path, rows: list[dict[str, Any]]) -> str:
    own_class(folder, rows)
    return f"{folder / 'mine.py'}:any_options?first=0"


FORMS: list[Callable[[Path, list[dict[str, Any]]], str]] = [
    one_jsonl, one_parquet, shards, pattern, saved, split_of_saved, own_class, own_function,
]  # fmt: skip


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.usefixtures("_size")
def test_each_form_gives_its_rows_by_number_and_in_order(tmp_path: Path, write: Any) -> None:
    given = write(tmp_path, RAW)
    rows = load_rows(given)
    assert len(rows) == 300
    for number in (299, 0, 150, 99, 100, 199, 200, 63, 64):
        assert (rows[number]["prompt"], rows[number]["ground_truth"]) == (f"é{number}", number)
        assert rows[number]["extra_info"] == {"n": [number, None]}
    assert rows[:] == list(read_rows(given))
    again = load_rows(given)
    assert again.fingerprint == rows.fingerprint and again[7] == rows[7]


@pytest.mark.parametrize("write", [one_jsonl, one_parquet, shards, saved])
@pytest.mark.usefixtures("_size")
def test_a_changed_file_has_another_fingerprint_and_a_copied_one_the_same(tmp_path: Path, write: Any) -> None:
    """Also where size and time of the last change are those of before."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = load_rows(write(tmp_path / "a", RAW))
    assert load_rows(write(tmp_path / "b", RAW)).fingerprint == before.fingerprint
    files = [file for file in (tmp_path / "a").rglob("*") if file.is_file()]
    times = {file.name: file.stat() for file in files}
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", [*RAW[:250], RAW[250] | {"answer": 251}, *RAW[251:]])
    for file in files:  # in place, as an editor does it
        file.write_bytes((tmp_path / "other" / file.relative_to(tmp_path / "a")).read_bytes())
        os.utime(file, ns=(times[file.name].st_atime_ns, times[file.name].st_mtime_ns))
    given = str(tmp_path / "a" / ("shards" if write is shards else files[0].name if write is not saved else "rows"))
    after = load_rows(given)
    assert after[250]["ground_truth"] == 251
    assert after.fingerprint != before.fingerprint


def test_a_saved_dataset_that_is_written_over_is_noticed(tmp_path: Path) -> None:
    """Its files are mapped, and saved again they would be other rows in the place of those that were hashed."""
    rows = load_rows(saved(tmp_path, RAW))
    assert rows[7]["ground_truth"] == 7
    saved(tmp_path, [row | {"answer": -1} for row in RAW])
    with pytest.raises(DataError, match="was changed while the run reads it"):
        rows[7]


@pytest.mark.usefixtures("_size")
def test_what_would_lose_a_value_is_refused(tmp_path: Path) -> None:
    twice = write_jsonl(tmp_path, RAW[0], '{"prompt": "a", "answer": 1, "prompt": "b"}', name="twice.jsonl")
    with pytest.raises(DataError, match="row 2: not readable as JSON: the key 'prompt' stands there twice"):
        load_rows(twice)
    table = pyarrow.Table.from_arrays([pyarrow.array([text]) for text in "abc"], names=["prompt", "answer", "prompt"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has two columns 'prompt'; remove one"):
        load_rows(tmp_path / "t.parquet")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="has no rows"):
        load_rows(tmp_path / "empty.parquet")


def test_broken_rows_of_a_large_file_wait_for_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_large(monkeypatch)
    monkeypatch.setattr("replay.data.dataset.SAMPLED", 3)
    rows: list[Any] = [*RAW]
    rows[17] = '{"prompt": "cut'
    source = PromptSource(load_rows(write_jsonl(tmp_path, *rows)), shuffle=False, seed=0)
    found = [source.next()[2] for _ in range(300)]
    assert [number for number, row in enumerate(found) if "broken" in row] == [17]
    assert "row 18" in found[17]["broken"] and "JSON" in found[17]["broken"]
    rows[-1] = '{"prompt": 7, "answer": 1}'  # the last row is in the sample
    with pytest.raises(DataError, match="row 300, column 'prompt'"):
        load_rows(write_jsonl(tmp_path, *rows))


SUFFIXED = {
    "rows.jsonl?suffix=Answer.": ("1+1= Answer.", "1+1? Answer."),
    'rows.jsonl?suffix="\\nAnswer."': ("1+1=\nAnswer.", "1+1?\nAnswer."),
}


@pytest.mark.parametrize("given", SUFFIXED)
@pytest.mark.usefixtures("_size")
def test_a_suffix_follows_every_prompt_and_is_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = {}
    for row, expected in zip(({"prompt": "1+1="}, {"question": "1+1?"}), SUFFIXED[given], strict=True):
        write_jsonl(tmp_path, *[row | {"answer": 2}] * 3, name="rows.jsonl")
        assert load_rows(given)[1]["prompt"] in (expected, [{"role": "user", "content": expected}])
        assert next(read_rows(given)) == load_rows(given)[0]
        seen[expected] = load_rows(given).fingerprint
    assert load_rows("rows.jsonl").fingerprint not in seen.values()


def test_tasks_of_a_taskset_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace(model_dump=lambda **_: {"system_prompt": "Add.", "prompt": "1+1", "key": 7})
    package = SimpleNamespace(
        taskset_config_type=lambda name: SimpleNamespace(model_validate=lambda options: options),
        load_taskset=lambda options: [SimpleNamespace(data=data)] * options["many"],
    )
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(v1=package))
    monkeypatch.setitem(sys.modules, "verifiers.v1", package)
    found = load_rows("verifiers:sums?many=5&skip=1&rows=3")
    assert len(found) == 3 and [message["content"] for message in found[0]["prompt"]] == ["Add.", "1+1"]
    assert found[0]["columns"]["task"]["key"] == 7
    with pytest.raises(DataError, match="no task left"):
        load_rows("verifiers:sums?many=1&skip=1")
    package.load_taskset = lambda _: importlib.import_module("packages_of_that_taskset")
    with pytest.raises(DataError, match=r"No module named 'packages_of_that_taskset' \["):
        load_rows("verifiers:sums")
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(DataError, match="extra `verifiers`"):
        load_rows("verifiers:sums")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rows.jsonl?seed=1", "files take no option but suffix; leave out seed"),
        ("none.jsonl", "no such file"),
        ("part-*.jsonl", "no file is named like that"),
        ("empty", "is a folder without a file that ends in .jsonl, .parquet"),
        ("packed.jsonl.zst", "is compressed; unpack it"),
        ("splits?split=tast", "has no split 'tast'; add ?split= with one of train, held"),
        ("splits?splat=held", "unknown option 'splat'"),
        ("mine.py:Other", "has no function 'Other'; it has Mine"),
        ("mine.py:Mine?second=1", "has no option 'second'"),
        ("mine.py:listed?frist=1", "has no option 'frist'; did you mean 'first'"),
        ("mine.py:listed?first=many", "option 'first' of 'mine.py:listed': Input should be a valid integer"),
        ("mine.py:lazy", "lazy gives a list_iterator without __getitem__; return a list of rows"),
        ("gone.py:Mine", "no file 'gone.py'"),
        ("raises.py:Mine", "importing raises.py fails: ZeroDivisionError"),
        ("reasoning_gym:chain_sam", "no family 'chain_sam'; it has"),
        ("reasoning_gym:chain_sum?min_termz=2", "refuses this: TypeError"),
        ("reasoning_gym:chain_sum?min_terms=9", "refuses this: AssertionError: max_terms must be"),
        ("reasoning_gym:chain_sum?level=99", "level is 99; take 0 to 10"),
        ("reasoning_gym:chain_sum?level=1&min_terms=1", "min_terms follows from the level"),
        ("reasoning_gym:chain_sum?seed=x", "seed is 'x'; give an integer"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str) -> None:
    if given.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym", reason="extra reasoning-gym is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "packed.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "raises.py").write_text("1 / 0")
    one_jsonl(tmp_path, RAW[:2])
    own_class(tmp_path, RAW[:2])
    if given.startswith("splits"):
        split_of_saved(tmp_path, RAW[:2])
    with pytest.raises(DataError) as raised:
        load_rows(given)
    assert said in str(raised.value) and str(raised.value).startswith((given, given.partition("?")[0]))
