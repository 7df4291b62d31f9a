"""Several datasets, and curricula: exact shares, exact coverage, exact resume."""

import base64
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.data import DataError, PromptSource, Rows, WeightedRows, load_rows
from replay.data import order as orders
from tests.replay.simulation.world import rows as rows_of
from tests.replay.test_prompts import jsonl


def graded(count: int, key: str = "difficulty") -> list[dict[str, Any]]:
    return [row | {"columns": {key: (7 * n) % 5}} for n, row in enumerate(rows_of(count))]


def mixed(sizes: list[int], weights: list[float] | None = None, **more: Any) -> PromptSource:
    given = weights or [None] * len(sizes)
    parts = [
        WeightedRows(f"s{n}", graded(size), weight) for n, (size, weight) in enumerate(zip(sizes, given, strict=True))
    ]
    return PromptSource(parts, **({"shuffle": True, "seed": 3} | more))


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Through a snapshot and a checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(msgpack.unpackb(msgpack.packb(state))))
    return found


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    curriculum=st.sampled_from(["none", "difficulty", "pass_rate"]),
    draws=st.integers(0, 60),
)
def test_shares_are_exact_passes_cover_and_ids_are_unique(
    sizes: list[int], weights: list[float], curriculum: str, draws: int
) -> None:
    weights = weights[: len(sizes)]
    source = mixed(sizes, weights, curriculum=curriculum)
    found = []
    for count in range(1, draws + 1):
        pass_, index, row = source.next()
        assert row == source.row(index)
        found.append((pass_, index))
        source.scored(index, (index % 3) / 2)
        drawn = [walk.drawn for walk in source.walks]
        shares = [count * weight / sum(weights) for weight in weights]
        assert all(share - len(sizes) + 1 < n + 1e-6 and n < share + 1 for n, share in zip(drawn, shares, strict=True))
    assert len(set(found)) == len(found)
    for which, size in enumerate(sizes):
        own = [(pass_, index // len(sizes)) for pass_, index in found if index % len(sizes) == which]
        for number in range(len(own) // size):
            assert sorted(own[number * size : (number + 1) * size]) == [(number, row) for row in range(size)]


@settings(max_examples=40)
@given(
    curriculum=st.sampled_from(["none", "difficulty", "pass_rate"]),
    before=st.integers(0, 50),
    rates=st.lists(st.floats(0, 1), min_size=50, max_size=50),
)
def test_every_order_resumes_exactly(curriculum: str, before: int, rates: list[float]) -> None:
    def walked(source: PromptSource, count: int) -> list[tuple[int, int, Any]]:
        found = []
        for _ in range(count):
            found.append(source.next())
            source.scored(found[-1][1], rates[found[-1][1] % 50])
        return found

    source, resumed = (mixed([4, 7], [1, 2], curriculum=curriculum) for _ in range(2))
    walked(source, before)
    resumed.restore(plain(source.state()))
    assert resumed.state() == source.state()
    assert walked(resumed, 40) == walked(source, 40)


def test_a_column_orders_every_pass_and_a_row_without_it_is_named() -> None:
    source = PromptSource(graded(20), shuffle=True, seed=0, curriculum="difficulty")
    for _ in range(2):
        values = [source.next()[2]["columns"]["difficulty"] for _ in range(20)]
        assert values == sorted(values)
    rows = graded(20)
    rows[3]["columns"]["difficulty"] = "hard"
    with pytest.raises(DataError, match=r"data\.curriculum: 'difficulty': row 4 has 'hard' there"):
        PromptSource(rows, shuffle=True, seed=0, curriculum="difficulty")


def test_a_later_pass_begins_with_prompts_that_were_solved_sometimes() -> None:
    source = PromptSource(rows_of(6), shuffle=True, seed=0, curriculum="pass_rate")
    first = [source.next()[1] for _ in range(6)]
    for index, rate in enumerate([0.0, 0.5, 1.0, 0.25, 0.9]):  # the last one never came back
        source.scored(index, rate)
    assert sorted(first) == list(range(6))
    again = [source.next()[1] for _ in range(6)]
    assert set(again[:2]) != {1, 5}  # scores came after the pass had begun
    third = [source.next()[1] for _ in range(6)]
    assert set(third[:2]) == {1, 5} and third[2:4] == [3, 4] and set(third[4:]) == {0, 2}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (mixed([5, 6], [1, 3]), "weights"),
        (mixed([5, 6], [1, 2], curriculum="difficulty"), "curriculum"),
        (mixed([6, 5], [1, 2]), "hash of the contents"),
        (mixed([5, 6], [1, 2], seed=4), "run.seed"),
    ],
)
def test_other_datasets_weights_and_curricula_are_refused(other: PromptSource, named: str) -> None:
    source = mixed([5, 6], [1, 2])
    with pytest.raises(DataError, match=named):
        source.restore(other.state())


@pytest.mark.parametrize("walks", [[], [{"drawn": 1}], [{"drawn": 1}, {"drawn": -1}], [{"drawn": 1}, {}], "x"])
def test_a_broken_state_changes_nothing(walks: Any) -> None:
    source = mixed([5, 6], [1, 2])
    source.next()
    before = source.state()
    with pytest.raises(DataError, match="prompt state is broken"):
        source.restore(before | {"walks": walks})
    assert source.state() == before


@pytest.mark.parametrize("rates", ["AAAA", base64.b64encode(zlib.compress(b"1234567")[:-7]).decode(), "!", 7])
def test_broken_pass_rates_change_nothing(rates: Any) -> None:
    source = PromptSource(rows_of(7), shuffle=True, seed=0, curriculum="pass_rate")
    before = source.state()
    with pytest.raises(DataError, match="prompt state is broken"):
        source.restore(before | {"walks": [before["walks"][0] | {"rates": rates}]})
    assert source.state() == before


def test_beside_rows_without_end_all_have_weights(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="extra reasoning-gym is not installed")
    sums = load_rows("reasoning_gym:chain_sum?seed=1")
    with pytest.raises(DataError, match=r"data\.train\.a: has no weight, and b has rows without end"):
        PromptSource([WeightedRows("a", rows_of(2)), WeightedRows("b", sums)], shuffle=True, seed=0)
    source = PromptSource([WeightedRows("a", rows_of(2), 1), WeightedRows("b", sums, 3)], shuffle=True, seed=0)
    drawn = Counter(source.next()[2]["data_source"] for _ in range(40))
    assert drawn["chain_sum"] == 30 and isinstance(source.walks[1].rows, Rows)
    with pytest.raises(DataError, match="cannot be sorted"):
        PromptSource(sums, shuffle=True, seed=0, curriculum="difficulty")
    with pytest.raises(DataError, match="never come again"):
        mine = jsonl(tmp_path, name="mine.py")
        mine.write_text("class Mine:\n    def __getitem__(self, n):\n        return {'prompt': str(n), 'answer': n}\n")
        PromptSource(load_rows(f"{mine}:Mine"), shuffle=True, seed=0, curriculum="pass_rate")


def test_pass_rates_of_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "RATED_ROWS", 5)
    with pytest.raises(DataError, match=r"data\.curriculum: pass_rate keeps a byte for each of 6 rows"):
        PromptSource(rows_of(6), shuffle=True, seed=0, curriculum="pass_rate")
