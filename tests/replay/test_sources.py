"""A run over several datasets and curricula goes on from its journal exactly; broken rows cost one drop each."""

from pathlib import Path
from typing import Any

import pytest

from replay import messages as m
from replay.data import DataError, PromptSource, WeightedRows, load_rows
from replay.journal import JournalError
from replay.service import Service
from replay.state.apply import boot_fields
from replay.state.line import TakenGroup
from rollout_server.tasks.rewards.loading import load_function
from tests.replay.simulated_run import config, group_message, joins, learner, lease, make_step
from tests.replay.simulation.journal import SimulatedJournal
from tests.replay.simulation.world import comparable, rows
from tests.replay.test_prompts import jsonl

SIZES, WEIGHTS = (5, 9), (1.0, 2.0)


def source(curriculum: str, weights: tuple[float, ...] = WEIGHTS) -> PromptSource:
    parts = [
        WeightedRows(f"s{n}", rows(size), weight) for n, (size, weight) in enumerate(zip(SIZES, weights, strict=True))
    ]
    return PromptSource(parts, shuffle=True, seed=0, curriculum=curriculum)


def served(journal: SimulatedJournal, made: PromptSource, **overrides: Any) -> Service:
    return Service(config(**overrides), made, {"": rows(1)}, 0.0, journal=journal)


def started(made: Service) -> Service:
    made.journal.append("boot", boot_fields(made.config, made.run.source.state(), 1))
    learner(made, "l")
    joins(made, "a")
    return made


def again(made: Service, *, curriculum: str, from_start: bool, **more: Any) -> Service:
    journal = made.journal.crash(None)  # type: ignore[attr-defined]
    other = served(journal, source(curriculum, **more))
    other.restore(list(journal.records[0 if from_start else journal.newest_snapshot() :]), 100.0)
    return other


@pytest.mark.parametrize("curriculum", ["none", "pass_rate"])
def test_a_restart_goes_on_with_the_same_prompts(curriculum: str) -> None:
    made = started(served(SimulatedJournal(), source(curriculum)))
    trained: list[TakenGroup] = []
    for step in range(1, 16):  # several passes, and a checkpoint in between
        made.handle("l", m.Take(step=step, rank=0), 0.0)
        for number, given in enumerate(lease(made, capacity=50, version=step - 1)):
            reward = float((given.index + number) % 3 > 0)
            made.handle("a", group_message(given, [step - 1], reward=reward, n=2), 0.0)
        trained += made.buffer.line.steps[step].groups
        made.handle("l", m.Committed(step=step, digest=f"d{step}"), 0.0)
        if step in (7, 12):
            made.handle("l", m.Checkpointed(step=step, kept=[step]), 0.0)
        for from_start in (False, True):
            other = again(made, curriculum=curriculum, from_start=from_start)
            assert comparable(other) == comparable(made)
    ids = [taken.group_id for taken in trained]
    assert len(set(ids)) == len(ids) == 60
    assert max(pass_ for pass_, _ in ids) >= 3
    fresh = source(curriculum).state()["walks"][0].get("rates")
    assert (made.run.source.state()["walks"][0].get("rates") != fresh) == (curriculum == "pass_rate")


def test_another_weight_or_curriculum_is_refused() -> None:
    made = started(served(SimulatedJournal(), source("pass_rate")))
    make_step(made, 1)
    with pytest.raises(JournalError, match=r"data\.train \(weights\) and data\.curriculum: .*pass_rate.*none"):
        again(made, curriculum="none", from_start=True)
    with pytest.raises(JournalError, match="weights"):
        again(made, curriculum="pass_rate", from_start=True, weights=(2.0, 1.0))


def large(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: Any) -> PromptSource:
    monkeypatch.setattr("replay.data.formats.WHOLE_BYTES", 0)
    monkeypatch.setattr("replay.data.dataset.SAMPLED", 2)
    made = load_rows(jsonl(folder, *lines))
    return PromptSource(made, shuffle=False, seed=0)


def test_a_broken_row_is_left_out_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [{"prompt": f"p{n}", "answer": n} for n in range(12)]
    data = large(tmp_path, monkeypatch, *good[:3], "{", {"prompt": 7}, *good[5:])
    made = started(served(SimulatedJournal(), data))
    given = lease(made, capacity=50)
    assert [each.index for each in given] == [0, 1, 2, 5, 6, 7, 8, 9]
    assert made.counters["dropped/broken_row"] == 2 and "row 5, column 'prompt'" in made.leasing.last_drop
    assert made.report.batch_stats()["prompts/left_out/broken_row"] == 2.0
    assert made.report.batch_stats()["prompts/data_loading_s"] > 0
    other = served(made.journal.crash(None), data)  # type: ignore[attr-defined]
    data.restore(data.state() | {"walks": [{"drawn": 0}]})
    other.restore(list(other.journal.records), 100.0)  # type: ignore[attr-defined]
    assert comparable(other) == comparable(made)


@pytest.mark.parametrize("is_large", [False, True])
def test_skipped_rows_keep_their_numbers_and_are_never_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr("replay.data.formats.WHOLE_BYTES", 0)
    lines: list[Any] = [{"prompt": f"p{n}", "answer": n} for n in range(12)]
    lines[0], lines[3], lines[4] = "{", {"prompt": 7}, {"answer": "no prompt"}
    rows = load_rows(jsonl(tmp_path, *lines), on_broken="skip")
    assert len(rows) == 12 and rows[5]["ground_truth"] == 5
    (said,) = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert "3 of 12 rows" in said and all(f"row {number}" in said for number in (1, 4, 5))
    made = started(served(SimulatedJournal(), PromptSource(rows, shuffle=False, seed=0)))
    assert [each.index for each in lease(made, capacity=50)] == [1, 2, 5, 6, 7, 8, 9, 10]
    again = served(made.journal.crash(None), PromptSource(rows, shuffle=False, seed=0))  # type: ignore[attr-defined]
    again.restore(list(again.journal.records), 100.0)  # type: ignore[attr-defined]
    assert comparable(again) == comparable(made)
    with pytest.raises(DataError, match=r"none of its 2 rows can be used: row 1: .*row 2"):
        load_rows(jsonl(tmp_path, "{", "["), on_broken="skip")


def test_a_pass_of_broken_rows_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"prompt": "p", "answer": 1}
    made = started(served(SimulatedJournal(), large(tmp_path, monkeypatch, good, *["{"] * 12, good)))
    for given in lease(made, capacity=50):
        made.handle("a", m.Cancel(pass_=0, index=given.index, attempt=1, reason="prompt_too_long"), 1.0)
    assert made.failed and "broken_row" in str(made.ended)


@pytest.mark.parametrize(
    "family",
    [
        "chain_sum?seed=3&level=1",
        "spell_backward?seed=3",
        "gsm_symbolic?seed=3",
        'basic_arithmetic?seed=3&operators=["+","-"]',
        "time_intervals?seed=3&task_types=[date, time]",
        "time_intervals?seed=3&min_date=2020-01-01&max_date='2021-06-30'&min_time='08:30'",
        "time_intervals?seed=3&level=1&min_date=2020-01-01",
    ],
)
def test_a_right_answer_of_a_generated_row_scores_one(family: str) -> None:
    pytest.importorskip("reasoning_gym", reason="extra reasoning-gym is not installed")
    judge = load_function("reasoning_gym").call
    data = load_rows(f"reasoning_gym:{family}")
    for number in (0, 777):
        row = data[number]
        answer = {**row, "completion": f"so <answer>{row['ground_truth']}</answer>.", "num_tokens": 3}
        assert judge(answer | {"finish_reason": "stop"}) == 1.0
        assert judge(answer | {"finish_reason": "stop", "completion": "no idea"}) < 0.5
        assert judge(answer | {"completion": f" {row['ground_truth']}\n"}) == 1.0
    with pytest.raises(ValueError, match="extra_info has no 'reasoning_gym'"):
        judge(answer | {"extra_info": {}})
