"""Which checkpoints stay: the newest, whole, and those of the best evaluations, as weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.learner import Checkpoint
from learner.checkpoints.folders import MARK, CheckpointError, incomplete, latest_complete, mark_complete, weights_only
from learner.checkpoints.retention import Best, choose, prune
from learner.learner import Learner
from replay.messages import Checkpointed
from slipstream.view.check_export import newest_checkpoint

SCORE = "val-core/sort6/greedy"


def settings(keep: int = 1, keep_best: int = 1, best_is: str = "max") -> Checkpoint:
    return Checkpoint(keep=keep, keep_best=keep_best, best_metric=SCORE, best_is=best_is)


PARTS = (
    "dcp/.metadata",
    "critic/dcp/x",
    "critic/part.json",
    "reference/dcp/x",
    "teachers/old/dcp/x",
    "hf/model.safetensors",
    "state.json",
)


def written(parent: Path, step: int) -> Path:
    """A checkpoint of a byte a file."""
    folder = parent / f"step_{step}"
    for name in PARTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    mark_complete(folder)
    return folder


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.glob("step_*"))


STATES = st.sampled_from(["whole", "weights", "broken"])


@given(st.dictionaries(st.integers(0, 20), STATES), st.integers(1, 4), st.sets(st.integers(0, 20), max_size=3))
def test_the_newest_stay_and_what_is_wanted_and_nothing_else(found, keep, wanted):
    newest, weights = choose(found, keep, wanted)
    whole = sorted((step for step, state in found.items() if state == "whole"), reverse=True)
    assert newest == whole[:keep] and len(newest) + len(weights) <= keep + len(wanted)
    usable = {step for step, state in found.items() if state != "broken"}
    assert set(weights) == (wanted & usable) - set(newest)


@pytest.mark.parametrize(("best_is", "ranking"), [("max", [1, 3, 2]), ("min", [3, 2, 1])])
def test_of_equal_scores_the_newer_is_better(best_is, ranking):
    best = Best(settings(best_is=best_is))
    best.scores = {1: 0.5, 2: 0.2, 3: 0.2}
    assert best.ranking(range(5)) == ranking


def test_an_old_best_keeps_its_weights_alone(tmp_path):
    best = Best(settings(keep=2))
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.8), (50, None)):
        best.expect(step)
        written(tmp_path, step)
        if score is not None:
            best.record(step, {SCORE: score})
        newest = prune(tmp_path, best)
    assert newest == [50, 40] and names(tmp_path) == ["step_20", "step_40", "step_50"]
    kept = tmp_path / "step_20"
    assert not incomplete(kept) and weights_only(kept)
    assert sorted(path.name for path in kept.iterdir()) == ["COMPLETE", "hf", "state.json"]
    assert (tmp_path / "best").resolve() == kept
    listed = json.loads((tmp_path / "best.json").read_text())
    assert listed == {"metric": SCORE, "best_is": "max", "checkpoints": [{"step": 20, "value": 0.9}]}
    best.record(50, {SCORE: 0.95})  # the last evaluation comes after the last checkpoint
    assert prune(tmp_path, best) == [50, 40] and names(tmp_path) == ["step_40", "step_50"]
    assert (tmp_path / "best").resolve().name == "step_50"


def test_a_run_does_not_go_on_from_weights_alone_and_keeps_a_broken_newer_one(tmp_path):
    parent, best = tmp_path / "checkpoints", Best(settings())
    best.record(1, {SCORE: 1.0})
    for step in (1, 2):
        written(parent, step)
        prune(parent, best)
    (written(parent, 3) / "state.json").write_text("cut short")
    assert prune(parent, best) == [2] and names(parent) == ["step_1", "step_2", "step_3"]
    assert latest_complete(tmp_path)[0] == parent / "step_2"
    (parent / "step_2" / "state.json").unlink()
    assert latest_complete(tmp_path)[0] is None


def test_a_resumed_run_waits_on_for_the_evaluations_of_earlier_checkpoints(tmp_path):
    """An evaluation may take longer than steps to the next checkpoint, and the learner be killed after that."""
    parent, best = tmp_path / "checkpoints", Best(settings())
    for step in (10, 20, 30, 40):
        written(parent, step)
    rows = [{"version": 10, SCORE: 0.5}, {"version": 20, "val-aux/sort6/greedy/given_up": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert best.read(tmp_path, 40) == [30], "of version 40 the learner speaks anyway"
    best.expect(40)
    assert prune(parent, best) == [40] and names(parent) == ["step_10", "step_30", "step_40"]
    best.record(30, {SCORE: 0.9})
    assert prune(parent, best) == [40] and names(parent) == ["step_30", "step_40"]
    assert Best(settings(keep_best=0)).read(tmp_path, 40) == []


def test_the_link_to_the_best_goes_with_it(tmp_path):
    best = Best(settings())
    best.record(20, {SCORE: 0.9})
    for step in (10, 20):
        written(tmp_path, step)
    prune(tmp_path, Best(settings(keep=2)))
    prune(tmp_path, best)
    assert (tmp_path / "best").resolve().name == "step_20"
    (tmp_path / "step_20").rename(tmp_path / "step_20.rolled_back_1")
    written(tmp_path, 10)
    prune(tmp_path, Best(settings()))
    assert not (tmp_path / "best").is_symlink()
    assert json.loads((tmp_path / "best.json").read_text())["checkpoints"] == []


def test_the_export_that_is_checked_is_of_no_checkpoint_that_was_rolled_back(tmp_path):
    parent = tmp_path / "checkpoints"
    written(parent, 8)
    written(parent, 12).rename(parent / "step_12.rolled_back_1")
    assert newest_checkpoint(tmp_path) == parent / "step_8"
    (parent / "step_8" / MARK).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is complete yet"):
        newest_checkpoint(tmp_path)


def test_a_metric_that_evaluations_do_not_have_is_refused():
    best = Best(settings())
    best.expect(0)
    best.record(0, {"val-core/sort6/sampled": 0.5})
    with pytest.raises(CheckpointError, match=r"'val-core/sort6/greedy' is not among what .*: val-core/sort6/sampled"):
        best.closed({0: ""})


@pytest.mark.parametrize("of_others", [{}, {"val-core/math/greedy": 0.5}])
@pytest.mark.parametrize("reason", ["not done within 5 s", ""])
def test_an_evaluation_that_was_given_up_has_no_score_and_the_run_goes_on(of_others, reason):
    """Without a reason, too: a set that came with a resumed run was not asked for then."""
    best = Best(settings())
    best.expect(10)
    best.record(10, of_others)
    best.record(10, {"val-aux/sort6/greedy/given_up": 1.0})
    assert best.wanted([10]) == {10}
    best.closed({10: reason})
    assert best.wanted([10]) == set() and best.scores == {}
    best.closed({10: reason})  # the learner says it at every step


# ---- when the learner writes one --------------------------------------------------------------------------


class Case(SimpleNamespace):
    """A learner's parts, as far as checkpoint_if_due needs them."""

    _settle = Learner._settle


def learner(*, writing: bool, every: int = 10, asynchronous: bool = True) -> Case:
    checkpoints = MagicMock(is_writing=writing)
    checkpoints.settle.return_value = None
    config = SimpleNamespace(
        checkpoint=Checkpoint(every_steps=every, asynchronous=asynchronous), learner=SimpleNamespace(total_steps=100)
    )
    ranks = SimpleNamespace(is_first=True, agree=lambda *values: list(values))
    return Case(
        config=config, checkpoints=checkpoints, ranks=ranks, batches=MagicMock(), beside=MagicMock(),
        span=MagicMock(), guards=MagicMock(), teachers=MagicMock(), _masters="d", _saved={}, _plan={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "is_asked_for", "case", "waits", "starts"),
    [
        (11, False, learner(writing=False), [], False),
        (11, False, learner(writing=True), [False], False),
        (20, False, learner(writing=False), [True, False], True),
        (20, False, learner(writing=True), [True, False], True),
        (20, False, learner(writing=False, asynchronous=False), [True, True], True),
        (100, False, learner(writing=True, every=0), [True, True], True),
        (11, True, learner(writing=False), [True, False], True),
        (11, True, learner(writing=True), [False], False),  # replay asks until the journal is freed
    ],
)
def test_a_step_waits_only_for_an_earlier_checkpoint_and_at_the_end(step, is_asked_for, case, waits, starts):
    Learner.checkpoint_if_due(case, SimpleNamespace(step=step, checkpoint=is_asked_for))
    assert case.checkpoints.settle.mock_calls == [call(wait=wait) for wait in waits]
    assert case.checkpoints.start.called == starts and not case.batches.announce.called
    waited = call("checkpoint_wait") in case.span.mock_calls
    assert waited == (starts and case.checkpoints.is_writing)


def test_the_journal_is_freed_only_by_a_complete_checkpoint():
    case = learner(writing=True)
    case.checkpoints.settle.return_value = SimpleNamespace(step=10, kept=[10, 5], metrics={"checkpoint/step": 10})
    Learner.checkpoint_if_due(case, SimpleNamespace(step=12, checkpoint=False))
    case.batches.announce.assert_called_once_with(Checkpointed(step=10, kept=[10, 5]))
    assert case._saved == {"checkpoint/step": 10}
